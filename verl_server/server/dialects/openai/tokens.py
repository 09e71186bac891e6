"""`TokenTexts`: the text and the exact bytes of single tokens, encoded as JSON once for each token.

Log-probabilities name a token at every position, and up to hundreds of candidates beside it. So the JSON of a token is
kept: at most one entry for each token of the vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import orjson

from verl_server.server.tokenizer import ModelText

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token of one byte, as SentencePiece writes it."""


class TokenTexts:
    """Texts and bytes of the tokens of one tokenizer."""

    def __init__(self, text: ModelText) -> None:
        self._decode = text.decoder(skip_special_tokens=False)
        self._spell = _speller(text.tokenizer)
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


def _speller(tokenizer: Any) -> Callable[[int], bytes | None]:
    """Return a function from a token id to its bytes, or to None if only decoding can show them."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    kinds = _decoder_kinds(backend)
    read = _byte_level if "ByteLevel" in kinds else _byte_fallback if "ByteFallback" in kinds else None
    if read is None:
        return lambda token: None
    added = frozenset(backend.get_added_tokens_decoder())

    def spell(token: int) -> bytes | None:
        piece = None if token in added else backend.id_to_token(token)
        return None if piece is None else read(piece)

    return spell


def _decoder_kinds(backend: Any) -> set[str]:
    """Return the types of the decoders of a `tokenizers.Tokenizer`."""
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    parts = state.get("decoders", []) if state.get("type") == "Sequence" else [state]
    return {part.get("type", "") for part in parts}


def _byte_level(piece: str) -> bytes | None:
    """Return the bytes of a token whose characters each stand for a byte (GPT-2's alphabet)."""
    alphabet = _alphabet()
    if any(character not in alphabet for character in piece):
        return None
    return bytes(alphabet[character] for character in piece)


def _byte_fallback(piece: str) -> bytes | None:
    """Return the byte of a token such as <0xE4>, and the text of a piece with "▁" as a space."""
    if byte := _BYTE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    return piece.replace("▁", " ").encode()


@lru_cache(maxsize=1)
def _alphabet() -> dict[str, int]:
    """Return GPT-2's character for each byte: printable bytes stand for themselves, the others follow from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
