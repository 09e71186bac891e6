"""Modules reach the engine's own loader whole, wherever the groups of an update are cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from verl_server.backends.process.live_model import LiveModel
from verl_server.backends.process.module_loader import ModuleLoader

GROUPS = {"q": "attn", "k": "attn", "v": "attn", "norm": "norm"}


class FakeLive(LiveModel):
    """A model of one parameter. `reloads` has the values of each reloaded module."""

    engine = "SGLang"

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), torch.float32, SimpleNamespace(tie_word_embeddings=False))
        self._model = torch.nn.Linear(2, 2, bias=False)
        self.reloads: list[dict[str, float]] = []
        self.error: Exception | None = None
        self.changes: float | None = None
        """The value that a reload leaves in the tensors that it gets."""

    @property
    def model(self) -> torch.nn.Module:
        return self._model

    def reload(self, modules: Iterable[dict[str, Tensor]]) -> None:
        for tensors in modules:
            if self.error is not None:
                raise self.error
            self.reloads.append({name: tensor.item() for name, tensor in tensors.items()})
            for tensor in tensors.values() if self.changes is not None else ():
                tensor.fill_(self.changes)

    def taken(self) -> list[dict[str, float]]:
        reloads, self.reloads = self.reloads, []
        return reloads


@pytest.fixture
def live() -> FakeLive:
    return FakeLive()


@pytest.fixture
def loader(live: FakeLive) -> ModuleLoader:
    return ModuleLoader(live, GROUPS)


def tensors(**values: float) -> list[tuple[str, Tensor]]:
    return [(name, torch.tensor(value)) for name, value in values.items()]


def test_a_complete_module_is_reloaded_at_once(live: FakeLive, loader: ModuleLoader) -> None:
    def source() -> Iterator[tuple[str, Tensor]]:
        yield from tensors(q=1, norm=2)
        assert live.reloads == [{"norm": 2}], "no later tensor is needed"
        yield from tensors(v=3, k=4)

    loader.load(source())
    assert live.taken() == [{"norm": 2}, {"q": 1, "v": 3, "k": 4}]
    assert loader.names == GROUPS.keys()


def test_an_incomplete_module_is_held_until_its_last_tensor(live: FakeLive, loader: ModuleLoader) -> None:
    loader.load(tensors(q=1))
    loader.load(tensors(norm=2, v=3))
    assert live.taken() == [{"norm": 2}]
    loader.load(tensors(k=4))
    assert live.taken() == [{"q": 1, "v": 3, "k": 4}]
    loader.load(tensors(k=5))
    assert live.taken() == [], "the module was loaded, so nothing of it is held"


def test_held_tensors_are_copies(live: FakeLive, loader: ModuleLoader) -> None:
    """The memory of a tensor belongs to the trainer, or to the next group."""
    given = tensors(q=1, k=2)
    loader.load(given)
    for _, tensor in given:
        tensor.fill_(9)
    loader.load(tensors(v=3))
    assert live.taken() == [{"q": 1, "k": 2, "v": 3}]


def test_a_tensor_that_the_engine_changes_is_a_copy(live: FakeLive) -> None:
    """A tensor of an update may be the trainer's own memory."""
    given = tensors(q=1, k=2, v=3, norm=4)
    loader = ModuleLoader(live, GROUPS, overwritten={"norm"})
    live.changes = 9
    loader.load(given)
    assert [tensor.item() for _, tensor in given] == [9, 9, 9, 4]


def test_a_tensor_that_comes_again_replaces_the_held_one(live: FakeLive, loader: ModuleLoader) -> None:
    loader.load(tensors(q=1))
    loader.load(tensors(q=2, k=3))
    loader.load(tensors(q=5, v=4))
    assert live.taken() == [{"q": 5, "k": 3, "v": 4}]


def test_an_error_of_the_engine_drops_what_is_held(live: FakeLive, loader: ModuleLoader) -> None:
    loader.load(tensors(q=1, k=2))
    live.error = RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        loader.load(tensors(norm=3))
    live.error = None
    loader.load(tensors(v=4))
    assert live.taken() == [], "q and k of the failed update are not loaded with the next one"
    loader.load(tensors(q=5, k=6))
    assert live.taken() == [{"v": 4, "q": 5, "k": 6}]


def test_an_error_of_the_source_drops_what_is_held(live: FakeLive, loader: ModuleLoader) -> None:
    def source() -> Iterator[tuple[str, Tensor]]:
        yield from tensors(k=2)
        raise ConnectionError("the trainer has ended")

    loader.load(tensors(q=1))
    with pytest.raises(ConnectionError):
        loader.load(source())
    loader.load(tensors(k=3, v=4))
    assert live.taken() == []


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["q", "k", "v", "norm"], []),
        (["norm"], []),
        (["k"], ["q", "v"]),
        (["v", "norm", "q"], ["k"]),
        (["elsewhere"], []),
        ([], []),
    ],
)
def test_what_an_update_lacks_of_the_modules_it_touches(
    loader: ModuleLoader, names: list[str], expected: list[str]
) -> None:
    assert loader.lacking(names) == expected


def test_an_update_is_refused_after_storage_has_moved(live: FakeLive, loader: ModuleLoader) -> None:
    live.pin(["weight"])
    assert loader.refusal == ""
    live.model.weight.data = torch.zeros(2, 2)
    assert "SGLang" in loader.refusal and "weight" in loader.refusal and "Restart the server" in loader.refusal
    loader.unproved = "The proof failed."
    assert loader.refusal == "The proof failed."
