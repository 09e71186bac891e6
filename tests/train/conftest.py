"""Fixtures of the trainer's tests: a process group of one rank, a tiny policy, trajectories made by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from verl_server.ipc.child_process import ChildProcess
from verl_server.rollout.environments.env_server import EnvServer
from verl_server.rollout.trajectory import StopReason, Task, Trajectory
from verl_server.server_args import ServerArgs
from verl_server.train.checkpoint_writer import CheckpointWriter, SavedRun
from verl_server.train.demo import make_policy_folder
from verl_server.train.ranks import SaveGroup, all_ranks, setup_ranks
from verl_server.train.rollout_report import RolloutReport, report_rollout
from verl_server.train.run import Algorithm


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Use one thread: the models are tiny, and the servers need the other cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_rank() -> Iterator[None]:
    setup_ranks("cpu")
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="package")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy_folder(tmp_path_factory.mktemp("policy"), seed=0)


@pytest.fixture(scope="package")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's policy with a chat template: a message is its words."""
    folder = make_policy_folder(tmp_path_factory.mktemp("chat"), seed=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message['role'] == 'user' %}<bos> {% endif %}{{ message['content'] }} "
        "{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="package")
def server_url(policy_folder: Path) -> Iterator[str]:
    """Start a server without keys, as a user would by hand. Trainers of several tests attach to it in turn."""
    settings = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "kv_cache_gib": 0.1, "log_level": "warning"}
    server_args = ServerArgs(model_path=str(policy_folder), port=0, **settings)
    server = ChildProcess("server", "verl_server.server.launch", {"server_args": server_args.to_json()})
    try:
        yield server.wait_ready(120)["url"]
    finally:
        server.terminate()


@pytest.fixture(scope="package")
def environment_url() -> Iterator[str]:
    """URL of an easy game. When each step plays four groups and the first seed is 0, the second half of step 0 and all
    of step 1 fail, and all rewards of step 3 are equal."""
    game = {"numbers": 3, "guesses": 3, "failing": [2, 3, 4, 5, 6, 7], "equal": [12, 13, 14, 15]}
    with EnvServer("tests.train.environments:FailingGame", kwargs=game) as environment:
        yield environment.url


def make_trajectory(group: int, reward: float | None, length: int = 3, seed: int = 0) -> Trajectory:
    """Return a trajectory of two prompt tokens and `length` tokens sampled with log-probability -1 under version "0".

    Without a reward, the trajectory ends with an environment error.
    """
    t = Trajectory(task=Task(seed=seed, group=group, episode_id=f"{group}-{seed}"))
    t.append_observation({}, [1, 2])
    t.append_output([3 + (seed + i) % 30 for i in range(length)], [-1.0] * length, ["0"] * length)
    t.turns[0].reward = reward
    if reward is None:
        t.finish(StopReason.ENV_ERROR, "ws://env:1/ws did not answer `step`")
    else:
        t.finish(StopReason.DONE)
    return t


def make_report(trajectories: list[Trajectory], kept: int, rank: int = 0, seconds: float = 1.0) -> RolloutReport:
    """Return the report of one rank in step 4, in which `kept` episodes are learned from."""
    return report_rollout(
        trajectories, kept, seconds, step=4, rank=rank, env_url="http://env:1", server_url="http://server:2"
    )


def make_writer(run: SavedRun, out: Path, **settings: Any) -> CheckpointWriter:
    """Return the writer of the checkpoints of a run, which keeps one of them."""
    groups = (SaveGroup.of_all_ranks(), SaveGroup.of_all_ranks())
    return CheckpointWriter(out, run, all_ranks(), *groups, **({"keep": 1} | settings))


def save_at_once(run: Algorithm, out: Path) -> None:
    """Save a run, and wait until the checkpoint is on the disk."""
    make_writer(run, out).finish(run.progress())
