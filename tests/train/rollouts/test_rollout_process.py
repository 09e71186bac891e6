"""Each group that was started ends once, also if the process that plays it is killed, hangs or cannot start."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest

from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.errors import ServerLaunchError
from verl_server.rollout.agent_loop import Rollout
from verl_server.rollout.environments.env_server import EnvServer
from verl_server.rollout.episode import Limits
from verl_server.server_args import ServerArgs
from verl_server.train.options import AsyncTrainArgs, GRPOConfig
from verl_server.train.ppo_options import AsyncPPOTrainArgs, PPOConfig
from verl_server.train.rollouts import rollout_process
from verl_server.train.rollouts.group_messages import (
    Alive,
    EpisodeEnded,
    GroupEnded,
    NowServed,
    PlayerSetup,
    PlayGroup,
    decode_args,
    encode_args,
)
from verl_server.train.rollouts.rollout_process import RolloutProcess, RolloutProcessError
from verl_server.train.run_tasks import make_tasks

WAIT = 60.0
CONFIG = GRPOConfig(groups=1, group_size=3)
HELD = 2
"""The group whose episodes wait for the gate."""


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gate") / "open"


@pytest.fixture(scope="module")
def held_url(gate: Path) -> Iterator[str]:
    game = {"numbers": 3, "guesses": 3, "held": [HELD], "gate": str(gate)}
    with EnvServer("tests.train.environments:HeldGame", kwargs=game) as environment:
        yield environment.url


@pytest.fixture
def version(server_url: str, gate: Path) -> str:
    """Close the gate. Return the label of the server's weights."""
    gate.unlink(missing_ok=True)
    with HttpServerEngineAdapter.attach(server_url) as client:
        return str(client.get_server_info()["weight_version"])


@pytest.fixture
def setup(policy_folder: Path, server_url: str, held_url: str) -> PlayerSetup:
    limits = Limits(max_turns=3, max_new_tokens=1)
    args = AsyncTrainArgs(str(policy_folder), held_url, chat=False, limits=limits, grpo=CONFIG)
    return PlayerSetup(args=encode_args(args), urls=[server_url], keys=[None], incarnation="5f2c9a1e")


def group_of(group: int) -> PlayGroup:
    tasks = [msgspec.structs.replace(task, group=group) for task in make_tasks(group, CONFIG, 0, 1)]
    return PlayGroup(group=group, tasks=tasks)


@contextlib.contextmanager
def launched(
    setup: PlayerSetup, version: str, on_episode: Callable[[bytes, tuple[Any, ...]], None]
) -> Iterator[RolloutProcess]:
    """A rollout process that plays with the weights `version`, in step 7."""
    with contextlib.closing(RolloutProcess(setup, on_episode, environment_url="env")) as rollouts:
        rollouts.serve(NowServed(version=version, step=7))
        yield rollouts


def finished(rollouts: RolloutProcess, timeout: float) -> list[GroupEnded]:
    """Return the groups that end. Wait for the first, or until nothing is new for `timeout` seconds."""
    while True:
        found = rollouts.news(timeout)
        ended = [group for group in found if isinstance(group, GroupEnded)]
        if ended or not found or rollouts._has_ended:
            return ended


def collect(rollouts: RolloutProcess, count: int) -> dict[int, GroupEnded]:
    """Return `count` groups that end. Each call waits for at most `WAIT` seconds."""
    ended: dict[int, GroupEnded] = {}
    while len(ended) < count:
        found = finished(rollouts, WAIT)
        assert found or rollouts._has_ended, f"only {sorted(ended)} have ended"
        assert not ended.keys() & {group.group for group in found}, "a group ended twice"
        ended |= {group.group: group for group in found}
    return ended


