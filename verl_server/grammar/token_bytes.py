"""The bytes that the tokens of a `tokenizers.Tokenizer` stand for, read from its decoder.

`server/dialects/openai/tokens.py` reports them beside log-probabilities, and `compiler.py` compares them with what the
grammar library reads from the same tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token of one byte, as SentencePiece writes it."""

Spell = Callable[[str], bytes | None]
"""Converts a piece of the vocabulary into its bytes, or into None if the bytes follow from decoding only."""


def speller(backend: Any) -> Callable[[int], bytes | None]:
    """Return a function from a token of a `tokenizers.Tokenizer` to its bytes.

    It returns None for added tokens, and for all tokens of other tokenizers.
    """
    decoder = getattr(backend, "decoder", None)
    spell = spelling(json.loads(decoder.__getstate__())) if decoder is not None else None
    if spell is None:
        return lambda token: None
    added = frozenset(backend.get_added_tokens_decoder())

    def spell_token(token: int) -> bytes | None:
        piece = None if token in added else backend.id_to_token(token)
        return None if piece is None else spell(piece)

    return spell_token


def spelling(decoder: dict[str, Any] | None) -> Spell | None:
    """Return the function from pieces to bytes for a decoder (a JSON object). None for an unknown decoder."""
    kinds = {part.get("type") for part in _steps(decoder)}
    # A decoder may have both: transformers writes SentencePiece's steps before ByteLevel for some GGUF files. Pieces of
    # byte-level BPE have one character for each byte, so no piece of theirs is for the other steps.
    return _byte_level if "ByteLevel" in kinds else _byte_fallback if "ByteFallback" in kinds else None


def with_one_kind(content: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer's content.

    If its decoder has several steps, one of them ByteLevel, ByteLevel alone replaces it.

    ByteLevel alone decodes each token into the same bytes. A reader that uses the first kind of decoder that it finds
    then decodes correctly.
    """
    steps = _steps(content.get("decoder"))
    level = [part for part in steps if part.get("type") == "ByteLevel"]
    return content | {"decoder": level[0]} if level and len(steps) > 1 else content


def spelled_tokens(content: dict[str, Any], most: int) -> Iterator[tuple[int, bytes]]:
    """Yield at most `most` tokens, spread over the vocabulary of a tokenizer's content, with their bytes."""
    spell, vocab = spelling(content.get("decoder")), content["model"].get("vocab")
    if spell is None or not isinstance(vocab, dict):
        return
    added = {token["id"] for token in content.get("added_tokens") or ()}
    step = -(-len(vocab) // most)
    for piece, token in vocab.items():
        if token % step == 0 and token not in added and (spelled := spell(piece)) is not None:
            yield token, spelled


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return list(decoder.get("decoders", ())) if decoder.get("type") == "Sequence" else [decoder]


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
