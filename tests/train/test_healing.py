"""A run goes on when a rollout server dies: all ranks bring it back together, and its episodes continue."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from tests.engine.router_process import RouterProcess
from tests.torchrun import run_ranks
from tests.train.healing_ranks import CONFIG, Game
from tests.waiting import eventually
from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.engine.router_client import RouterClient
from verl_server.engine.verl_engine import VerlEngine
from verl_server.ipc.child_process import ChildProcess
from verl_server.models.tiny import make_model_folder
from verl_server.rollout.agent_loop import AgentLoop
from verl_server.rollout.agents.types import AgentEpisode, AgentSession, AgentTask
from verl_server.rollout.episode import Limits
from verl_server.rollout.renderer import TextRenderer
from verl_server.server_args import ServerArgs
from verl_server.train import run_servers
from verl_server.train.grpo import GRPO, PolicyTrainer, main
from verl_server.train.policy import load_policy
from verl_server.train.ranks import all_ranks, attach_engine
from verl_server.train.servers import RolloutServers
from verl_server.watch.run_files import read_events


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_launched_server_that_is_killed_in_a_rollout_is_launched_again(
    policy_folder: Path, tmp_path: Path, ranks: int
) -> None:
    """With two ranks, the server is killed after one of them has finished its episodes."""
    log = tmp_path / "log"
    codes = run_ranks(ranks, "tests.train.healing_ranks", [str(policy_folder), str(tmp_path)], log, timeout=200)
    text = log.read_text()
    assert not any(codes) and None not in codes, f"exit codes {codes}: {text[-8000:]}"
    for rank in range(ranks):
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        versions = result["versions"]
        assert [version.partition("@")[0] for version in versions] == ["0", "1", "2"]
        assert len({version.partition("@")[2] for version in versions}) == 1
        # The healed server has the weights of before under the version of before, and only they have sampled.
        assert result["sampled"] == [[version] for version in versions]
        assert all(end == "done" for ends in result["ends"] for end in ends), result["ends"]
        assert all(gap < 1e-4 for gap in result["gaps"])
        assert len(result["killed"]) == (rank == 0)
        assert rank > 0 or result["pid"] not in (None, *result["killed"])
    assert "ended with signal SIGKILL" in text and "It is launched again. Launches that are left: 2." in text


PID = "TEST_HEALING_PID"
"""Variable of this process with the server that the agent kills. The trainer loads this file as another module."""
RETRY_PAUSE = 0.1


async def patient_agent(session: AgentSession, task: AgentTask) -> None:
    """Sample two turns, and repeat a request while the server is away. Kill the server once between the turns."""
    messages = [{"role": "user", "content": "go"}]
    async with session.http() as client:
        for turn in range(2):
            body = {"model": "policy", "messages": messages, "max_tokens": 2}
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    reply = await client.post("/chat/completions", json=body)
                    if reply.status_code < 500:
                        break
                await asyncio.sleep(RETRY_PAUSE)
            assert reply.status_code == 200, reply.text
            messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "and?"}]
            if turn == 0 and (pid := os.environ.pop(PID, None)) is not None:
                os.kill(int(pid), signal.SIGKILL)


def share_of_even(episode: AgentEpisode) -> float:
    assert episode.trajectory is not None
    tokens = [token for branch in episode.trajectory.branches for token in branch.ids]
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


@pytest.mark.timeout(240)
def test_sessions_of_an_agent_go_on_when_the_server_was_launched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    launch = run_servers.launch_engine

    def noted(*arguments: Any, **settings: Any) -> VerlEngine:
        engine = launch(*arguments, **settings)
        assert isinstance(engine.engine, HttpServerEngineAdapter) and engine.engine.pid is not None
        monkeypatch.setenv(PID, str(engine.engine.pid))
        return engine

    monkeypatch.setattr(run_servers, "launch_engine", noted)
    folder = make_model_folder(tmp_path / "chat", "qwen3", init_std=0.2, max_position_embeddings=2048)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"seed": 0, "input": "go"}\n')
    out = tmp_path / "run"
    command = ["--model-path", str(folder), "--out", str(out), "--steps", "2", "--device", "cpu", "--retry-pause", "0"]
    command += ["--agent", f"{__file__}:patient_agent", "--tasks", str(tasks), "--reward", f"{__file__}:share_of_even"]
    command += ["--grpo.groups", "2", "--grpo.group-size", "3", "--grpo.epochs", "1", "--grpo.minibatches", "1"]
    command += ["--server.cpu-threads", "1", "--server.kv-cache-gib", "0.1", "--server.log-level", "warning"]
    assert main(command) == 0, capfd.readouterr().err
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    errors = out / "errors.jsonl"
    assert [(m["trajectories"], m["failed"]) for m in metrics] == [(6, 0)] * 2, errors.exists() and errors.read_text()
    assert all(m["logprob_gap"] < 1e-4 for m in metrics)
    assert PID not in os.environ and "It is launched again" in caplog.text
    kinds = [type(event).__name__ for event in read_events(out)]
    assert kinds.index("ServerLost") < kinds.index("ServerRelaunched") < kinds.index("ServerHealed")
    assert kinds.count("ServerLost") == kinds.count("ServerHealed") == 1


@pytest.fixture
def three(policy_folder: Path) -> Iterator[list[ChildProcess]]:
    with contextlib.ExitStack() as stack:
        servers = [_small_server(policy_folder, port=0) for _ in range(3)]
        for server in servers:
            stack.callback(server.terminate)
        yield servers


def _small_server(folder: Path, port: int) -> ChildProcess:
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "kv_cache_gib": 0.1}
    server_args = ServerArgs(model_path=str(folder), port=port, log_level="warning", **settings)
    return ChildProcess("server", "verl_server.server.launch", {"server_args": server_args.to_json()})


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_routed", [False, True], ids=["direct", "routed"])
def test_a_run_on_three_servers_goes_on_when_one_is_killed(
    policy_folder: Path, three: list[ChildProcess], tmp_path: Path, is_routed: bool
) -> None:
    """The second server is killed in step 1, and started again on its port before step 3, whose push heals it."""
    urls = [server.wait_ready(120)["url"] for server in three]
    killed: list[int] = []

    async def kill() -> None:
        if run.next_step == 1 and not killed:
            killed.append(three[1].pid)
            os.kill(three[1].pid, signal.SIGKILL)

    device = torch.device("cpu")
    trainer = PolicyTrainer(load_policy(str(policy_folder), device, compute_dtype=torch.float32), CONFIG, 4, device)
    renderer = TextRenderer(AutoTokenizer.from_pretrained(policy_folder))
    ranks = all_ranks()
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(attach_engine(url)) for url in urls]
        limits, places, client = Limits(max_turns=3, max_new_tokens=1), urls, None
        if is_routed:
            router = stack.enter_context(RouterProcess(urls, tmp_path))
            assert eventually(lambda: router.is_healthy(3)), router.report()
            places, client = [router.url], RouterClient.at(router.url)
        loop = stack.enter_context(AgentLoop(places, lambda: Game(kill), renderer, limits=limits))
        run = GRPO(trainer, RolloutServers(engines, ranks, router=client), loop, ranks)
        run.push()
        steps = [run.step() for _ in range(2)]
        three[1].terminate()
        again = _small_server(policy_folder, port=int(urls[1].rpartition(":")[2]))
        stack.callback(again.terminate)
        again.wait_ready(120)
        steps += [run.step() for _ in range(2)]
        clients = [stack.enter_context(HttpServerEngineAdapter.attach(url)) for url in urls]
        served = [client.get_server_info()["weight_version"] for client in clients]
    assert killed and served == [str(run.weight_version)] * 3
    for step in steps:
        assert (step.metrics.trajectories, step.metrics.failed) == (16, 0)
        sampled = {v for t in step.rollout.trajectories for v in t.weight_versions if v}
        assert sampled == {step.metrics.weight_version}
        assert step.metrics.logprob_gap is not None and step.metrics.logprob_gap < 1e-4
