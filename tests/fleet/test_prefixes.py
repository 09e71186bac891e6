"""The blocks of a prompt grow with it, and the index says which servers have seen how many of the first ones."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import pytest

from verl_server.fleet.prefixes import PrefixIndex, prompt_blocks

IDS = [random.Random(0).randrange(50_000) for _ in range(4000)]
TEXT = random.Random(1).randbytes(8000).hex()


def grown(name: str, first: Any, second: Any, before: dict[str, Any], after: dict[str, Any]) -> list[list[int]]:
    return [prompt_blocks(json.dumps(before | {name: value} | after).encode()) for value in (first, second)]


@pytest.mark.parametrize("before", [{}, {"model": "m", "sampling_params": {"temperature": 1.0, "stop": ["x"] * 50}}])
@pytest.mark.parametrize("after", [{}, {"rid": "one", "stream": True}])
@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("input_ids", IDS[:3000], IDS),
        ("prompt_token_ids", IDS[:3000], IDS),
        ("token_ids", IDS[:3000], IDS),
        ("text", TEXT[:9000], TEXT),
        ("prompt", TEXT[:9000], TEXT),
        ("input", TEXT[:9000], TEXT),
        (
            "messages",
            [{"role": "user", "content": TEXT[:9000]}],
            [{"role": "user", "content": TEXT[:9000]}, {"role": "assistant", "content": "yes"}],
        ),
    ],
)
def test_a_prompt_that_grows_keeps_its_blocks(
    name: str, first: Any, second: Any, before: dict[str, Any], after: dict[str, Any]
) -> None:
    shorter, longer = grown(name, first, second, before, after)
    common = sum(one == other for one, other in zip(shorter, longer, strict=False))
    assert common >= len(shorter) - 1 >= 7
    assert len(set(shorter)) == len(shorter)


def test_packed_ids_are_the_prompt() -> None:
    first, second = (struct.pack(f"<{count}i", *IDS[:count]) for count in (3000, 4000))
    shorter = prompt_blocks(first + b'{"rid": "a"}', len(first))
    longer = prompt_blocks(second + b'{"text": "b"}', len(second))
    assert len(shorter) == 3000 * 4 // 1024 and longer[: len(shorter)] == shorter
    assert prompt_blocks(first, 10**12)[: len(shorter)] == shorter


def test_another_beginning_has_other_blocks() -> None:
    one, other = prompt_blocks(b'"text"' + TEXT.encode()), prompt_blocks(b'"text"x' + TEXT.encode())
    assert not set(one) & set(other)


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 5000, b"\xff" * 3000, b'"text"'])
def test_any_bytes_have_blocks(body: bytes) -> None:
    assert len(prompt_blocks(body)) == len(body) // 1024


def test_the_blocks_of_a_prompt_are_bounded() -> None:
    assert len(prompt_blocks(b"x" * 3 * 2**20)) == 1024


def test_the_servers_that_know_a_beginning() -> None:
    index = PrefixIndex()
    blocks = list(range(10))
    index.add(blocks, "a")
    index.add(blocks[:4], "b")
    index.add([*blocks[:2], 99], "c")
    assert index.known(blocks) == {"a": 10, "b": 4, "c": 2}
    assert index.known([77]) == {} == index.known([])


def test_a_server_that_skips_a_block_knows_none_behind_it() -> None:
    index = PrefixIndex()
    index.add([1, 3], "a")
    index.add([1, 2, 3], "b")
    assert index.known([1, 2, 3]) == {"a": 1, "b": 3}


def test_a_server_that_was_renewed_knows_nothing_until_it_computes_again() -> None:
    index = PrefixIndex()
    for name in "ab":
        index.add([1, 2, 3], name)
    index.forget("a")
    assert index.known([1, 2, 3]) == {"b": 3}
    index.add([1], "a")
    assert index.known([1, 2, 3]) == {"a": 1, "b": 3}
    index.forget("b")
    assert index.known([1, 2, 3]) == {"a": 1}


def test_the_index_drops_what_was_not_used_for_the_longest_time() -> None:
    index = PrefixIndex(most_hashes=4)
    index.add([1, 2], "a")
    index.add([3, 4], "a")
    index.add([1, 2], "b")
    index.add([5, 6], "a")
    assert index.known([1, 2]) == {"a": 2, "b": 2}
    assert index.known([3]) == {} and index.known([5, 6]) == {"a": 2}