def test_groups_play_while_another_one_waits(setup: PlayerSetup, version: str, gate: Path) -> None:
    lines: list[bytes] = []
    with launched(setup, version, lambda line, row: lines.append(line)) as rollouts:
        assert finished(rollouts, 0.0) == []
        for group in (HELD, 0, 5):
            rollouts.play(group_of(group))
        ended = collect(rollouts, 2)
        assert sorted(ended) == [0, 5] and finished(rollouts, 0.0) == []
        gate.touch()
        ended |= collect(rollouts, 1)
    assert sorted(ended) == [0, HELD, 5]
    for number, group in ended.items():
        assert group.rollout is not None and group.error is None
        assert [t.task for t in group.rollout.trajectories] == group_of(number).tasks
        assert {v for t in group.rollout.trajectories for v in t.weight_versions if v} == {version}
    values = [json.loads(line) for line in lines]
    assert sorted(v["task"]["episode_id"] for v in values) == sorted(f"{g}-0-{m}" for g in ended for m in range(3))
    assert {(v["step"], v["rank"], v["incarnation"]) for v in values} == {(7, 0, "5f2c9a1e")}


def test_a_process_that_is_killed_is_launched_again_and_plays_its_groups_anew(
    setup: PlayerSetup, version: str, gate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[bytes] = []
    with launched(setup, version, lambda line, row: lines.append(line)) as rollouts:
        first = rollouts._child
        for group in (0, HELD, 1):
            rollouts.play(group_of(group))
        assert sorted(collect(rollouts, 2)) == [0, 1]
        os.kill(first.pid, signal.SIGKILL)
        first.popen.wait(WAIT)
        rollouts.play(group_of(3))  # nobody reads it
        gate.touch()
        assert sorted(collect(rollouts, 2)) == [HELD, 3]
        assert rollouts._child is not first and finished(rollouts, 0.0) == []
        assert not rollouts._playing
    assert "ended with signal SIGKILL. It is launched again, and plays 2 groups anew." in caplog.text
    assert len(lines) == 4 * CONFIG.group_size


def test_a_process_that_hangs_is_replaced(
    setup: PlayerSetup, version: str, gate: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launched(setup, version, lambda line, row: None) as rollouts:
        rollouts.play(group_of(HELD))
        assert finished(rollouts, 0.0) == []
        first = rollouts._child
        os.kill(first.pid, signal.SIGSTOP)
        monkeypatch.setattr(rollout_process, "_SILENCE_SECONDS", 0.5)
        gate.touch()
        for _ in range(200):
            finished(rollouts, 0.1)
            if rollouts._has_ended:
                break
        monkeypatch.setattr(rollout_process, "_SILENCE_SECONDS", WAIT)
        assert list(collect(rollouts, 1)) == [HELD]
        assert rollouts._child is not first and first.poll() == -signal.SIGKILL
    assert "was silent for 0 s" in caplog.text


def test_a_group_that_is_cancelled_does_not_end(setup: PlayerSetup, version: str, gate: Path) -> None:
    with launched(setup, version, lambda line, row: None) as rollouts:
        rollouts.play(group_of(HELD))
        rollouts.play(group_of(0))
        rollouts.cancel(HELD)
        assert list(collect(rollouts, 1)) == [0]
        gate.touch()
        rollouts.play(group_of(1))
        assert list(collect(rollouts, 1)) == [1]
        rollouts.cancel(77)  # was never started


def test_a_wrong_agent_or_task_file_is_named(setup: PlayerSetup, tmp_path: Path) -> None:
    for changes, message in (
        ({"agent": f"{tmp_path}/none.py:play", "tasks": None}, "none.py"),
        ({"agent": f"{__file__}:agent", "tasks": str(tmp_path / "none.jsonl"), "env_url": None}, "none.jsonl"),
    ):
        args = replace(decode_args(setup.args), **changes)
        with pytest.raises(ServerLaunchError, match=message) as failure:
            RolloutProcess(msgspec.structs.replace(setup, args=encode_args(args), keys=["key"]), lambda line, row: None)
        assert "Traceback" not in str(failure.value)


async def agent(session: Any, task: Any) -> None:
    """Do nothing: the task file is wrong."""


def test_the_start_can_be_given_up(setup: PlayerSetup) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RolloutProcess(setup, lambda line, row: None, stop)


OPTIONS = [
    AsyncTrainArgs("m", "http://e", max_staleness=3, stale="drop"),
    AsyncTrainArgs("m", None, agent="null", tasks="tasks.jsonl", reward="exit", out=Path("a b")),
    AsyncTrainArgs("m", "http://e", limits=Limits(max_turns=2, trajectory_timeout=1.5), server_urls=("a", "b")),
    AsyncTrainArgs("m", "http://e", server=ServerArgs("", api_key="s", dtype="float16"), grpo=GRPOConfig(groups=3)),
    # GRPO does not permit these settings together.
    AsyncPPOTrainArgs("m", "http://e", critic_path="c", grpo=PPOConfig(gamma=0.5, kl_coef=0.1, kl_in="reward")),
]


@pytest.mark.parametrize("args", OPTIONS)
def test_the_process_gets_the_options_as_they_are(args: AsyncTrainArgs) -> None:
    sent = json.loads(json.dumps(encode_args(args)))
    received = decode_args(sent)
    assert vars(received) == {name: value for name, value in vars(args).items() if name in vars(received)}


# -- a child that only this test plays -------------------------------------------------------------------------------


class FakeChild:
    """Stands for `ChildProcess`: the test has the process's end of the connection."""

    made: list[FakeChild]
    code = -9

    def __init__(self, *_: Any, pass_fds: tuple[int, ...], **__: Any) -> None:
        self.raw = socket.socket(fileno=os.dup(pass_fds[0]))
        self.connection = Connection(os.dup(pass_fds[0]))
        self.made.append(self)

    def wait_ready(self, *_: Any) -> None:
        self.connection.recv_bytes()  # the setup

    def send(self, message: Any) -> None:
        self.connection.send_bytes(msgspec.msgpack.encode(message))

    def end(self) -> None:
        self.connection.close()
        self.raw.close()

    def terminate(self, grace: float = 0) -> int:
        self.end()
        return self.code

    def log_tail(self) -> str:
        return "\n\nLast lines: oh no"


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RolloutProcess]]:
    FakeChild.made = []
    monkeypatch.setattr(rollout_process, "ChildProcess", FakeChild)
    setup = PlayerSetup(args={}, urls=[], keys=[], incarnation="5f2c9a1e")
    with contextlib.ExitStack() as stack:
        yield lambda on_episode=lambda line, row: None: stack.enter_context(
            contextlib.closing(RolloutProcess(setup, on_episode))
        )


