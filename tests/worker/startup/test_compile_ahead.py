"""`compile_ahead` compiles the kernels that steps launch, each of them once, and never makes a start fail."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.depth import at_depth
from tests.worker.compiled_kernels import GPU
from verl_server.errors import BadRequestError
from verl_server.kernels import compilation, gpu
from verl_server.models.tiny import make_model_folder
from verl_server.scheduler import process
from verl_server.server_args import ServerArgs
from verl_server.worker.startup import compile_ahead, warm_up

ROOT = Path(__file__).parents[3]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    return folder


def kernels(command: str, model: Path) -> dict[str, Any]:
    """Run `compiled_kernels`, without Triton's interpreter, which the tests of this process use."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    arguments = [sys.executable, "-m", "tests.worker.compiled_kernels", command, str(model)]
    done = subprocess.run(arguments, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def wide_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights that are large enough for the products of few rows."""
    shape = {"hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 1, "head_dim": 128}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    return make_model_folder(tmp_path_factory.mktemp("wide"), "qwen3", weights=False, **shape, **heads)


SELDOM = {"_mask_tile", "copy_tiles", "_weigh_blocks", "_norm_rows", "_draw_row", "_search_row", "_top_of_row"}
"""Kernels with forms for masks, updates of weights, and settings of sampling that the steps below do not combine."""


@pytest.mark.parametrize("model", at_depth(["tiny_qwen2", "wide_qwen3"]))
def test_steps_launch_no_kernel_that_is_not_compiled_ahead(
    model: str, request: pytest.FixtureRequest, cache: Path
) -> None:
    """Steps with and without graphs, shared keys, prompts of all lengths and their log-probabilities, and sampling."""
    result = kernels("drift", request.getfixturevalue(model))
    assert result["missing"] == []
    rest = set(result["unused"]) - SELDOM
    assert not rest, "kernels that no step launches"


@pytest.mark.exhaustive
def test_kernels_are_compiled_into_the_cache_once(tiny_qwen3: Path, cache: Path) -> None:
    result = kernels("fill", tiny_qwen3)
    assert result["runs"] == [[["_mask_tile", "_norm_row", "_silu_mul_block"], 0, {}], [[], 3, {}]]
    assert result["stamp"] == [False, True]
    assert result["launches"] == [0, 1], "a launch finds the kernel, and one with another constant compiles it"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the arguments of processes instead of starting them."""
    arguments: list[dict[str, Any]] = []
    monkeypatch.setattr(compile_ahead, "ChildProcess", lambda name, module, argument: arguments.append(argument))
    return arguments


def test_a_stamp_spares_the_process(tmp_path: Path, cache: Path, started: list[dict[str, Any]]) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    args = ServerArgs(model_path=str(tmp_path), device="cuda")
    compile_ahead.compile_ahead(args, GPU)
    assert len(started) == 1
    stamp = Path(started[0]["stamp"])
    assert stamp.parent == cache
    cache.mkdir()
    stamp.touch()
    compile_ahead.compile_ahead(args.replace(port=1, random_seed=3), GPU)
    assert len(started) == 1, "these settings change no kernel"
    compile_ahead.compile_ahead(args.replace(page_size=32), GPU)
    compile_ahead.compile_ahead(args, GPU._replace(capability=100))
    config.write_text("{ }")
    compile_ahead.compile_ahead(args, GPU)
    assert len({argument["stamp"] for argument in started}) == 4
    compile_ahead.compile_ahead(args.replace(attention_backend="torch"), GPU)
    assert len(started) == 4, "nothing is compiled ahead for PyTorch's attention"


def test_a_failure_is_a_warning(
    tiny_qwen3: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(compile_ahead, "ChildProcess", fail)
    assert compile_ahead.compile_ahead(ServerArgs(model_path=str(tiny_qwen3)), GPU) is None
    assert "no more processes" in caplog.text
    assert compile_ahead.compile_ahead(ServerArgs(model_path="/no/such"), GPU) is None


def test_one_rank_of_each_host_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: list[int] = []
    kind: Any = GPU
    monkeypatch.setattr(process, "create_context", lambda args, rank: kind)
    args = ServerArgs(model_path="m", tp_size=4, nnodes=2, dist_init_addr="host:1")
    for rank in range(4):
        monkeypatch.setattr(process, "compile_ahead", lambda args, gpu, rank=rank: ranks.append(rank))
        process._prepare_device(args, rank)
    assert ranks == [0, 2]
    kind = None  # no GPU
    process._prepare_device(args, 0)
    assert ranks == [0, 2]


def test_the_process_logs_its_failure_and_ends(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from verl_server.worker.startup import compile_process

    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(os, "nice", lambda _: None)
    args = ServerArgs(model_path="/no/such")
    argument = {"server_args": args.to_json(), "gpu": list(GPU), "stamp": str(cache / "stamp")}
    compile_process.run_compile_process(argument, lambda info: None)
    assert "not compiled ahead" in caplog.text and "/no/such" in caplog.text
    assert gpu.capability(torch.device("cpu")) == 0, "this process launches kernels for its own device again"


class Function:
    """What Triton's hooks get of a kernel."""

    module, name = "kernels", "kernel"


def locked(key: str) -> bool:
    """Return True if another process would wait for the kernel `key`."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            compilation._MOST_SECONDS = 0.05
            start = time.monotonic()
            shared = compilation._Shared()
            shared.before(key=key, fn=Function)
            code = int(time.monotonic() - start >= 0.05)
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 1)
    return code == 1


def test_one_process_compiles_a_kernel_and_others_wait(cache: Path) -> None:
    shared = compilation._Shared()
    assert not locked("a")
    assert shared.before(key="a", fn=Function) is False, "the compilation goes on"
    assert locked("a") and not locked("b")
    shared.before(key="b", fn=Function)
    assert locked("b") and not locked("a"), "a compilation that failed holds no lock"
    shared.after()
    assert not locked("b")


def test_a_cache_without_locks_is_no_failure(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file where the folder would be")
    shared = compilation._Shared()
    assert shared.before(key="a", fn=Function) is False
    shared.after()
    cache.unlink()

    def no_locks(*_: object) -> None:
        raise OSError("No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    assert shared.before(key="a", fn=Function) is False


def test_warm_up_names_what_is_missing(
    tiny_qwen3: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from verl_server.worker.startup import compile_process

    args = ServerArgs(model_path=str(tiny_qwen3))
    monkeypatch.setattr(warm_up, "find_gpu", lambda _: None)
    with pytest.raises(BadRequestError, match="--gpu-capability"):
        warm_up.warm_up(args)
    with pytest.raises(BadRequestError, match="Set both"):
        warm_up.warm_up(args, 9.0)
    done = compile_process.Compiled(["decode_kernel", "decode_kernel", "_gemv"], 4, {}, 1.25)
    requests: list[compile_ahead.CompileRequest] = []
    monkeypatch.setattr(compile_process, "compile_all", lambda request: requests.append(request) or done)
    text = warm_up.warm_up(args, 9.0, 132)
    assert requests[0].gpu == GPU
    assert text.startswith("Compiled 3 kernels in 1.2 s for compute capability 9.0 with 132 multiprocessors; 4 were")
    assert str(cache) in text and "2 x decode_kernel, _gemv" in text
    done.failed["_gemv"] = "out of memory"
    with pytest.raises(Exception, match="1 kernels could not be compiled: _gemv: out of memory"):
        warm_up.warm_up(args, 9.0, 132)
