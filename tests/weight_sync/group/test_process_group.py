"""Weight groups over Gloo and NCCL: tensors that arrive, requests that are refused, and waits that are bounded."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from tests import fork_server
from tests.depth import at_depth
from tests.weight_sync.group_trainer import SHAPES, tensors
from verl_server.errors import BadRequestError, VerlServerError, WeightUpdateError
from verl_server.ipc.readiness import wait_readable
from verl_server.messages.weight_requests import InitWeightsUpdateGroupReq
from verl_server.weight_sync.group.broadcast import BroadcastGroup, broadcast_weights, init_weights_update_group
from verl_server.weight_sync.group.group_connection import Lifeline, in_thread
from verl_server.weight_sync.group.process_group import WeightGroup

CPU = torch.device("cpu")
BOUND = 30.0
NAMES, SHAPE_LIST = list(SHAPES), list(SHAPES.values())
DTYPES = ["float32"] * len(SHAPES)


class Server:
    """An engine of `size` server ranks, each of which is a thread."""

    def __init__(self, size: int = 1, timeout: float = BOUND, window_bytes: int = 1 << 20) -> None:
        self.size, self.timeout, self.window_bytes = size, timeout, window_bytes
        self.groups: list[WeightGroup] = []
        self.windows: list[list[list[tuple[str, torch.Tensor]]]] = []

    def init_weights_update_group(self, **fields: Any) -> None:
        req = InitWeightsUpdateGroupReq(**fields)

        def join(rank: int) -> Future[WeightGroup]:
            return in_thread(lambda: WeightGroup.join(req, rank, CPU, self.timeout))

        self.groups = [future.result(BOUND) for future in [join(rank) for rank in range(self.size)]]

    def update_weights_from_distributed(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], **options: Any
    ) -> str:
        def receive(group: WeightGroup) -> Future[Any]:
            arriving = group.receive(names, dtypes, shapes, options.get("load_format"), self.window_bytes)
            return in_thread(lambda: [[(name, tensor.clone()) for name, tensor in window] for window in arriving])

        self.windows = [future.result(BOUND) for future in [receive(group) for group in self.groups]]
        return "Success"

    def close(self) -> None:
        for group in self.groups:
            group.close()


@contextlib.contextmanager
def trainer_of(*servers: Server, name: str = "weights") -> Iterator[BroadcastGroup]:
    size = servers[0].size
    with init_weights_update_group(
        servers, "127.0.0.1", tp_size=size, backend="gloo", device="cpu", group_name=name, timeout=BOUND
    ) as group:
        yield group
    for server in servers:
        server.close()


class SilentMember:
    """A group member whose broadcasts never arrive."""

    def __init__(self) -> None:
        self.started, self.ended = threading.Event(), threading.Event()
        self.free_buffers = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def free(self, buffer: torch.Tensor) -> None:
        self.free_buffers += 1

    def receiving(self, buffer: torch.Tensor, parts: list[tuple[int, int]]) -> Callable[[], None]:
        def run() -> None:
            self.started.set()
            self.ended.wait(BOUND)

        return run

    def abort(self) -> None:
        self.ended.set()


class Trainer:
    """A child process that runs `group_trainer`."""

    def __init__(self, world_size: int = 2, name: str = "weights", backend: str = "gloo") -> None:
        self.world_size, self.name, self.backend = world_size, name, backend
        self.process = fork_server.run_module(
            "tests.weight_sync.group_trainer",
            backend,
            str(world_size),
            name,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self.line())

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def join(self, rank: int = 0, timeout: float = BOUND, device: torch.device = CPU) -> WeightGroup:
        req = InitWeightsUpdateGroupReq(
            master_address="127.0.0.1",
            master_port=self.port,
            rank_offset=1,
            world_size=self.world_size,
            group_name=self.name,
            backend=self.backend,
        )
        return WeightGroup.join(req, rank, device, timeout)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    process = Trainer()
    yield process
    process.end()


def assert_equal(windows: list[list[tuple[str, torch.Tensor]]], expected: dict[str, torch.Tensor]) -> None:
    found = [entry for window in windows for entry in window]
    assert [name for name, _ in found] == list(expected)
    for name, tensor in found:
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


# -- receiving ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", at_depth([2, 1]))
@pytest.mark.parametrize("engines", at_depth([2, 1]))
def test_every_rank_of_every_engine_receives(size: int, engines: int) -> None:
    weights = {
        "a": torch.randn(50, 40),
        "odd": torch.randn(7).bfloat16(),
        "b": torch.randn(3, 3),
        "strided": torch.randn(4, 6).t(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
    }
    servers = [Server(size) for _ in range(engines)]
    with trainer_of(*servers) as group:
        assert broadcast_weights(group, weights.items()) == ["Success"] * engines
        for server in servers:
            assert len(server.windows) == size
            for windows in server.windows:
                assert len(windows) == 1
                assert_equal(windows, weights)
        broadcast_weights(group, weights.items(), bucket_bytes=1 << 20)
        for server in servers:
            for windows in server.windows:
                assert_equal(windows, weights)


def test_windows_are_bounded_and_in_order() -> None:
    weights = {f"w{index}": torch.randn(100) for index in range(10)} | {"large": torch.randn(3000)}
    server = Server(window_bytes=4096)
    with trainer_of(server) as group:
        broadcast_weights(group, weights.items())
    [windows] = server.windows
    assert_equal(windows, weights)
    sizes = [sum(tensor.nbytes for _, tensor in window) for window in windows]
    assert len(windows) == 4 and max(sizes[:-1]) <= 2048 and sizes[-1] == 12_000


def test_buckets_take_tensors_as_they_come() -> None:
    calls: list[list[str]] = []

    class Noting(Server):
        def update_weights_from_distributed(self, names: list[str], *args: Any, **options: Any) -> str:
            calls.append(names)
            return super().update_weights_from_distributed(names, *args, **options)

    with trainer_of(Noting()) as group:
        broadcast_weights(group, ((f"w{index}", torch.randn(10)) for index in range(5)), bucket_bytes=80)
    assert calls == [["w0", "w1"], ["w2", "w3"], ["w4"]]


def test_the_next_window_arrives_while_the_caller_copies() -> None:
    server = Server(window_bytes=4096)
    weights = {f"w{index}": torch.randn(600) for index in range(2)}
    with trainer_of(server) as group:
        # Two windows: the trainer has sent both while the caller still holds the first.
        sending = in_thread(lambda: group.broadcast([tensor.view(torch.uint8) for tensor in weights.values()]))
        arriving = server.groups[0].receive(list(weights), ["float32"] * 2, [[600]] * 2, None, 4096)
        windows = [[(name, tensor.clone()) for name, tensor in next(arriving)]]
        sending.result(BOUND)
        windows += list(arriving)
        assert len(windows) == 2
        assert_equal(windows, weights)


def test_groups_of_several_names_live_side_by_side() -> None:
    one, two = Server(), Server()
    with trainer_of(one, name="one") as first, trainer_of(two, name="two") as second:
        broadcast_weights(second, [("w", torch.ones(3))])
        broadcast_weights(first, [("w", torch.zeros(3))])
    assert one.windows[0][0][0][1].sum() == 0 and two.windows[0][0][0][1].sum() == 3


def test_a_trainer_with_sglangs_recipe(trainer: Trainer) -> None:
    group = trainer.join()
    trainer.tell("bucket")
    assert_equal(list(group.receive(NAMES, DTYPES, SHAPE_LIST, "flattened_bucket", 1 << 20)), tensors())
    for dtype in ("float32", "bfloat16", "float16"):
        trainer.tell(dtype)
    dtypes = ["float32", "torch.bfloat16", "float16"]
    expected = {
        name: tensor.to(getattr(torch, dtype.removeprefix("torch.")))
        for (name, tensor), dtype in zip(tensors().items(), dtypes, strict=True)
    }
    assert_equal(list(group.receive(NAMES, dtypes, SHAPE_LIST, None, 1 << 20)), expected)
    group.close()


# -- faults ---------------------------------------------------------------------------------------------------


def test_a_trainer_that_dies_in_the_middle(trainer: Trainer) -> None:
    group = trainer.join()
    trainer.tell("float32")
    arriving = group.receive(NAMES, DTYPES, SHAPE_LIST, None, 100)
    assert next(arriving)[0][0] == "a"
    trainer.tell("die")
    with pytest.raises(WeightUpdateError, match=r"Receiving 'b' from|before 'b' arrived"):
        next(arriving)
    with pytest.raises(WeightUpdateError, match=r"broken.*Call destroy_weights_update_group, then init"):
        next(group.receive(NAMES, DTYPES, SHAPE_LIST, None, 100))
    group.close()
    server = Server()
    with trainer_of(server, name=trainer.name) as again:  # the name can be used again
        broadcast_weights(again, tensors().items())
    assert_equal(server.windows[0], tensors())


def test_a_trainer_that_dies_before_anything_came(trainer: Trainer) -> None:
    group = trainer.join()
    arrival = in_thread(lambda: list(group.receive(NAMES, DTYPES, SHAPE_LIST, None, 1 << 20)))
    trainer.tell("die")
    with pytest.raises(WeightUpdateError, match=r"went away|failed"):
        arrival.result(BOUND)
    assert group.broken
    group.close()


def test_a_group_knows_that_its_trainer_is_gone(trainer: Trainer) -> None:
    """Without any receive, so that the next trainer can join."""
    group = trainer.join()
    assert not group.has_ended
    trainer.end()
    group._lifeline.lost.result(BOUND)
    assert group.has_ended
    group.close()


def test_a_trainer_that_stalls() -> None:
    member = SilentMember()
    group = WeightGroup("weights", member, Lifeline(), 0.2)
    with pytest.raises(WeightUpdateError, match=r"within 0\.2 s \(waited for 'a' and 2 more\)"):
        list(group.receive(NAMES, DTYPES, SHAPE_LIST, None, 1 << 20))
    assert "within 0.2 s" in group.broken and member.ended.is_set() and member.free_buffers == 1


def test_a_trainer_that_leaves_in_good_order() -> None:
    server = Server()
    group = init_weights_update_group([server], "127.0.0.1", backend="gloo", device="cpu", timeout=BOUND)
    group.close()
    with pytest.raises(WeightUpdateError, match=r"went away|failed"):
        list(server.groups[0].receive(NAMES, DTYPES, SHAPE_LIST, None, 1 << 20))
    with pytest.raises(WeightUpdateError, match="is closed; call init_weights_update_group"):
        broadcast_weights(group, [("w", torch.ones(1))])
    server.close()


@pytest.mark.parametrize("announced", at_depth([50, 200]))
def test_a_broadcast_of_another_size(announced: int) -> None:
    """A broadcast of another size than announced is an error, which the server survives.

    With more bytes than announced, Gloo would end the process. With fewer, the broadcast would look complete.
    """
    server = Server()
    with trainer_of(server) as trainer:
        [group] = server.groups
        sending = in_thread(lambda: trainer.broadcast([torch.ones(400, dtype=torch.uint8)]))
        with pytest.raises(WeightUpdateError, match="broadcast"):
            list(group.receive(["a"], ["float32"], [[announced]], None, 1 << 20))
        assert group.broken
        with contextlib.suppress(RuntimeError):
            sending.result(BOUND)


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes", "load_format", "message"),
    [
        (["a", "b"], ["float32"], [[1], [1]], None, "2 names, 1 dtypes and 2 shapes"),
        ([], [], [], None, "0 names"),
        (["a"], ["float33"], [[1]], None, "'a': dtype 'float33' and shape"),
        (["a"], ["Tensor"], [[1]], None, "'a': dtype 'Tensor'"),
        (["a"], ["float32"], [[-1]], None, r"shape \[-1\] are no tensor's"),
        (["a"], ["float32"], [[2**30, 2**30]], None, "are no tensor's"),
        (["a"], ["float32"], [[1]], "direct", "load_format='direct' is not supported"),
    ],
)
def test_requests_that_describe_nothing_break_the_group(
    names: list[str], dtypes: list[str], shapes: list[list[int]], load_format: str | None, message: str
) -> None:
    member = SilentMember()
    group = WeightGroup("weights", member, Lifeline(), BOUND)
    with pytest.raises(BadRequestError, match=message):
        next(group.receive(names, dtypes, shapes, load_format, 100))
    assert member.ended.is_set()
    with pytest.raises(WeightUpdateError, match="broken"):  # because the trainer may be broadcasting already
        next(group.receive(["a"], ["float32"], [[1]], None, 100))


def test_more_than_memory_holds_is_an_error() -> None:
    server = Server()
    with trainer_of(server):
        [group] = server.groups
        with pytest.raises(WeightUpdateError, match="failed"):
            next(group.receive(["a"], ["float64"], [[2**47]], "flattened_bucket", 100))
        assert group.broken


def test_leaving_an_update_half_way_breaks_the_group() -> None:
    server = Server()
    with trainer_of(server) as trainer:
        [group] = server.groups
        sending = in_thread(lambda: trainer.broadcast([torch.ones(400, dtype=torch.uint8)] * 4))
        arriving = group.receive(["a", "b", "c", "d"], ["float32"] * 4, [[100]] * 4, None, 100)
        next(arriving)
        arriving.close()
        assert group.broken == "an update was not received to its end"
        with contextlib.suppress(RuntimeError):
            sending.result(BOUND)


def test_what_an_abort_ends_has_not_arrived() -> None:
    """A group that is closed during a receive returns no tensors.

    An aborted NCCL kernel ends without an error and leaves an incomplete buffer.
    """
    member = SilentMember()
    group = WeightGroup("weights", member, Lifeline(), BOUND)
    arrival = in_thread(lambda: list(group.receive(NAMES, DTYPES, SHAPE_LIST, None, 1 << 20)))
    assert member.started.wait(BOUND)
    group.close()
    with pytest.raises(WeightUpdateError, match="was destroyed before 'a'"):
        arrival.result(BOUND)


def test_the_member_process_ends_with_the_server() -> None:
    """The member ends even while it waits inside torch, where it does not notice that its socket was closed."""
    code = """
