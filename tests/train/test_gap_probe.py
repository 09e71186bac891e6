"""A server scores whole sequences under one version. What it cannot score is no gap."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.engine.http_transport import HttpConnections
from verl_server.errors import ServerUnavailableError
from verl_server.logprob_gap import GapAlarm, LogprobGapError
from verl_server.train import gap_probe
from verl_server.train.gap_probe import GapProbe, _longest
from verl_server.train.policy import Policy, load_policy
from verl_server.train.ranks import all_ranks, attach_engine

CPU = torch.device("cpu")
SEQUENCES = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11], [12, 13], [14], []]

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def policy(policy_folder: Path) -> Policy:
    return load_policy(str(policy_folder), CPU, compute_dtype=torch.float32)


@pytest.fixture
def client(server_url: str) -> Iterator[HttpServerEngineAdapter]:
    with HttpServerEngineAdapter.attach(server_url) as client:
        yield client


def probe_of(policy: Policy, *adapters: Any) -> GapProbe:
    return GapProbe(policy, CPU, SimpleNamespace(adapters=list(adapters)), all_ranks())  # type: ignore[arg-type]


def push(url: str, policy: Policy, version: str, factor: float = 1.0) -> None:
    with attach_engine(url) as engine:
        named = [(name, weight.detach() * factor) for name, weight in policy.named_weights()]
        engine.update_weights_from_tensor(named, weight_version=version, partial=False)


def test_a_server_with_the_same_weights_has_no_gap_and_one_with_others_raises_the_alarm(
    policy: Policy, server_url: str, client: HttpServerEngineAdapter
) -> None:
    alarm = GapAlarm(torch.float32)
    push(server_url, policy, "3@5f2c9a1e")
    gap = probe_of(policy, client).gap(SEQUENCES, "3@5f2c9a1e", 100)
    assert gap is not None and gap.tokens == 5 + 2 and 0 < gap.largest < 1e-4
    alarm.check(gap, 3)
    assert probe_of(policy, client).gap(SEQUENCES, "4@5f2c9a1e", 100) is None  # it serves another version
    push(server_url, policy, "3@5f2c9a1e", factor=1.5)
    gap = probe_of(policy, client).gap(SEQUENCES, "3@5f2c9a1e", 100)
    with pytest.raises(LogprobGapError):
        alarm.check(gap, 4)


def test_a_sequence_that_fills_the_context_is_scored(
    policy: Policy, server_url: str, client: HttpServerEngineAdapter
) -> None:
    push(server_url, policy, "5@5f2c9a1e")
    info = client.scheduler_info
    longest = min(info["context_length"], info["max_req_input_len"] + 1)
    gap = probe_of(policy, client).gap([[token % 30 for token in range(longest)]], "5@5f2c9a1e", 100)
    assert gap is not None and gap.tokens == longest - 2


def test_a_server_that_is_gone_gives_none(policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    class Gone:
        url = "http://gone"

        def generate(self, **_: Any) -> Any:
            raise ServerUnavailableError("It is gone.")

    assert probe_of(policy, Gone()).gap(SEQUENCES, "0@5f2c9a1e", 100) is None
    assert "because http://gone does not score: It is gone." in caplog.text


def test_a_server_that_accepts_and_is_silent_gives_none(
    policy: Policy,
    client: HttpServerEngineAdapter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The connection goes to a socket that nobody serves."""
    monkeypatch.setattr(gap_probe, "_SCORE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(client._transport, "_connections", HttpConnections(url, 5.0, ()))
        assert probe_of(policy, client).gap(SEQUENCES, "0@5f2c9a1e", 100) is None
    assert "does not score" in caplog.text


def test_the_servers_are_asked_in_turn(policy: Policy) -> None:
    asked: list[str] = []

    class Server:
        def __init__(self, url: str) -> None:
            self.url = url

        def generate(self, *, input_ids: Any, **_: Any) -> Any:
            asked.append(self.url)
            scored = [[None, 0, None], *[[-1.0, 0, None]] * (len(input_ids[0]) - 1)]
            return [{"meta_info": {"weight_version": "v", "input_token_logprobs": scored}} for _ in input_ids]

    probe = probe_of(policy, Server("a"), Server("b"))
    assert [probe.gap([[1, 2, 3]], "v", 100) is not None for _ in range(3)] == [True] * 3
    assert probe.gap([], "v", 100) is None and probe.gap([[1], [1, 2]], "v", 100) is None
    assert asked == ["a", "b", "a"]


def test_the_longest_sequences_that_fit_a_pass_are_chosen() -> None:
    sequences = [[0] * length for length in (5, 31, 11, 11, 1, 2, 9)]
    assert [len(each) for each in _longest(sequences, 1000)] == [30, 10, 10, 8, 4]
    assert [len(each) for each in _longest(sequences, 60)] == [30, 10]
    assert [len(each) for each in _longest(sequences, 29)] == [10, 10]
    assert [len(each) for each in _longest(sequences, 2)] == [4]
    assert len(_longest([[0] * 3] * 20, 1000)) == 8
