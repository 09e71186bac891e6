"""Bodies of requests, piece by piece."""

from __future__ import annotations

import pytest

from verl_server.web.bodies import Body


@pytest.mark.parametrize("pieces", [[], [b""], [b"a"], [b"", b"a"], [b"a", b""], [b"ab", b"c", b"", b"def"]])
def test_the_pieces_are_the_body(pieces: list[bytes]) -> None:
    body = Body()
    for piece in pieces:
        body.add(piece)
    assert body.whole() == body.whole() == b"".join(pieces) and body.size == len(b"".join(pieces))
    body.add(b"more")
    assert body.whole() == b"".join(pieces) + b"more"


def test_one_piece_is_not_copied() -> None:
    body, piece = Body(), b"x" * 1000
    body.add(piece)
    assert body.whole() is piece
