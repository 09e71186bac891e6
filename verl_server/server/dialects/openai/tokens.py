"""`TokenTexts`: the text and the exact bytes of single tokens, encoded as JSON once for each token.

Log-probabilities have a token and up to hundreds of candidates at every position. So the JSON of each token is kept, at
most one entry for each token of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import orjson

from verl_server.grammar.token_bytes import speller
from verl_server.server.text.tokenizer import ModelText


class TokenTexts:
    """Texts and bytes of the tokens of one tokenizer."""

    def __init__(self, text: ModelText) -> None:
        decode = text.decoder(skip_special_tokens=False)
        self._spell = speller(getattr(text.tokenizer, "backend_tokenizer", None))
        self.text: Callable[[int], str] = cache(lambda token: decode([token]))
        """Returns the text of a single token.

        If the token is a part of a character, the text has replacement characters.
        """
        self._text_json: Callable[[int], bytes] = cache(lambda token: orjson.dumps(self.text(token)))
        self.entry_head: Callable[[int, bool], bytes] = cache(self._entry_head)
        """Returns the beginning of the token's entry in a chat, up to and including the key "logprob".

        The entry is {"token": ..., "bytes": ..., "logprob": ...}. The second argument is `as_id` of `name`.
        """

    def spelling(self, token: int) -> bytes:
        """Return the bytes of the token, which may be only a part of a UTF-8 character."""
        spelled = self._spell(token)
        return spelled if spelled is not None else self.text(token).encode(errors="surrogatepass")

    def name(self, token: int, as_id: bool) -> str:
        """Return the text of the token or, with `as_id`, `token_id:<id>`."""
        return f"token_id:{token}" if as_id else self.text(token)

    def name_json(self, token: int, as_id: bool) -> bytes:
        """Return `name` as JSON."""
        return b'"token_id:%d"' % token if as_id else self._text_json(token)

    def _entry_head(self, token: int, as_id: bool) -> bytes:
        spelled = orjson.dumps(list(self.spelling(token)))
        return b'{"token":%b,"bytes":%b,"logprob":' % (self.name_json(token, as_id), spelled)
