"""Families of released models, and a server for a random model of each.

`make test-agents` runs these tests in an environment of their own, which has the packages with their vocabularies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "NO_PROXY": "*"}

import pytest
from families import FAMILIES, Family, make_family
from recomputation import Recomputation
from stacked import FamilyStack, family_stack

from verl_server import HttpServerEngineAdapter
from verl_server.rollout.agents.types import Server

KEY = "owner"


class Served:
    """A server with a random model of a family, whose weights a test may replace."""

    def __init__(self, family: Family, folder: Path, engine: HttpServerEngineAdapter) -> None:
        self.family, self.folder, self.engine = family, folder, engine
        self.recomputation = Recomputation(family, folder)

    @property
    def server(self) -> Server:
        assert self.engine.url is not None
        return Server(self.engine.url, KEY)

    def push(self, version: str, mode: str = "wait") -> None:
        """Replace the weights by those of a version of `Recomputation.model`."""
        weights = list(self.recomputation.model(version).state_dict().items())
        self.engine.update_weights_from_tensor(weights, weight_version=version, partial=False, mode=mode)


@pytest.fixture(scope="session")
def family() -> Callable[[str], Family]:
    """Return a function that returns a family by its name. Each is made once: it takes seconds."""
    return lru_cache(maxsize=None)(make_family)


@pytest.fixture(scope="session")
def model_folder(family: Callable[[str], Family], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the folder of a family's random model."""
    return lru_cache(maxsize=None)(lambda name: family(name).make_folder(tmp_path_factory.mktemp("models") / name))


@pytest.fixture(scope="session", params=FAMILIES)
def stack(
    request: pytest.FixtureRequest, family: Callable[[str], Family], model_folder: Callable[[str], Path]
) -> Iterator[FamilyStack]:
    """Yield the front process of each family, over a scheduler that samples what a test wants."""
    with family_stack(family(request.param), model_folder(request.param)) as stack:
        yield stack


@pytest.fixture(scope="session")
def serve(family: Callable[[str], Family], model_folder: Callable[[str], Path]) -> Iterator[Callable[[str], Served]]:
    """Return a function that returns the server of a family, with the folder's weights. One server runs at a time."""
    running: dict[str, Served] = {}

    def stop() -> None:
        for name, served in running.items():
            served.engine.shutdown()
            print(f"\n{name}: log-probabilities within {served.recomputation.worst:.1e} of transformers")
        running.clear()

    def start(name: str) -> Served:
        if name not in running:
            stop()
            engine = HttpServerEngineAdapter(
                model_path=str(model_folder(name)),
                api_key=KEY,
                port=0,
                kv_cache_gib=0.1,
                cpu_threads=1,
                cpu_kernel_choice="torch",
                log_level="warning",
            )
            running[name] = Served(family(name), model_folder(name), engine)
        served = running[name]
        served.push("default")
        return served

    yield start
    stop()