def ended(group: int) -> GroupEnded:
    return GroupEnded(group=group, rollout=Rollout(trajectories=[], seconds=1.0))


def test_a_process_that_is_killed_in_the_middle_of_a_message_is_launched_again(fakes: Any) -> None:
    rollouts = fakes()
    rollouts.play(group_of(4))
    (first,) = FakeChild.made
    first.connection.recv_bytes()  # else the connection is reset
    first.raw.sendall(b"\x00\x00\x10\x00" + b"the first bytes of 4096")
    first.end()
    assert finished(rollouts, WAIT) == [] and finished(rollouts, 0.0) == []
    second = FakeChild.made[1]
    assert b"4-0-0" in second.connection.recv_bytes()
    second.send(ended(4))
    assert [group.group for group in finished(rollouts, WAIT)] == [4]


def test_an_error_of_who_takes_the_episodes_ends_the_run(fakes: Any) -> None:
    def full(line: bytes, row: tuple[Any, ...]) -> None:
        raise BrokenPipeError(f"cannot write {line!r}")

    rollouts = fakes(full)
    rollouts.play(group_of(4))
    FakeChild.made[0].send(EpisodeEnded(line=b"x", row=()))
    with pytest.raises(BrokenPipeError, match="cannot write b'x'"):
        finished(rollouts, WAIT)


def test_a_group_that_cannot_be_played_ends_the_run(fakes: Any) -> None:
    rollouts = fakes()
    rollouts.play(group_of(4))
    FakeChild.made[0].send(GroupEnded(group=4, error="the reward is wrong"))
    with pytest.raises(RolloutProcessError, match="The episodes of group 4 could not be played: the reward is wrong"):
        finished(rollouts, WAIT)


