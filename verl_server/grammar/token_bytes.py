"""The bytes that the tokens of a `tokenizers.Tokenizer` stand for, read from its decoder.

`server/dialects/openai/tokens.py` reports them beside log-probabilities, and `compiler.py` compares them with what the
grammar library reads from the same tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token of one byte, as SentencePiece writes it."""

Speller = Callable[[int], bytes | None]
"""From a token id to its bytes, or to None if only decoding can show them, as for added tokens."""


def speller(backend: Any) -> Speller:
    """Return the speller of a `tokenizers.Tokenizer`. It knows nothing of other tokenizers."""
    decoder = getattr(backend, "decoder", None)
    kinds = decoder_kinds(json.loads(decoder.__getstate__())) if decoder is not None else set()
    # A decoder may have both: transformers writes SentencePiece's steps before ByteLevel for some GGUF files. Pieces of
    # byte-level BPE have one character for each byte, so no piece of theirs is for the other steps.
    read = _byte_level if "ByteLevel" in kinds else _byte_fallback if "ByteFallback" in kinds else None
    if read is None:
        return lambda token: None
    added = frozenset(backend.get_added_tokens_decoder())

    def spell(token: int) -> bytes | None:
        piece = None if token in added else backend.id_to_token(token)
        return None if piece is None else read(piece)

    return spell


def with_one_kind(tokenizer: bytes) -> bytes:
    """Return a tokenizer's JSON for a reader that follows the first kind of bytes that it finds in the decoder.

    A decoder of several steps that has ByteLevel becomes ByteLevel alone, which gives each token the same bytes.
    """
    content = json.loads(tokenizer)
    decoder = content.get("decoder")
    if not isinstance(decoder, dict) or decoder.get("type") != "Sequence":
        return tokenizer
    level = [part for part in decoder["decoders"] if part.get("type") == "ByteLevel"]
    return json.dumps(content | {"decoder": level[0]}).encode() if level else tokenizer


def decoder_kinds(decoder: dict[str, Any]) -> set[str]:
    """Return the types of the steps of a decoder, which is given as an object of JSON."""
    parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
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
