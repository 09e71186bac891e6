"""The real programs, models that they talk to, and what must be true after each run.

`make test-programs` installs the programs into `.programs`. VERL_PROGRAMS names another folder with their commands.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "NO_PROXY": "*"}

import httpx
import pytest
import torch
from recomputation import Recomputation
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from verl_server import HttpServerEngineAdapter
from verl_server.files.trees import remove_tree
from verl_server.models.tiny import CHAT_TEMPLATE, make_model_folder
from verl_server.rollout.agents.types import Server

torch.set_num_threads(1)  # two threads wait for each other in spins where other processes use the cores

KEY = "owner"
ROOT = Path(__file__).parents[2]
PROGRAMS = Path(os.environ.get("VERL_PROGRAMS") or ROOT / ".programs" / "node_modules" / ".bin")
SMOLLM2 = Path(sys.prefix) / "smollm2"
"""The released model. `make test-programs` makes its folder before the tests."""


@dataclass
class Served:
    """A server, and what transformers computes for its model."""

    folder: Path
    engine: HttpServerEngineAdapter
    recomputation: Recomputation

    @property
    def server(self) -> Server:
        assert self.engine.url is not None
        return Server(self.engine.url, KEY)

    def sessions(self) -> int:
        """Return the number of sessions that the server knows."""
        headers = {"Authorization": f"Bearer {KEY}"}
        return len(httpx.get(f"{self.engine.url}/sessions", headers=headers, trust_env=False).json()["sessions"])


@pytest.fixture(scope="session")
def program() -> Callable[[str], str]:
    """Return a function that returns the path of a program."""

    def find(name: str) -> str:
        path = PROGRAMS / name
        assert path.exists(), f"{path} is missing: run the suite with `make test-programs`, or name VERL_PROGRAMS"
        return str(path)

    return find


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model with SmolLM2's tokenizer, a template with tools, and room for 20,000 tokens of a prompt.

    Each of its tokens is the end of its turn with a probability of about 0.05, so that its texts have an end.
    """
    tokenizer = with_tools(SMOLLM2)
    shape = {"vocab_size": len(tokenizer), "max_position_embeddings": 131_072, "init_std": 0.1}
    folder = make_model_folder(tmp_path_factory.mktemp("models") / "tiny", "qwen3", tokenizer=tokenizer, **shape)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][:, 0] = 1.0  # the final norm makes about 8 of it
    weights["lm_head.weight"][:, 0] = 0.0
    weights["lm_head.weight"][tokenizer.eos_token_id, 0] = 1.0
    save_file(weights, file, {"format": "pt"})
    return folder


def with_tools(folder: Path) -> Any:
    """Return the tokenizer of a folder with the chat template of the tiny models, which shows tools."""
    auto: Any = AutoTokenizer
    tokenizer = auto.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def real_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return SmolLM2-135M with the template of `tiny_folder`."""
    folder = tmp_path_factory.mktemp("models") / "real"
    folder.mkdir()
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        os.symlink(SMOLLM2 / file, folder / file)
    with_tools(SMOLLM2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def served(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Served]]:
    """Return a function that returns the server of "tiny" or "real". Each is launched once."""
    settings = {"tiny": {"kv_cache_gib": 0.25}, "real": {"max_total_tokens": 16_384}}
    with contextlib.ExitStack() as stack:

        @cache
        def serve(name: str) -> Served:
            folder = request.getfixturevalue(f"{name}_folder")
            engine = HttpServerEngineAdapter(
                model_path=str(folder),
                served_model_name="policy",
                api_key=KEY,
                port=0,
                device="cpu",
                dtype="float32",
                log_level="warning",
                **settings[name],
            )
            stack.callback(engine.shutdown)
            found = Served(folder, engine, Recomputation(folder))
            stack.callback(lambda: print(f"\n{name}: within {found.recomputation.worst:.1e} of transformers"))
            return found

        yield serve


@pytest.fixture(scope="session")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the folder of all temporary files of episodes. Its path is short, because sockets lie in it."""
    tmp_path_factory.getbasetemp()  # pytest's own files lie elsewhere
    folder = Path(tempfile.mkdtemp(prefix="vp-"))
    tempfile.tempdir = str(folder)
    yield folder
    tempfile.tempdir = None
    remove_tree(folder)


@pytest.fixture
def nothing_left(temporary: Path) -> Iterator[None]:
    """Assert after the test that no program runs, and that no file of an episode is left."""
    yield
    assert sandboxed(temporary) == []
    assert files_below(temporary) == []


def files_below(folder: Path) -> list[str]:
    """Return what is in a folder of temporary files, beside the roots of the processes that use it."""
    return [str(path) for root in folder.iterdir() for path in root.iterdir()]


def sandboxed(folder: Path) -> list[str]:
    """Return the commands of the processes in whose sandbox a folder below `folder` is mounted."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"/{folder.name}/" in (process / "mountinfo").read_text():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


def pytest_configure(config: pytest.Config) -> None:
    if shutil.which("bwrap") is None:
        raise pytest.UsageError("The programs run in bubblewrap: apt-get install bubblewrap.")
