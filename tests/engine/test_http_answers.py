"""Bodies of answers: the frames of an event stream."""

from __future__ import annotations

import orjson
import pytest

from verl_server.engine.http_answers import FrameReader
from verl_server.errors import ServerUnavailableError

SEPARATORS = "\u2028\u2029\x85\x0b\x0c\x1c"


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_frames_are_split_at_newlines_only(size: int) -> None:
    frames = [{"text": f"{SEPARATORS}{i}"} for i in range(3)]
    stream = b"".join(b"data: " + orjson.dumps(frame) + b"\n\n" for frame in frames) + b"data: [DONE]\n\n"
    reader = FrameReader()
    found = [frame for at in range(0, len(stream), size) for frame in reader.feed(stream[at : at + size])]
    assert found == frames


def test_comments_and_crlf_are_read() -> None:
    assert FrameReader().feed(b': ping\r\n\r\nevent: x\r\ndata: {"a": 1}\r\n\r\ndata: [DONE]\r\n') == [{"a": 1}]


@pytest.mark.parametrize(
    "error", [b'{"error": {"message": "no", "code": 503}}', b'{"error": {"message": "no", "code": "503"}}']
)
def test_an_error_frame_is_raised(error: bytes) -> None:
    with pytest.raises(ServerUnavailableError, match="no"):
        FrameReader().feed(b"data: " + error + b"\n\n")
