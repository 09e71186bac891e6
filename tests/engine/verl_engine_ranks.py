"""Checks that `test_verl_engine.py` runs under torchrun: every rank runs the same checks in the same order.

    torchrun --nproc-per-node N -m tests.engine.verl_engine_ranks SCENARIO MODEL_FOLDER RESULT_FOLDER

Each rank appends {"check", "seconds", "error"} lines to RESULT_FOLDER/RANK.jsonl.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from tests.engine.router_process import RouterProcess
from verl_server import HttpServerEngineAdapter
from verl_server.engine.placement import seed_of_engine
from verl_server.engine.rank_group import RankGroup
from verl_server.engine.verl_engine import VerlEngine
from verl_server.errors import (
    BadRequestError,
    ServerDiedError,
    ServerRestartedError,
    UnansweredError,
    UpdateConflictError,
    VerlServerError,
    WeightUpdateError,
)
from verl_server.server_args import ServerArgs
from verl_server.weight_sync.handles import LocalSerializedTensor
from verl_server.weight_sync.trainer.sender import describe_tensors
from verl_server.weight_sync.trainer.shards import TensorShard

PROMPT = [17, 42, 99, 7, 3, 120]
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
O_PROJ = "model.layers.0.self_attn.o_proj.weight"


class Bench:
    """The engine and the trainer of one rank, with the checks on them."""

    def __init__(self, folder: str, results: Path, **options: Any) -> None:
        self.rank = dist.get_rank()
        self._results = results / f"{self.rank}.jsonl"
        self.trainer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._settings = {"model_path": folder, "device": "cpu", "kv_cache_gib": 0.02, "cpu_threads": 1}
        self._settings |= {"log_level": "warning", "random_seed": 1}

    def start(self, mesh: Any, **options: Any) -> None:
        if options.pop("as_server_args", False):
            self.engine = VerlEngine(mesh, server_args=ServerArgs(**self._settings), **options)
        else:
            self.engine = VerlEngine(mesh, **(self._settings | options))
        self.launched = bool(options.get("launch_server"))

    def run(self, name: str, check: Callable[[], None]) -> None:
        start, error = time.monotonic(), ""
        try:
            check()
        except Exception:
            error = traceback.format_exc()
        line = {"check": name, "seconds": time.monotonic() - start, "error": error}
        with self._results.open("a") as file:
            file.write(json.dumps(line) + "\n")

    # -- helpers -----------------------------------------------------------------------------------------------

    def train(self, seed: int) -> None:
        """Change the parameters in place, as an optimizer's step would, equally on every rank."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.trainer.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))

    def expect_parity(self) -> None:
        """Check that the server returns the tokens and log-probabilities that the trainer's weights give."""
        result = self.engine.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True)
        ids = torch.tensor([PROMPT + result["output_ids"]])
        exact = copy.deepcopy(self.trainer).double()  # excludes the trainer's own rounding from the error
        with torch.no_grad():
            logits = exact(ids).logits[0, len(PROMPT) - 1 : -1]
        assert logits.argmax(-1).tolist() == result["output_ids"]
        ours = torch.tensor([entry[0] for entry in result["meta_info"]["output_token_logprobs"]])
        reference = logits.log_softmax(-1).max(-1).values
        error = (ours - reference).abs().max().item()
        assert error < 1e-4, f"log-probabilities differ by {error:.1e} where logits reach {logits.abs().max():.1f}"
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, result["output_ids"])
        assert all(ids == everyone[0] for ids in everyone), "the result must be the same on every rank"

    def expect_error(self, kind: type[Exception], text: str, call: Callable[[], Any], seconds: float = 5.0) -> None:
        start = time.monotonic()
        try:
            call()
        except Exception as error:
            assert type(error) is kind, repr(error)
            assert text in str(error), str(error)
            assert time.monotonic() - start < seconds
            return
        raise AssertionError(f"no error, expected {text!r}")

    # -- checks ------------------------------------------------------------------------------------------------

    def check_parity(self) -> None:
        self.expect_parity()

    def check_second_and_third_update(self) -> None:
        for seed in (1, 2, 3):
            self.train(seed)
            success, _ = self.engine.update_weights_from_tensor(self.trainer.named_parameters())
            assert success
            self.expect_parity()
        result = self.engine.generate(input_ids=PROMPT, sampling_params=GREEDY)
        assert result["meta_info"]["weight_version"].startswith("3@")  # the third push without a label

    def check_local_serialized_tensors_one_by_one(self) -> None:
        """Push one tensor for each call, with handles made by the caller, as SGLang's trainers do: partial updates."""
        self.train(4)
        for name, parameter in self.trainer.named_parameters():
            ((_, local),) = describe_tensors([(name, parameter)])
            mine = LocalSerializedTensor(values=[local.get(0)])
            _, message = self.engine.update_weights_from_tensor([(name, mine)], flush_cache=False)
            assert "Not covered: " in message
        assert self.engine.flush_cache() is not False
        self.expect_parity()

    def check_handles_for_other_numbers_of_ranks(self) -> None:
        self.train(10)
        self.engine.update_weights_from_tensor(describe_tensors(self.trainer.named_parameters()))
        self.expect_parity()

    def check_sharded_tensors(self) -> None:
        self.train(5)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        sharded = [(n, distribute_tensor(p.detach(), mesh, [Shard(0)])) for n, p in self.trainer.named_parameters()]
        self.engine.update_weights_from_tensor(sharded, weight_version="sharded")
        self.expect_parity()

    def check_fsdp2_trainer(self) -> None:
        """The trainer registers once; each server rank reads the shards that it needs from the ranks that own them."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        sharded = AutoModelForCausalLM.from_pretrained(self._settings["model_path"], dtype=torch.float32)
        for layer in sharded.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        self.engine.register_weights(sharded)
        for seed in (7, 8):
            self.train(seed)
            with torch.no_grad():
                for mine, full in zip(sharded.parameters(), self.trainer.parameters(), strict=True):
                    mine.copy_(distribute_tensor(full.detach(), mesh, mine.placements))
                sharded(torch.tensor([PROMPT]))  # leaves the root gathered
            self.engine.push_weights(f"fsdp {seed}")
            self.expect_parity()
        self.engine.unregister_weights()
        self.expect_error(BadRequestError, "register_weights", self.engine.push_weights)

    def check_tensor_parallel_trainer(self) -> None:
        """The trainer passes plain tensors that are declared as shards and are cut differently from the server's."""
        self.train(9)
        ranks, shards = dist.get_world_size(), []
        for name, parameter in self.trainer.named_parameters():
            dim = parameter.dim() - 1
            first = sum(part.shape[dim] for part in parameter.chunk(ranks, dim)[: self.rank])
            mine = parameter.detach().chunk(ranks, dim)[self.rank].clone()
            shards.append((name, TensorShard(mine, parameter.shape, [0] * dim + [first])))
        for _ in range(3):
            self.engine.update_weights_from_tensor(shards)
            self.expect_parity()
        kept = [entry for entry in shards if entry[0] != O_PROJ or self.rank == 0]
        self.expect_error(BadRequestError, "do not hold all of", lambda: self.engine.update_weights_from_tensor(kept))
        self.expect_parity()

    def check_each_server_rank_reads_its_trainer_rank(self) -> None:
        mine = torch.full((64, 64), 1.0 + self.rank)
        self.engine.update_weights_from_tensor([(O_PROJ, mine)], partial=True)
        (row,) = self.engine.get_weights_by_name(O_PROJ, truncate_size=1)
        assert row == [1.0] * 32 + [2.0] * 32, row
        self.engine.update_weights_from_tensor(self.trainer.named_parameters())
        self.expect_parity()

    def check_a_push_that_lacks_parameters(self) -> None:
        """It is refused on every rank, and nothing is written. A transaction of two parts is whole."""
        engine, named = self.engine, list(self.trainer.named_parameters())
        parts = [[pair for pair in named if ("norm" in pair[0]) == is_norm] for is_norm in (False, True)]
        version = engine.get_server_info()["weight_version"]
        self.expect_error(
            WeightUpdateError, "missing: 'model.layers.0", lambda: engine.update_weights_from_tensor(parts[0])
        )
        assert engine.get_server_info()["weight_version"] == version
        self.expect_parity()
        engine.begin_weight_update()
        engine.update_weights_from_tensor(parts[0])
        self.expect_error(WeightUpdateError, "parameters are missing", engine.end_weight_update)
        engine.update_weights_from_tensor(parts[1])
        assert "Not covered" not in engine.end_weight_update()[1]
        assert "Not covered: " in engine.update_weights_from_tensor(parts[1], partial=True)[1]
        self.expect_parity()

    def check_errors_reach_every_rank(self) -> None:
        push = self.engine.update_weights_from_tensor
        self.expect_error(WeightUpdateError, "no parameter 'nonsense'", lambda: push([("nonsense", torch.ones(2))]))
        self.expect_error(WeightUpdateError, "'a0', 'a1'", lambda: push([(f"a{self.rank}", torch.ones(2))]))
        self.expect_error(BadRequestError, "Unknown option(s) ['vesion']", lambda: push([], vesion="3"))
        self.expect_error(BadRequestError, "", lambda: self.engine.generate(input_ids=[]))

        def explode() -> Iterator[tuple[str, torch.Tensor]]:
            if self.rank == 1:
                raise ValueError("the optimizer exploded")
            yield O_PROJ, torch.ones(64, 64)

        self.expect_error(ValueError, "the optimizer exploded", lambda: push(explode()))
        call = self.engine.flush_cache if self.rank else self.engine.get_server_info
        self.expect_error(BadRequestError, "different methods", call)
        self.expect_parity()

    def check_release_and_resume(self) -> None:
        engine = self.engine
        engine.release_memory_occupation()
        self.expect_error(BadRequestError, "already released", engine.release_memory_occupation)
        engine.resume_memory_occupation(["weights"])
        self.train(6)
        engine.update_weights_from_tensor(self.trainer.named_parameters())
        engine.resume_memory_occupation(["kv_cache", "cuda_graph"])
        self.expect_parity()

    def check_pause_abort_continue(self) -> None:
        self.engine.pause_generation("in_place")
        self.engine.continue_generation()
        self.engine.abort_request(abort_all=True)
        self.expect_parity()

    def check_http_beside(self) -> None:
        """Every rank knows the server's URL. The server answers the openai client and plain `/generate` requests."""
        url = self.engine.url
        assert (url is not None) == self.launched
        if url is None:
            return
        from openai import OpenAI

        client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=20)
        assert len(client.models.list().data) == 1
        reply = httpx.post(f"{url}/generate", json={"text": "hello"}, timeout=20).json()
        assert reply["meta_info"]["completion_tokens"] >= 1

    def check_messages_of_any_length(self) -> None:
        """Short messages take one collective and long ones two; the lengths may differ between ranks."""
        group = RankGroup(list(range(dist.get_world_size())), 20, silence_timeout=20)
        for size in (0, 1, 4000, 4087, 4088, 4089, 5000, 200_000):
            mine = [bytes([65 + rank]) * (size if rank else size // 2) for rank in range(dist.get_world_size())]
            assert group.gather("sizes", lambda mine=mine: mine[self.rank]) == mine
            text = "x" * size
            assert group.call("result", lambda _, text=text: text if self.rank == 0 else "") == text

    def check_a_rank_that_does_not_come_is_named_with_the_setting(self) -> None:
        group = RankGroup(list(range(dist.get_world_size())), 1.0, silence_timeout=20)
        if self.rank == 0:
            text = "push: another rank of this VerlEngine ended, or did not make the call within rank_timeout=1 s "
            self.expect_error(UnansweredError, f"{text}(rank(s) 1 sent nothing", lambda: group.gather("push", bytes))
        dist.barrier()

    def check_a_rank_that_left_a_call_early_does_not_take_its_outcome_for_a_later_one(self) -> None:
        """A rank interrupted by Ctrl-C would wrongly conclude that its memory is not read, so the group is lost."""
        group = RankGroup(list(range(dist.get_world_size())), 3, silence_timeout=1.0)
        group.gather("left early", bytes)
        if self.rank == 0:
            self.expect_error(UnansweredError, "left early", lambda: group.act("left early", lambda: "old"))
        else:
            self.expect_error(UnansweredError, "later", lambda: group.call("later", lambda _: "new"))

    def check_an_interrupted_call_is_an_error_on_every_rank(self) -> None:
        group = RankGroup(list(range(dist.get_world_size())), 20, silence_timeout=20)

        def act(_: list[bytes]) -> None:
            raise KeyboardInterrupt

        if self.rank == 0:
            with contextlib.suppress(KeyboardInterrupt):
                group.call("push", act)
                raise AssertionError("the interrupt got lost")
        else:
            self.expect_error(UnansweredError, "KeyboardInterrupt", lambda: group.call("push", act))
        assert group.call("later", lambda _: "new") == "new"

    def check_a_killed_server_is_an_error_on_every_rank(self) -> None:
        owner = self.engine.engine
        if self.rank == 0:
            pid = owner.pid if self.launched else owner.scheduler_info["pid"]  # type: ignore[union-attr]
            threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
        long = {"temperature": 1, "max_new_tokens": 450, "ignore_eos": True}
        prompts = [PROMPT] * 200
        self.expect_error(
            ServerDiedError, "", lambda: self.engine.generate(input_ids=prompts, sampling_params=long), 10
        )
        self.expect_error(ServerDiedError, "", self.engine.get_server_info, 10)

    def check_bounds_are_on_silence_not_on_work(self) -> None:
        """A call may take three times as long as the bound if the acting rank reports that it is still working."""
        group = RankGroup(list(range(dist.get_world_size())), 20, silence_timeout=1.0, beat=0.2)
        assert group.call("work", lambda _: time.sleep(3) or "done") == "done"
        silent = RankGroup(list(range(dist.get_world_size())), 20, silence_timeout=1.0, beat=20)
        if self.rank == 0:
            with contextlib.suppress(VerlServerError):  # no rank waits for the result
                silent.call("freeze", lambda _: time.sleep(3))
        else:
            self.expect_error(UnansweredError, "freeze: another rank", lambda: silent.call("freeze", lambda _: None))

    def check_shutdown(self) -> None:
        self.engine.shutdown()
        self.engine.shutdown()


EVERY_CHECK = (
    "parity",
    "second_and_third_update",
    "local_serialized_tensors_one_by_one",
    "sharded_tensors",
    "fsdp2_trainer",
    "tensor_parallel_trainer",
    "each_server_rank_reads_its_trainer_rank",
    "a_push_that_lacks_parameters",
    "errors_reach_every_rank",
    "release_and_resume",
    "pause_abort_continue",
    "http_beside",
    "bounds_are_on_silence_not_on_work",
    "messages_of_any_length",
    "a_rank_that_does_not_come_is_named_with_the_setting",
    "a_rank_that_left_a_call_early_does_not_take_its_outcome_for_a_later_one",
    "an_interrupted_call_is_an_error_on_every_rank",
    "a_killed_server_is_an_error_on_every_rank",
    "shutdown",
)
SCENARIOS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "server": ({"launch_server": True}, EVERY_CHECK),
    "engine-2-nodes": ({"nnodes": 2, "as_server_args": True}, EVERY_CHECK),
    "server-tp-1": (
        {"launch_server": True, "tp_size": 1},
        (
            "sharded_tensors",
            "fsdp2_trainer",
            "tensor_parallel_trainer",
            "handles_for_other_numbers_of_ranks",
            "shutdown",
        ),
    ),
    "server-tp-4": (
        {"launch_server": True, "tp_size": 4},
        ("parity", "fsdp2_trainer", "tensor_parallel_trainer", "handles_for_other_numbers_of_ranks", "shutdown"),
    ),
    "server-2-nodes": ({"launch_server": True, "nnodes": 2}, EVERY_CHECK[:2] + EVERY_CHECK[-1:]),
}


def run_scenario(bench: Bench, name: str) -> None:
    options, checks = SCENARIOS[name]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    bench.run(f"{name}: start", lambda: bench.start(mesh, **options))
    for check in checks:
        bench.run(f"{name}: {check}", getattr(bench, f"check_{check}"))


def run_restart(bench: Bench) -> None:
    """A server that `VerlEngine` did not start ends, and a new run of it starts on the same port."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def a_restarted_server_is_healed_by_all_ranks() -> None:
        server, place, key = None, [""], "admin-key"
        if bench.rank == 0:
            server = HttpServerEngineAdapter(**(bench._settings | {"port": 0, "admin_api_key": key}))
            place = [server.url]
        dist.broadcast_object_list(place)
        with VerlEngine(mesh, server_url=place[0], admin_api_key=key) as bench.engine:
            bench.train(13)
            shards = [(n, distribute_tensor(p.detach(), mesh, [Shard(0)])) for n, p in bench.trainer.named_parameters()]
            bench.engine.register_weights(shards)
            bench.engine.push_weights(7)
            bench.expect_parity()
            if server is not None:
                server.shutdown()
                server = HttpServerEngineAdapter(server_args=server.server_args)
            dist.barrier()
            for call in (lambda: bench.engine.push_weights(8), lambda: bench.engine.generate(input_ids=PROMPT)):
                bench.expect_error(ServerRestartedError, "was started again", call)
            bench.engine.heal(version=7)
            bench.expect_parity()
            info = bench.engine.get_server_info()
            assert (info["weight_version"], info["weights_confirmed"]) == ("7", True)
        if server is not None:
            server.shutdown()

    bench.run("a_restarted_server_is_healed_by_all_ranks", a_restarted_server_is_healed_by_all_ranks)


def run_router(bench: Bench) -> None:
    """Two servers behind a router. All ranks push to both of them in one call."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def all_ranks_push_to_all_servers() -> None:
        key, place = "admin-key", [""]
        with contextlib.ExitStack() as stack:
            servers = list[HttpServerEngineAdapter]()
            if bench.rank == 0:
                settings = bench._settings | {"port": 0, "admin_api_key": key}
                servers += [stack.enter_context(HttpServerEngineAdapter(**settings)) for _ in range(2)]
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                router = stack.enter_context(RouterProcess([str(server.url) for server in servers], folder))
                place = [router.url]
            dist.broadcast_object_list(place)
            with VerlEngine(mesh, server_url=place[0], admin_api_key=key) as bench.engine:
                _push_through_router(bench, mesh, servers)
            dist.barrier()

    bench.run("all_ranks_push_to_all_servers", all_ranks_push_to_all_servers)


def _push_through_router(bench: Bench, mesh: Any, servers: list[HttpServerEngineAdapter]) -> None:
    """Push shards of all ranks, by registration too. Kill a server, push, start it again, and push again."""

    def served() -> list[str]:
        found: list[Any] = [[server.get_server_info()["weight_version"] for server in servers]]
        dist.broadcast_object_list(found)
        return found[0]  # type: ignore[no-any-return]

    def shards() -> list[Any]:
        return [(n, distribute_tensor(p.detach(), mesh, [Shard(0)])) for n, p in bench.trainer.named_parameters()]

    bench.train(21)
    bench.engine.update_weights_from_tensor(shards(), weight_version="1@5f2c9a1e")
    bench.expect_parity()
    assert served() == ["1@5f2c9a1e"] * 2
    assert bench.engine.weights_checker("checksum"), "the servers hold equal weights"
    bench.train(22)
    bench.engine.register_weights(shards())
    bench.engine.push_weights("2@5f2c9a1e")
    bench.expect_parity()
    assert served() == ["2@5f2c9a1e"] * 2
    again = servers[1].server_args if servers else None
    if servers:
        servers.pop().shutdown()
    bench.engine.push_weights("3@5f2c9a1e")
    bench.expect_parity()
    if again is not None:
        servers.append(HttpServerEngineAdapter(server_args=again))
    dist.barrier()
    bench.engine.push_weights("4@5f2c9a1e")
    assert served() == ["4@5f2c9a1e"] * 2
    bench.expect_parity()
    assert bench.engine.weights_checker("checksum"), "the server that was started again was healed"
    if servers:
        servers.pop().shutdown()
    bench.expect_error(
        WeightUpdateError, "lacks 19 of 21", lambda: bench.engine.update_weights_from_tensor(shards()[:2])
    )


def run_replicas(bench: Bench) -> None:
    """(dp 2, tp 2) has two servers. Each first takes the weights of its own ranks, then both those of all four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def own_weights() -> None:
        """Each replica's ranks hold all weights of their own server. The other replica's weights have other values."""
        urls: list[Any] = [None] * 4
        dist.all_gather_object(urls, bench.engine.url)
        assert urls[0] == urls[1] != urls[2] == urls[3], urls
        value = torch.full((64,), float(10 + bench.rank // 2))
        push = bench.engine.update_weights_from_tensor
        push([("model.norm.weight", value)], partial=True)
        assert bench.engine.get_weights_by_name("model.norm.weight", 3) == [10.0 + bench.rank // 2] * 3
        slices = distribute_tensor(value.clone(), mesh, [Replicate(), Shard(0)])  # `distribute_tensor` writes to it
        push([("model.norm.weight", slices)], weight_version="shards of this replica", partial=True)
        assert bench.engine.get_weights_by_name("model.norm.weight", 1) == [10.0]
        ((name, local),) = describe_tensors([("model.norm.weight", value)])
        push([(name, LocalSerializedTensor(values=[local.get(0)]))])
        assert bench.engine.get_weights_by_name("model.norm.weight", 1) == [10.0 + bench.rank // 2]

    def each_replica_has_a_seed_of_its_own() -> None:
        seeds: list[Any] = [None] * 4
        dist.all_gather_object(seeds, bench.engine.get_server_info()["random_seed"])
        assert seeds == [1, 1, seed_of_engine(1, 2), seed_of_engine(1, 2)], seeds
        assert seeds[0] != seeds[2]

    def shards_of_all_ranks_are_refused() -> None:
        everyones = distribute_tensor(torch.ones(64), init_device_mesh("cpu", (4,)), [Shard(0)])
        push = bench.engine.update_weights_from_tensor
        bench.expect_error(BadRequestError, "read_all_ranks", lambda: push([("model.norm.weight", everyones)]))
        bench.engine.shutdown()

    def one_engine_refuses() -> None:
        """All ranks get the error, and the next push makes the engines hold the same weights again."""
        push = bench.engine.update_weights_from_tensor
        transaction = {"transaction_id": "held"}
        key = bench.engine.admin_api_key
        assert key is not None and len(key) > 20, "the key must be known on every rank"
        headers = {"Authorization": f"Bearer {key}"}
        begin, finish = f"{bench.engine.url}/begin_weight_update", f"{bench.engine.url}/end_weight_update"
        assert httpx.post(begin, json=transaction).status_code == 401
        if bench.rank == 2:
            httpx.post(begin, json=transaction, headers=headers).raise_for_status()
        dist.barrier()
        bench.train(12)
        bench.expect_error(UpdateConflictError, "held", lambda: push(bench.trainer.named_parameters()))
        dist.barrier()
        if bench.rank == 2:
            httpx.post(finish, json=transaction | {"discard": True}, headers=headers).raise_for_status()
        dist.barrier()
        push(bench.trainer.named_parameters())
        bench.expect_parity()

    def an_engine_that_is_gone_is_no_success() -> None:
        served = bench.engine.engine
        if bench.rank == 2 and isinstance(served, HttpServerEngineAdapter) and served.pid is not None:
            os.kill(served.pid, signal.SIGKILL)
        dist.barrier()
        push = bench.engine.update_weights_from_tensor
        kind = ServerDiedError if bench.rank >= 2 else UnansweredError
        bench.expect_error(kind, "", lambda: push(bench.trainer.named_parameters()), seconds=10)
        bench.engine.shutdown()

    bench.run("start", lambda: bench.start(mesh, launch_server=True, tp_size=1))
    bench.run("own_weights", own_weights)
    bench.run("each_replica_has_a_seed_of_its_own", each_replica_has_a_seed_of_its_own)
    bench.run("shards_of_all_ranks_are_refused", shards_of_all_ranks_are_refused)
    bench.run("start jointly", lambda: bench.start(mesh, launch_server=True, tp_size=1, read_all_ranks=True))
    for check in ("fsdp2_trainer", "tensor_parallel_trainer", "release_and_resume"):
        bench.run(check, getattr(bench, f"check_{check}"))
    bench.run("one_engine_refuses", one_engine_refuses)
    bench.run("an_engine_that_is_gone_is_no_success", an_engine_that_is_gone_is_no_success)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bench = Bench(sys.argv[2], Path(sys.argv[3]))
    if sys.argv[1] == "replicas":
        run_replicas(bench)
    elif sys.argv[1] == "router":
        run_router(bench)
    else:
        run_scenario(bench, sys.argv[1])
    if sys.argv[1] == "server":
        bench.trainer = AutoModelForCausalLM.from_pretrained(bench._settings["model_path"], dtype=torch.float32)
        run_restart(bench)
    dist.destroy_process_group()