import sys
from verl_server.messages.weight_requests import InitWeightsUpdateGroupReq
from verl_server.weight_sync.group.gloo_member import GlooMember
member = GlooMember()
print(member._process.pid, flush=True)
req = InitWeightsUpdateGroupReq(master_address="127.0.0.1", master_port=int(sys.argv[1]), rank_offset=1, world_size=2)
member.join(req, 1, "127.0.0.1", 600.0)
"""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = subprocess.Popen(
            [sys.executable, "-c", code, str(listener.getsockname()[1])], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        member = os.pidfd_open(int(server.stdout.readline()))
        listener.settimeout(BOUND)
        connection, _ = listener.accept()  # the member now waits in the store's handshake, which nobody answers
        server.kill()
        server.communicate()
        assert wait_readable(member, BOUND), "the member outlived its server"
        os.close(member)
        connection.close()


# -- joining --------------------------------------------------------------------------------------------------


def req(**changes: Any) -> InitWeightsUpdateGroupReq:
    fields = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    return InitWeightsUpdateGroupReq(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "nccl"}, "backend='nccl' needs GPUs, but this server runs on the CPU; use 'gloo'"),
        ({"backend": "mpi"}, "backend='mpi' is not supported"),
        ({"rank_offset": 0}, "rank 0 is the trainer's"),
        ({"world_size": 1}, "do not fit world_size=1"),
        ({"master_port": 0}, "master_port=0 is no port"),
    ],
)
def test_layouts_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        WeightGroup.join(req(**changes), 0, CPU, BOUND)


def test_joining_a_trainer_that_is_not_there_is_bounded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(WeightUpdateError, match=r"within 0.3 s .*Is the trainer \(rank 0\) creating the group"):
            WeightGroup.join(req(master_port=port), 0, CPU, 0.3)  # the port listens, but is not a store
    with pytest.raises(WeightUpdateError, match="Could not join"):
        WeightGroup.join(req(master_port=port), 0, CPU, 0.3)
    with pytest.raises(WeightUpdateError, match="Could not join"):
        WeightGroup.join(req(master_address="no.such.host.invalid"), 0, CPU, 0.3)
    with pytest.raises(WeightUpdateError, match=r"Could not join .*label too long"):
        WeightGroup.join(req(master_address="a" * 64), 0, CPU, 0.3)


def test_joining_without_the_others_is_bounded(trainer: Trainer) -> None:
    with pytest.raises(WeightUpdateError, match="Could not join the group 'other'"):
        trainer.name = "other"  # no other member uses this name
        trainer.join(timeout=1.0)


# -- the trainer's side ---------------------------------------------------------------------------------------


def test_an_engine_that_refuses_to_join_is_heard_at_once() -> None:
    class Refusing(Server):
        def init_weights_update_group(self, **fields: Any) -> None:
            raise BadRequestError("no groups here")

    with pytest.raises(BadRequestError, match="no groups here"):
        init_weights_update_group([Server(), Refusing()], "127.0.0.1", backend="gloo", device="cpu", timeout=1.0)


def test_an_engine_that_refuses_an_update_closes_the_group() -> None:
    class Refusing(Server):
        def update_weights_from_distributed(self, *args: Any, **options: Any) -> str:
            raise WeightUpdateError("not these")

    server = Refusing()
    with trainer_of(server) as group:
        with pytest.raises(WeightUpdateError, match="not these"):
            broadcast_weights(group, [("w", torch.ones(1 << 20))])
        with pytest.raises(VerlServerError, match="is closed"):
            broadcast_weights(group, [("w", torch.ones(1))])


def test_threads_of_a_group_end_with_it() -> None:
    others = set(threading.enumerate())
    server = Server()
    with trainer_of(server) as group:
        broadcast_weights(group, [("w", torch.ones(3))])
    for thread in set(threading.enumerate()) - others:
        if thread.name.startswith("weight-group"):
            thread.join(BOUND)
            assert not thread.is_alive()


# -- GPUs -----------------------------------------------------------------------------------------------------

NCCL_BOUND = 120.0
"""Longest wait in seconds for NCCL, which meets for the first time while other tests use the cores."""


@pytest.mark.cuda
@pytest.mark.two_gpus
def test_nccl_brings_the_same() -> None:
    process = Trainer(backend="nccl")
    try:
        group = process.join(timeout=NCCL_BOUND, device=torch.device("cuda:0"))
        for _ in SHAPES:
            process.tell("float32")
        windows = [
            [(name, tensor.cpu()) for name, tensor in window]
            for window in group.receive(NAMES, DTYPES, SHAPE_LIST, None, 100)
        ]
        assert_equal(windows, tensors())
        group.close()
    finally:
        process.end()


@pytest.mark.cuda
@pytest.mark.two_gpus
def test_nccl_survives_a_trainer_that_dies_and_joins_the_next() -> None:
    process = Trainer(backend="nccl")
    group = process.join(timeout=NCCL_BOUND, device=torch.device("cuda:0"))
    process.tell("float32")
    arriving = group.receive(NAMES, DTYPES, SHAPE_LIST, None, 100)
    assert next(arriving)[0][0] == "a"
    process.tell("die")
    with pytest.raises(WeightUpdateError, match=r"went away|failed"):
        next(arriving)
    group.close()
    process.end()
    torch.cuda.synchronize()  # would hang if a kernel of the dead group still ran
    again = Trainer(backend="nccl")
    try:
        group = again.join(timeout=NCCL_BOUND, device=torch.device("cuda:0"))
        again.tell("bucket")
        [window] = group.receive(NAMES, DTYPES, SHAPE_LIST, "flattened_bucket", 1 << 20)
        assert_equal([[(name, tensor.cpu()) for name, tensor in window]], tensors())
        group.close()
    finally:
        again.end()


@pytest.mark.cuda
@pytest.mark.two_gpus
def test_nccl_does_not_wait_for_a_trainer_that_stalls() -> None:
    process = Trainer(backend="nccl")
    try:
        group = process.join(timeout=NCCL_BOUND, device=torch.device("cuda:0"))
        process.tell("float32")
        arriving = group.receive(NAMES, DTYPES, SHAPE_LIST, None, 100)
        next(arriving)
        group._timeout = 2.0
        with pytest.raises(WeightUpdateError, match="within 2 s"):
            next(arriving)
        group.close()
        torch.cuda.synchronize()
    finally:
        process.end()
