"""`--router`: the servers of a run are those of a router, and its episodes play through it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.engine.fake_router import FakeRouter
from tests.engine.router_process import RouterProcess
from tests.train.test_train_command import NOWHERE, SETTINGS
from tests.waiting import eventually
from verl_server.errors import BadRequestError
from verl_server.rollout.server_check import routed_servers
from verl_server.server_args import ServerArgs
from verl_server.train import async_grpo, grpo
from verl_server.train.options import TrainArgs

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