def test_a_group_ends_once(fakes: Any) -> None:
    """A group that was cancelled, or has ended, does not end again."""
    rollouts = fakes()
    for group in (4, 5):
        rollouts.play(group_of(group))
    rollouts.cancel(5)
    for group in (4, 4, 5):
        FakeChild.made[0].send(ended(group))
    FakeChild.made[0].send(GroupEnded(group=5, error="too late"))
    FakeChild.made[0].end()
    assert [group.group for group in finished(rollouts, WAIT)] == [4]


def test_a_process_that_ends_again_and_again_ends_the_run(fakes: Any) -> None:
    rollouts = fakes()
    for launch in range(rollout_process._MAX_RELAUNCHES + 1):
        assert len(FakeChild.made) == launch + 1
        FakeChild.made[-1].end()
        assert finished(rollouts, WAIT) == []
        if launch < rollout_process._MAX_RELAUNCHES:
            assert finished(rollouts, 0.0) == []
    with pytest.raises(RolloutProcessError, match="It is not launched again: it ended 4 times") as failure:
        finished(rollouts, 0.0)
    assert "Last lines: oh no" in str(failure.value)


def test_a_process_that_is_killed_while_it_starts_again_is_launched_once_more(
    fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = fakes()
    rollouts.play(group_of(4))
    FakeChild.made[0].end()
    assert finished(rollouts, WAIT) == []

    class Killed(FakeChild):
        def wait_ready(self, *_: Any) -> None:
            raise ServerLaunchError("rollout exited with signal SIGKILL while starting")

    monkeypatch.setattr(rollout_process, "ChildProcess", Killed)
    assert finished(rollouts, 0.0) == []
    monkeypatch.setattr(rollout_process, "ChildProcess", FakeChild)
    assert finished(rollouts, 0.0) == [] and len(FakeChild.made) == 3
    assert b"4-0-0" in FakeChild.made[2].connection.recv_bytes()


def test_the_count_begins_again_when_a_group_finishes(fakes: Any) -> None:
    rollouts = fakes()
    for _ in range(2 * rollout_process._MAX_RELAUNCHES):
        rollouts.play(group_of(4))
        FakeChild.made[-1].send(ended(4))
        assert len(finished(rollouts, WAIT)) == 1
        FakeChild.made[-1].end()
        assert finished(rollouts, WAIT) == finished(rollouts, 0.0) == []


def test_signs_of_life_keep_a_process(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = fakes()
    FakeChild.made[0].send(Alive())
    monkeypatch.setattr(rollout_process, "_SILENCE_SECONDS", WAIT)
    assert finished(rollouts, 0.0) == [] and not rollouts._has_ended
    monkeypatch.setattr(rollout_process, "_SILENCE_SECONDS", 0.0)
    assert finished(rollouts, 0.01) == [] and rollouts._has_ended
    assert finished(rollouts, 0.0) == [] and len(FakeChild.made) == 2


def test_the_trainer_does_not_hang_when_nobody_reads(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_process, "_SILENCE_SECONDS", 0.2)
    rollouts = fakes()
    count = 0
    while not rollouts._has_ended:  # a connection holds some hundred KB
        tasks = [msgspec.structs.replace(task, episode_id="x" * 10_000) for task in group_of(count).tasks]
        rollouts.play(PlayGroup(group=count, tasks=tasks))
        count += 1
        assert count < 1000
    FakeChild.made[0].connection.close()

    def read(child: FakeChild) -> None:
        with contextlib.suppress(OSError, EOFError, TypeError):  # TypeError: it is closed in the middle of a read
            for _ in range(count):
                child.connection.recv_bytes()

    class Reading(FakeChild):
        def wait_ready(self, *_: Any) -> None:
            super().wait_ready()
            threading.Thread(target=read, args=(self,), daemon=True).start()

    monkeypatch.setattr(rollout_process, "ChildProcess", Reading)
    monkeypatch.setattr(rollout_process, "_SILENCE_SECONDS", WAIT)
    assert finished(rollouts, 0.0) == []
    assert len(rollouts._playing) == count and len(FakeChild.made) == 2
