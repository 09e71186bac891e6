"""Scheduler processes, started as the launcher starts them and driven over their socket."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.weight_sync import described
from verl_server.ipc.child_process import ChildProcess
from verl_server.ipc.message_socket import MessageSocket
from verl_server.ipc.readiness import wait_readable
from verl_server.ipc.sockets import free_port
from verl_server.messages.io_struct import (
    AbortReq,
    BatchTokenIDOut,
    ControlReply,
    FinishReason,
    FlushCacheReq,
    GetInternalStateReq,
    SchedulerOutput,
    TokenizedGenerateReq,
)
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
    EndWeightUpdateReq,
    GetWeightsByNameReq,
    InitWeightsUpdateGroupReq,
    UnregisterWeightsReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromTensorReq,
)
from verl_server.models.loader import iter_checkpoint
from verl_server.models.tiny import make_model_folder
from verl_server.sampling_params import SamplingParams
from verl_server.scheduler.rank import SchedulerSockets
from verl_server.server_args import ServerArgs
from verl_server.weight_sync.handles import WeightsDescription

WAIT = 60.0
_DECODER = msgspec.msgpack.Decoder(SchedulerOutput)


class Ranks:
    """The processes of one engine, and the TokenizerManager's end of the socket."""

    def __init__(self, folder: Path, at: Path, tp_size: int = 1, **settings: Any) -> None:
        defaults = {"cpu_threads": 1, "max_total_tokens": 1024, "page_size": 4, "check_invariants": True}
        args = ServerArgs(model_path=str(folder), device="cpu", tp_size=tp_size, **(defaults | settings))
        self.messages, schedulers_end = MessageSocket.pair()
        self._received: list[bytes] = []
        with schedulers_end:
            self.children = [
                ChildProcess(
                    f"scheduler-tp{rank}",
                    "verl_server.scheduler.process",
                    {
                        "server_args": args.to_json(),
                        "tp_rank": rank,
                        "init_addr": f"file://{at}/rendezvous" if tp_size > 1 else None,
                        "socket": schedulers_end.fileno(),
                    },
                    pass_fds=(schedulers_end.fileno(),) if rank == 0 else (),
                )
                for rank in range(tp_size)
            ]
        self.infos: list[dict[str, Any]] = []

    def wait_ready(self) -> None:
        self.infos = [child.wait_ready(WAIT) for child in self.children]

    def send(self, message: Any) -> None:
        self.messages.send(msgspec.msgpack.encode(message))

    def says_something(self, seconds: float) -> bool:
        return wait_readable(self.messages, seconds)

    def receive(self) -> SchedulerOutput:
        deadline = time.monotonic() + WAIT
        while not self._received:
            assert self.says_something(max(0.0, deadline - time.monotonic())), "no message from the scheduler"
            self._received += self.messages.receive()
            assert self._received or not self.messages.is_closed, "the scheduler closed the socket"
        return _DECODER.decode(self._received.pop(0))

    def reply(self, message: Any) -> ControlReply:
        self.send(message)
        while not isinstance(out := self.receive(), ControlReply):
            pass
        assert out.id == message.id
        return out

    def generate(self, rid: str, prompt: list[int], new: int) -> tuple[list[int], FinishReason]:
        self.add(rid, prompt, new)
        return self.collect(rid)

    def add(self, rid: str, prompt: list[int], new: int) -> None:
        sampling = SamplingParams(max_new_tokens=new, temperature=0.0)
        sampling.verify()
        self.send(TokenizedGenerateReq(rid=rid, input_ids=prompt, sampling=sampling))

    def collect(self, rid: str) -> tuple[list[int], FinishReason]:
        tokens: list[int] = []
        while True:
            out = self.receive()
            if isinstance(out, BatchTokenIDOut) and rid in out.rids:
                index = out.rids.index(rid)
                tokens += out.output_ids[index]
                if (reason := out.finish_reasons[index]) is not None:
                    return tokens, reason

    def close(self) -> None:
        for child in self.children:
            child.terminate()
        self.messages.close()


def test_a_waiting_loop_sends_what_had_no_room_and_still_hears_the_bell() -> None:
    manager, schedulers_end = MessageSocket.pair()
    sockets = SchedulerSockets(schedulers_end)
    sockets.send(ControlReply(id=1, success=True, payload="x" * (4 << 20)))  # more than the buffer of a socket
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(sockets.wait, None)
        got: list[bytes] = []
        while not got:
            assert wait_readable(manager, WAIT), "the loop sleeps with an unsent message"
            got += manager.receive()
        assert len(_DECODER.decode(got[0]).payload) == 4 << 20 and not waiting.done()
        sockets.ring()
        waiting.result(WAIT)
        manager.close()
        sockets.wait(WAIT)
        assert sockets.receive() == []
        start = time.monotonic()
        sockets.wait(0.2)
        assert time.monotonic() - start >= 0.2, "a closed peer does not wake the loop"
    sockets.close()


