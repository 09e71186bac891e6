"""The server actor alone: memory, random weights, and the deaths of server and actor."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from conftest import PROMPT, assert_ended, processes_of
from ray.exceptions import RayActorError
from verl.utils.profiler.config import ProfilerConfig, TorchProfilerToolConfig
from verl.utils.profiler.profile import build_rollout_dist_profiler

from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.errors import BadRequestError, ServerDiedError, ServerUnavailableError

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": True}


def call(actor: Any, method: str, *args: Any) -> Any:
    return getattr(actor, method).remote(*args)


def ask(actor: Any, method: str, *args: Any) -> Any:
    return ray.get(call(actor, method, *args), timeout=120)


def released(actor: Any) -> set[str]:
    url, key = ask(actor, "get_connection")
    return set(HttpServerEngineAdapter.attach(url, admin_api_key=key).get_internal_state()["released"])


def test_a_hybrid_server(make_actor: Callable[..., Any]) -> None:
    """It refuses to generate before the first push and after sleep, sleeps twice in a row, and ends with its actor."""
    actor = make_actor({"load_format": "dummy"}, mode="hybrid")
    with pytest.raises(ServerUnavailableError, match="load_format=dummy and no update has succeeded"):
        ask(actor, "generate", PROMPT, GREEDY, "x")
    for _ in range(2):
        ask(actor, "sleep")
    assert released(actor) == {"kv_cache", "weights"}
    with pytest.raises(BadRequestError, match="update_weights wakes it"):
        ask(actor, "wake_up")
    ask(actor, "clear_kv_cache")
    for _ in range(2):
        ask(actor, "resume_memory", ["weights"])
    assert released(actor) == {"kv_cache"}
    ask(actor, "resume_memory", ["weights", "kv_cache"])
    assert released(actor) == set()

    processes = processes_of(actor)
    os.kill(ask(actor, "__ray_call__", lambda self: os.getpid()), signal.SIGKILL)
    with pytest.raises(RayActorError):
        ask(actor, "generate", PROMPT, GREEDY, "x")
    assert_ended(processes)


def test_a_colocated_server(make_actor: Callable[..., Any]) -> None:
    """Its weights survive sleep. After the server was killed, every call raises its last words, and nothing is left."""
    actor = make_actor({"enable_weights_cpu_backup": True}, mode="colocated")
    expected = ask(actor, "generate", PROMPT, GREEDY, "x")
    for _ in range(2):
        ask(actor, "sleep")
        assert released(actor) == {"kv_cache", "weights"}
        with pytest.raises(ServerUnavailableError, match="released"):
            ask(actor, "generate", PROMPT, GREEDY, "x")
        ask(actor, "wake_up")
        assert ask(actor, "generate", PROMPT, GREEDY, "x").token_ids == expected.token_ids
    teacher = ask(actor, "generate", PROMPT, {"prompt_logprobs": 2, "max_tokens": 1}, "x")
    assert [len(row) for row in teacher.extra_fields["prompt_ids"]] == [2] * len(PROMPT)

    ask(actor, "abort_all_requests")
    waiting = call(actor, "generate", PROMPT, GREEDY, "x")  # waits in the pause
    processes = processes_of(actor)
    processes[0].kill()
    last_words = r"process \d+\) ended with signal SIGKILL"
    with pytest.raises(ServerDiedError, match=last_words):
        ray.get(waiting, timeout=60)
    for method in ("get_connection", "sleep"):
        with pytest.raises(ServerDiedError, match=last_words):
            ask(actor, method)
    assert_ended(processes)


def torch_profiler(folder: Path) -> Any:
    """Return verl's profiler of replica 0, as the replica builds it."""
    config = ProfilerConfig(tool="torch", enable=True, all_ranks=True, save_path=str(folder))
    tool_config = TorchProfilerToolConfig(contents=["cpu", "stack"], discrete=True)
    return build_rollout_dist_profiler(0, 1, config=config, tool_config=tool_config)


def test_memory_is_kept_without_free_cache_engine(make_actor: Callable[..., Any], tmp_path: Path) -> None:
    """Its steps are recorded for verl's profiler. A scheduler that was killed ends the server, too, and the error has
    the end of the server's log."""
    server = {"profile_folder": str(tmp_path)}
    actor = make_actor(server, profiler=torch_profiler(tmp_path), mode="hybrid", free_cache_engine=False)
    ask(actor, "sleep")
    ask(actor, "release_kv_cache")
    assert released(actor) == set()
    ask(actor, "set_version", "5@5f2c9a1e")
    assert ask(actor, "generate", PROMPT, GREEDY, "x").extra_fields["weight_versions"] == [[5, 8]]

    ask(actor, "start_profile")
    ask(actor, "generate", PROMPT, GREEDY, "x")
    ask(actor, "stop_profile")
    assert [path.parent.name for path in tmp_path.rglob("*.json*")] == ["agent_loop_rollout_replica_0"]

    processes = processes_of(actor)
    next(process for process in processes if "verl_server.scheduler.process" in process.cmdline()).kill()
    assert_ended(processes)
    with pytest.raises(ServerDiedError, match=r"Last lines of server's log:(.|\n)*SIGKILL"):
        ask(actor, "get_connection")


def test_a_server_that_cannot_start(make_actor: Callable[..., Any]) -> None:
    with pytest.raises(Exception, match="no_such_folder"):
        make_actor({"model_path": "/no_such_folder"})
