"""`TokenTexts`: the text and the exact bytes of single tokens, encoded as JSON once for each token.

Log-probabilities name a token at every position, and up to hundreds of candidates beside it. So the JSON of a token is
kept: at most one entry for each token of the vocabulary.
"""

from __future__ import annotations

import orjson

from verl_server.grammar.token_bytes import speller
from verl_server.server.text.tokenizer import ModelText


class TokenTexts:
    """Texts and bytes of the tokens of one tokenizer."""

    def __init__(self, text: ModelText) -> None:
        self._decode = text.decoder(skip_special_tokens=False)
        self._spell = speller(getattr(text.tokenizer, "backend_tokenizer", None))
        self._texts: dict[int, str] = {}
        self._keys: dict[int, bytes] = {}
        self._heads: dict[tuple[int, bool], bytes] = {}

    def text(self, token: int) -> str:
        """Return the text of the token by itself. A part of a character has replacement characters."""
        found = self._texts.get(token)
        if found is None:
            found = self._texts[token] = self._decode([token])
        return found

    def spelling(self, token: int) -> bytes:
        """Return the bytes that the token stands for, also if they are only a part of a UTF-8 character."""
        spelled = self._spell(token)
        return spelled if spelled is not None else self.text(token).encode(errors="surrogatepass")

    def name(self, token: int, as_id: bool) -> str:
        """Return the text of the token or, with `as_id`, `token_id:<id>`."""
        return f"token_id:{token}" if as_id else self.text(token)

    def name_json(self, token: int, as_id: bool) -> bytes:
        """Return `name` as JSON."""
        if as_id:
            return b'"token_id:%d"' % token
        found = self._keys.get(token)
        if found is None:
            found = self._keys[token] = orjson.dumps(self.text(token))
        return found

    def entry_head(self, token: int, as_id: bool) -> bytes:
        """Return the beginning of the token's entry in a chat: {"token", "bytes", "logprob": and no value."""
        found = self._heads.get((token, as_id))
        if found is None:
            spelled = orjson.dumps(list(self.spelling(token)))
            found = b'{"token":%b,"bytes":%b,"logprob":' % (self.name_json(token, as_id), spelled)
            self._heads[token, as_id] = found
        return found
