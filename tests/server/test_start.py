"""Modules that each process of a server imports until it is ready: imports take most of the time of a start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verl_server.ipc.child_process import ChildProcess
from verl_server.ipc.message_socket import MessageSocket
from verl_server.server_args import ServerArgs

WAIT = 100.0
NOT_FOR_SCHEDULERS = (
    "transformers",
    "huggingface_hub",
    "tokenizers",
    "httpx",
    "starlette",
    "uvicorn",
    "jinja2",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "triton",
)
NOT_FOR_SERVERS = ("torch", "safetensors", "verl_server.scheduler.rank", "verl_server.worker", "tyro")
NOT_FOR_HELP = (
    "torch",
    "transformers",
    "numpy",
    "httpx",
    "starlette",
    "uvicorn",
    "tyro",
    "msgspec",
    "verl_server.server",
)


def ready_info(module: str, argument: dict[str, Any], fds: tuple[int, ...] = ()) -> dict[str, Any]:
    child = ChildProcess(module, module, argument, pass_fds=fds)
    try:
        return child.wait_ready(WAIT)
    finally:
        child.terminate()


def imported(modules: list[str], unwanted: tuple[str, ...]) -> list[str]:
    return [name for name in unwanted if name in modules]


@pytest.fixture
def args(tiny_llama: Path) -> ServerArgs:
    return ServerArgs(model_path=str(tiny_llama), device="cpu", cpu_threads=1, kv_cache_gib=0.02, port=0)


@pytest.mark.usefixtures("real_processes")
def test_a_scheduler_process_imports_torch_and_little_else(args: ServerArgs) -> None:
    messages, schedulers_end = MessageSocket.pair()
    with schedulers_end:
        fd = schedulers_end.fileno()
        argument = {"server_args": args.to_json(), "tp_rank": 0, "init_addr": None, "socket": fd}
        info = ready_info("tests.scheduler.report_modules", argument, (fd,))
    messages.close()
    assert imported(info["modules"], NOT_FOR_SCHEDULERS) == []
    assert "torch" in info["modules"]
    assert list(info["start"]) == ["entered", "imports", "device", "weights", "kv_cache", "ready"]
    assert list(info["start"].values()) == sorted(info["start"].values())


@pytest.mark.usefixtures("real_processes")
def test_a_server_process_tokenizes_without_torch(args: ServerArgs) -> None:
    info = ready_info("tests.server.report_modules", {"server_args": args.to_json()})
    assert imported(info["modules"], NOT_FOR_SERVERS) == []
    assert "transformers" in info["modules"], "a server process with a tokenizer imports transformers"


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from verl_server.cli.main import main; main(['--help']); "
        f"print([name for name in {NOT_FOR_HELP!r} if name in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT, check=True)
    assert "commands:" in result.stdout
    assert result.stderr.strip() == "[]"
