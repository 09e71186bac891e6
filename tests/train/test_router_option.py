"""`--router`: the servers of a run are those of a router, and its episodes play through it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fake_router import FakeRouter
from tests.engine.router_process import RouterProcess
from tests.train import test_agent_grpo
from tests.train.test_train_command import NOWHERE, SETTINGS
from tests.waiting import eventually
from verl_server.errors import BadRequestError
from verl_server.ipc.child_process import ChildProcess
from verl_server.rollout.environments.env_server import EnvServer
from verl_server.rollout.server_check import routed_servers
from verl_server.server_args import ServerArgs
from verl_server.train import async_grpo, grpo
from verl_server.train.options import TrainArgs
from verl_server.train.run_servers import check_servers

GAME = {"numbers": 3, "guesses": 3}
ONE, TWO = "http://127.0.0.1:1", "http://127.0.0.1:2"


@pytest.fixture
def fake() -> Iterator[FakeRouter]:
    router = FakeRouter(lambda: [ONE, TWO])
    yield router
    router.stop()


def test_the_servers_are_those_that_the_router_names(fake: FakeRouter) -> None:
    assert routed_servers(fake.url) == routed_servers(fake.url, [TWO + "/", ONE]) == (ONE, TWO)
    fake.states[ONE] = "retired"
    assert routed_servers(fake.url) == (TWO,)


def test_other_servers_than_those_of_the_router_are_refused(fake: FakeRouter) -> None:
    difference = f"--server only: {NOWHERE}; the router only: {TWO}"
    with pytest.raises(BadRequestError, match=difference):
        routed_servers(fake.url, [ONE, NOWHERE])


def test_a_router_that_does_not_answer_or_is_none_is_refused(fake: FakeRouter, server_url: str) -> None:
    with pytest.raises(BadRequestError, match=f"No router answers at --router {NOWHERE}"):
        routed_servers(NOWHERE)
    with pytest.raises(BadRequestError, match="is no router of verl-server"):
        routed_servers(server_url)
    fake.states |= {ONE: "retired", TWO: "retired"}
    with pytest.raises(BadRequestError, match="has no server"):
        routed_servers(fake.url)


def test_a_server_of_the_router_that_does_not_answer_may_be_retired() -> None:
    router = "http://127.0.0.1:9"
    args = TrainArgs(model_path="x", env_url="http://127.0.0.1:8", router=router, server_urls=(ONE,))
    with pytest.raises(BadRequestError) as refused:
        check_servers(args)
    assert f"curl {router}/fleet/retire" in str(refused.value) and f'{{"url": "{ONE}"}}' in str(refused.value)


def test_settings_of_servers_that_run_already_are_refused() -> None:
    settings = ServerArgs(model_path="", kv_cache_gib=1.0)
    with pytest.raises(BadRequestError, match=r"at --router http://r is running already.*--server\.kv-cache-gib"):
        TrainArgs(model_path="m", env_url="http://e", router="http://r", server=settings)
    with pytest.raises(BadRequestError, match="needs an owner's key"):
        TrainArgs(model_path="m", agent="m:f", env_url="http://e", router="http://r")


@pytest.fixture
def router(server_url: str, tmp_path: Path) -> Iterator[RouterProcess]:
    with RouterProcess([server_url], tmp_path) as router:
        assert eventually(lambda: router.is_healthy(1)), router.report()
        yield router


@pytest.mark.timeout(300)
@pytest.mark.parametrize("main", [grpo.main, pytest.param(async_grpo.main, marks=pytest.mark.exhaustive)])
def test_a_run_trains_through_a_router(
    main: Callable[[Sequence[str]], int],
    policy_folder: Path,
    environment_url: str,
    router: RouterProcess,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    command = ["--model-path", str(policy_folder), "--env-url", environment_url, "--out", str(out), *SETTINGS]
    assert main([*command, "--router", router.url, "--steps", "1"]) == 0, capfd.readouterr().err
    assert main([*command, "--router", router.url, "--steps", "3", "--resume"]) == 0, capfd.readouterr().err
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [0, 1, 2]
    settings = json.loads((out / "run.json").read_text())
    assert router.url.rpartition(":")[2] not in json.dumps(settings), "an address is not compared"
    report = router.report()
    assert report["committed"] is not None and report["committed"] == report["servers"][0]["weight_version"]
    assert sum(report["placements"].values()) > 0, "episodes play through the router"


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_an_agent_of_a_run_plays_through_a_router(
    chat_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The agent has the router's address and the key of its session. The owner's keys are the trainer's."""
    keys = {"api_key": "the-api-key-of-this-test", "admin_api_key": "the-admin-key-of-this-test"}
    files = []
    for name, key in keys.items():
        (tmp_path / name).write_text(key)
        files += [f"--server.{name.replace('_', '-')}-file", str(tmp_path / name)]
    small: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "kv_cache_gib": 0.1}
    out = tmp_path / "run"
    with contextlib.ExitStack() as stack:
        server_args = ServerArgs(model_path=str(chat_folder), port=0, log_level="warning", **keys, **small)
        server = ChildProcess("server", "verl_server.server.launch", {"server_args": server_args.to_json()})
        stack.callback(server.terminate)
        url = server.wait_ready(120)["url"]
        options = ["--server-api-key-file", str(tmp_path / "api_key")]
        router = stack.enter_context(RouterProcess([url], tmp_path, *options))
        assert eventually(lambda: router.is_healthy(1)), router.report()
        game = stack.enter_context(EnvServer("verl_server.rollout.environments.games:GuessNumber", kwargs=GAME))
        command = ["--model-path", str(chat_folder), "--out", str(out), "--steps", "2", *SETTINGS[1:]]
        command += ["--agent", f"{test_agent_grpo.__file__}:guess", "--env-url", game.url, "--router", router.url]
        assert grpo.main([*command, *files]) == 0, capfd.readouterr().err
        placements = router.report()["placements"]
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(m["trajectories"], m["failed"]) for m in metrics] == [(24, 0)] * 2
    assert sum(placements.values()) > 0