def test_a_signal_at_another_thread_wakes_the_loop() -> None:
    manager, schedulers_end = MessageSocket.pair()
    sockets = SchedulerSockets(schedulers_end)
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        sockets.wake_on_signals()
        with ThreadPoolExecutor() as threads:
            sent = threads.submit(lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1))
            start = time.monotonic()
            sockets.wait(WAIT)
            assert time.monotonic() - start < WAIT
            sent.result(WAIT)
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR1, before)
        sockets.close()
        manager.close()


@contextlib.contextmanager
def started(folder: Path, at: Path, tp_size: int = 1, **settings: Any) -> Iterator[Ranks]:
    ranks = Ranks(folder, at, tp_size, **settings)
    try:
        ranks.wait_ready()
        yield ranks
    finally:
        ranks.close()


@pytest.fixture(scope="module")
def ranks(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with started(tiny_llama, tmp_path_factory.mktemp("s")) as one:
        yield one


def test_ready_info(ranks: Ranks) -> None:
    info = ranks.infos[0]
    assert info["max_total_num_tokens"] == 1024 and info["page_size"] == 4 and info["tp_rank"] == 0
    assert info["max_req_input_len"] == min(info["context_length"] - 1, 1024)
    assert info["pid"] == ranks.children[0].pid and info["device"] == "cpu" and info["device_uuid"] == ""
    assert info["weight_version"] == "default" and info["dtype"] == "float32"


def test_generate_abort_and_malformed_messages(ranks: Ranks) -> None:
    for junk in (b"", b"\xc1", b"not msgpack", msgspec.msgpack.encode({"type": "NoSuchReq"}), b"\x91" * 100_000):
        ranks.messages.send(junk)
    tokens, reason = ranks.generate("a", [5, 6, 7, 8, 9], 12)
    assert len(tokens) == 12 and reason.type == "length"
    assert ranks.generate("b", [5, 6, 7, 8, 9], 12)[0] == tokens, "from the prefix cache"
    ranks.add("long", [1, 2, 3], 100)
    ranks.send(AbortReq(rid="long"))
    assert ranks.collect("long")[1].type == "abort"
    assert ranks.reply(FlushCacheReq(id=1)).success


def test_idle_process_sleeps_and_a_pending_flush_still_ends(ranks: Ranks) -> None:
    assert ranks.reply(GetInternalStateReq(id=2)).payload["num_running_reqs"] == 0
    before = cpu_seconds(ranks.children[0].pid)
    assert not ranks.says_something(0.5)
    assert cpu_seconds(ranks.children[0].pid) - before < 0.1
    assert ranks.reply(GetInternalStateReq(id=3)).payload["weights_state"] == "serving"


def test_update_from_disk_changes_what_is_served(ranks: Ranks, tmp_path: Path) -> None:
    other = make_model_folder(tmp_path / "other", "llama", seed=5)
    before = ranks.generate("before", [5, 6, 7, 8, 9], 12)[0]
    reply = ranks.reply(UpdateWeightsFromDiskReq(id=4, model_path=str(other), weight_version="v5"))
    assert reply.success, reply.message
    assert ranks.generate("after", [5, 6, 7, 8, 9], 12)[0] != before
    assert ranks.reply(GetInternalStateReq(id=5)).payload["weight_version"] == "v5"


def push_of(folder: Path, id: str) -> WeightsDescription:
    """Describe a checkpoint as a trainer would. This process owns the memory until the test ends."""
    return described.described(dict(iter_checkpoint(folder)), id)[1]


@pytest.fixture
def _end_trainers() -> Iterator[None]:
    yield
    described.opened.clear()


@pytest.mark.usefixtures("_end_trainers")
def test_staging_wakes_an_idle_process_which_sleeps_again(ranks: Ranks, tmp_path: Path) -> None:
    other = make_model_folder(tmp_path / "other", "llama", seed=6)
    before = ranks.generate("idle", [5, 6, 7, 8, 9], 12)[0]
    description = push_of(other, "pushed")
    assert ranks.reply(UpdateWeightsFromTensorReq(id=20, description=description, keep=True, partial=False)).success
    assert ranks.reply(UpdateWeightsFromTensorReq(id=21, registration="pushed")).success
    assert ranks.generate("awake", [5, 6, 7, 8, 9], 12)[0] != before
    start = cpu_seconds(ranks.children[0].pid)
    assert not ranks.says_something(0.5)
    assert cpu_seconds(ranks.children[0].pid) - start < 0.1, "the process sleeps again"
    assert ranks.reply(UnregisterWeightsReq(id=22)).success
    assert ranks.reply(UpdateWeightsFromTensorReq(id=23, registration="pushed")).status_code == 404


@pytest.mark.usefixtures("_end_trainers")
def test_a_transaction_over_two_ranks_and_the_death_of_one(tiny_llama: Path, tmp_path: Path) -> None:
    other = make_model_folder(tmp_path / "other", "llama", seed=6)
    description = push_of(other, "d")
    half = len(description.tensors) // 2
    first, second = (
        msgspec.structs.replace(description, id=str(i), tensors=part)
        for i, part in enumerate((description.tensors[:half], description.tensors[half:]))
    )
    with started(tiny_llama, tmp_path, tp_size=2) as two:
        assert two.reply(BeginWeightUpdateReq(id=1, transaction_id="s", full=True)).success
        two.add("held", [5, 6, 7], 4)
        reply = two.reply(UpdateWeightsFromTensorReq(id=2, description=first, transaction_id="s"))
        assert reply.success, reply.message
        assert two.reply(EndWeightUpdateReq(id=3, transaction_id="s")).status_code == 400
        assert two.reply(UpdateWeightsFromTensorReq(id=4, description=second)).status_code == 409
        assert two.reply(UpdateWeightsFromTensorReq(id=5, description=second, transaction_id="s")).success
        assert two.reply(EndWeightUpdateReq(id=6, transaction_id="s", weight_version="v2")).success
        assert two.collect("held")[1].type == "length"
        assert two.reply(GetInternalStateReq(id=7)).payload["weight_version"] == "v2"
        os.kill(two.children[1].pid, signal.SIGKILL)
        two.send(UpdateWeightsFromTensorReq(id=8, description=description))
        assert two.children[0].popen.wait(timeout=20) != 0, "rank 0 ends with an error"


def test_sigterm_ends_a_process_whose_stager_waits_for_a_trainer(tiny_llama: Path, tmp_path: Path) -> None:
    with started(tiny_llama, tmp_path) as one:
        port = free_port()
        join = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        one.send(InitWeightsUpdateGroupReq(id=1, backend="gloo", **join))
        assert one.generate("a", [5, 6, 7], 4)[1].type == "length"
        os.kill(one.children[0].pid, signal.SIGTERM)
        assert one.children[0].popen.wait(timeout=20) == 0, one.children[0].log_tail()


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_sigterm_ends_cleanly(tiny_llama: Path, tmp_path: Path) -> None:
    with started(tiny_llama, tmp_path) as one:
        one.add("running", [1, 2, 3], 200)
        one.receive()
        os.kill(one.children[0].pid, signal.SIGTERM)
        assert one.children[0].popen.wait(timeout=10) == 0, one.children[0].log_tail()


def test_two_ranks_agree_with_one_and_end_with_rank_0(ranks: Ranks, tiny_llama: Path, tmp_path: Path) -> None:
    reply = ranks.reply(UpdateWeightsFromDiskReq(id=6, model_path=str(tiny_llama)))
    assert reply.success, reply.message
    alone = [ranks.generate(f"one{i}", [9 + i, 4, 7, 8], 10)[0] for i in range(3)]
    with started(tiny_llama, tmp_path, tp_size=2, chunked_prefill_size=3) as two:
        for i in range(3):
            two.add(f"two{i}", [9 + i, 4, 7, 8], 10)
        outputs = collect_all(two, 3)
        assert [outputs[f"two{i}"] for i in range(3)] == alone
        assert two.reply(GetWeightsByNameReq(id=7, name="model.norm.weight")).success
        os.kill(two.children[0].pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        assert two.children[1].popen.wait(timeout=max(0.1, deadline - time.monotonic())) != 0
        assert "lost the connection to rank 0" in two.children[1].log_tail()


def collect_all(ranks: Ranks, count: int) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while count:
        out = ranks.receive()
        assert isinstance(out, BatchTokenIDOut)
        for index, rid in enumerate(out.rids):
            tokens.setdefault(rid, []).extend(out.output_ids[index])
            count -= out.finish_reasons[index] is not None
    return tokens


def test_two_ranks_stop_in_good_order(tiny_llama: Path, tmp_path: Path) -> None:
    with started(tiny_llama, tmp_path, tp_size=2) as two:
        two.add("running", [1, 2, 3], 200)
        two.receive()
        for child in reversed(two.children):
            os.kill(child.pid, signal.SIGTERM)
        assert [child.popen.wait(timeout=20) for child in two.children] == [0, 0]
