"""Updates that announce themselves: headers parsed as data, and state dicts that arrive over Gloo."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.weight_sync.group.test_process_group import BOUND, Server, SilentMember, assert_equal, trainer_of
from tests.weight_sync.prime_rl_trainer import StateDict, broadcasts, number, pickled_header
from verl_server.errors import BadRequestError, WeightUpdateError
from verl_server.weight_sync.group.group_connection import Lifeline, in_thread
from verl_server.weight_sync.group.process_group import WeightGroup
from verl_server.weight_sync.group.state_dicts import MOST_HEADER_BYTES, MOST_STATE_DICTS, read_header, read_number

MIXED: StateDict = {
    "a": torch.randn(5, 3).bfloat16(),
    "norm": torch.randn(7),
    "b": torch.randn(2, 2, 2).bfloat16(),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_header_gives_the_layout(protocol: int) -> None:
    header = pickle.dumps(pickle.loads(pickled_header(MIXED)), protocol)
    window = read_header(header)
    assert window.names == ["a", "b", "norm", "scalar", "empty"], "the tensors of one dtype are sent together"
    assert [size for _, size in window.parts()] == [(15 + 8) * 2, (7 + 1 + 0) * 4]


def header(*entry: Any, dtype: Any = torch.float32) -> bytes:
    return pickle.dumps({dtype: [entry]})


SIZE = torch.Size([2, 3])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickle.dumps(os.system), "posix.system is not allowed"),
        (header("a", SIZE, os.getcwd), "getcwd is not allowed"),
        (pickle.dumps({"float33": []}), "not a dict from dtypes"),
        (pickle.dumps([1]), "not a dict from dtypes"),
        (pickle.dumps({torch.float32: []}), "no list of tensors for float32"),
        (header("a", SIZE, 6, dtype=torch.complex64), "torch.complex64 is not allowed"),
        (header("a", SIZE), "not \\(name, shape"),
        (header("a", SIZE, 7), "7 elements do not fit the shape \\[2, 3\\]"),
        (header("a", SIZE, "6"), "no shape or number"),
        (header("a", [2, 3], 6), "no shape or number"),
        (header("a\n", SIZE, 6), "not the name"),
        (header("a" * 1001, SIZE, 6), "not the name"),
        (header("a", torch.Size([1] * 17), 1), "at most 16"),
        (header("a", torch.Size([2**40, 2**40]), 2**80), "do not fit"),
        (b"no pickle", "not a pickle"),
        (pickle.dumps({torch.float32: [("a", SIZE, 6)]})[:-1], "before seeing STOP"),
    ],
)
def test_other_headers_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        read_header(data)


def test_numbers_are_bounded() -> None:
    assert read_number((5).to_bytes(8, "little"), "state dicts", 5) == 5
    for value in (-1, 6, 2**62):
        with pytest.raises(BadRequestError, match="state dicts, which must be 0 to 5"):
            read_number(value.to_bytes(8, "little", signed=True), "state dicts", 5)


def received(group: WeightGroup) -> list[list[tuple[str, torch.Tensor]]]:
    return list(group.receive_state_dicts())


def test_state_dicts_arrive_at_every_rank_again_and_again() -> None:
    server = Server(size=2)
    with trainer_of(server) as trainer:
        for update in ([MIXED, {}, {"c": torch.randn(300, 40)}], [{"c": torch.zeros(3)}], []):
            arrivals = [in_thread(lambda group=group: received(group)) for group in server.groups]  # type: ignore[misc]
            trainer.broadcast(list(broadcasts(update)))
            for arrival in arrivals:
                windows = arrival.result(BOUND)
                assert len(windows) == sum(bool(state_dict) for state_dict in update)
                expected = {name: tensor for state_dict in update for name, tensor in state_dict.items()}
                found = {name: tensor for window in windows for name, tensor in window}
                assert_equal([list(found.items())], {name: expected[name] for name in found})
                assert found.keys() == expected.keys()


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (lambda: [number(MOST_STATE_DICTS + 1)], "state dicts, which must be"),
        (lambda: [number(-1)], "-1 state dicts"),
        (lambda: [number(1), number(MOST_HEADER_BYTES + 1)], "bytes of a header"),
        (lambda: broadcasts([MIXED], {0: pickle.dumps(os.system)}), "posix.system is not allowed"),
    ],
)
def test_an_announcement_that_is_refused_breaks_the_group(sent: Callable[[], list[torch.Tensor]], message: str) -> None:
    server = Server()
    with trainer_of(server) as trainer:
        [group] = server.groups
        sending = in_thread(lambda: trainer.broadcast(sent()))
        with pytest.raises(BadRequestError, match=message):
            received(group)
        with pytest.raises(WeightUpdateError, match="broken"):
            received(group)
        with contextlib.suppress(RuntimeError):
            sending.result(BOUND)


def test_more_than_memory_holds_is_an_error() -> None:
    server = Server()
    with trainer_of(server) as trainer:
        [group] = server.groups
        size = torch.Size([2**45])
        data = header("a", size, size.numel())
        sending = in_thread(
            lambda: trainer.broadcast(
                [number(1), number(len(data)), torch.frombuffer(bytearray(data), dtype=torch.uint8)]
            )
        )
        with pytest.raises(WeightUpdateError, match="failed"):
            received(group)
        assert group.broken
        with contextlib.suppress(RuntimeError):
            sending.result(BOUND)


def test_a_trainer_that_ends_after_a_header() -> None:
    server = Server()
    with trainer_of(server) as trainer:
        [group] = server.groups
        arrival = in_thread(lambda: received(group))
        trainer.broadcast(list(broadcasts([MIXED]))[:3])
        trainer.close()
        with pytest.raises(WeightUpdateError, match="'a' and 4 more"):
            arrival.result(BOUND)
        assert group.broken


def test_a_trainer_that_announces_nothing() -> None:
    member = SilentMember()
    group = WeightGroup("weights", member, Lifeline(), 0.2)
    with pytest.raises(WeightUpdateError, match=r"within 0\.2 s \(waited for the number of state dicts\)"):
        received(group)
    assert member.ended.is_set() and member.free_buffers == 1


def test_leaving_an_update_half_way_breaks_the_group() -> None:
    server = Server()
    with trainer_of(server) as trainer:
        [group] = server.groups
        sending = in_thread(lambda: trainer.broadcast(list(broadcasts([MIXED, MIXED]))))
        arriving = group.receive_state_dicts()
        next(arriving)
        arriving.close()  # type: ignore[attr-defined]
        assert group.broken == "an update was not received to its end"
        with contextlib.suppress(RuntimeError):
            sending.result(BOUND)
