"""A server serves the trainer's current values, whatever happened to the trainer's storages between pushes.

Storages of a real model move, are freed, reused and written at random, and are pushed in random ways to a real engine.
After every push the checksum of every served parameter must be the trainer's. Otherwise the server has read old or
foreign memory.
"""

from __future__ import annotations

import functools
import gc
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.busy_gpu import queue_late
from tests.depth import at_depth
from verl_server import Engine
from verl_server.weight_sync.checksum import tensor_checksum

SETTINGS: dict[str, Any] = {"device": "cpu", "cpu_threads": 1, "kv_cache_gib": 0.02, "log_level": "warning"}


class MovingTrainer:
    def __init__(self, folder: Path, seed: int) -> None:
        auto: Any = AutoModelForCausalLM
        self.model: nn.Module = auto.from_pretrained(folder, dtype=torch.float32)
        self.rng = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._last: list[Callable[[], None]] = []

    def _values(self, shape: Any) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator)

    def _some(self) -> list[nn.Parameter]:
        parameters = list(self.model.parameters())
        return self.rng.sample(parameters, self.rng.randint(1, len(parameters)))

    @torch.no_grad()
    def step(self) -> None:
        """Make some moves: often a single one, and often the previous ones again.

        A second move could make the sender look again, and so hide a first move that the sender misses.
        """
        moves = [self.write, self.write_in_a_thread, self.assign_data, self.assign_views, self.set_storages]
        moves += [self.resize_and_set, self.replace_parameters, self.load_state, self.swap, self.slide, self.turn]
        moves += [self.convert, self.share]
        if not self._last or self.rng.random() < 0.5:
            self._last = self.rng.choices(moves, k=self.rng.choice([1, 1, 1, 2, 3]))
        for move in self._last:
            move()

    # -- moves ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def write(self) -> None:
        for parameter in self._some():
            parameter.add_(self._values(parameter.shape))

    def write_in_a_thread(self) -> None:
        """Write from another thread until immediately before the push."""
        parameters, written = self._some(), threading.Event()
        values = [self._values(parameter.shape) for parameter in parameters]

        def work() -> None:
            with torch.no_grad():
                for _ in range(3):
                    for parameter, value in zip(parameters, values, strict=True):
                        parameter.add_(value)
            written.set()

        threading.Thread(target=work).start()
        assert written.wait(20)

    def assign_data(self) -> None:
        for parameter in self._some():
            parameter.data = self._values(parameter.shape)

    def assign_views(self) -> None:
        """Replace the data by parts of larger storages: at an offset, transposed, or with gaps."""
        for parameter in self._some():
            kind = self.rng.randrange(3)
            if kind == 0:
                flat = self._values(parameter.numel() + 7)
                parameter.data = flat[7:].view(parameter.shape)
            elif kind == 1:
                parameter.data = self._values(parameter.shape[::-1]).t() if parameter.dim() == 2 else parameter.clone()
            else:
                parameter.data = self._values((*parameter.shape, 2))[..., 1]

    def set_storages(self) -> None:
        for parameter in self._some():
            parameter.set_(self._values(parameter.shape))

    def resize_and_set(self) -> None:
        """Free memory and allocate it again, perhaps at the same address."""
        for parameter in self._some():
            fresh = self._values(parameter.shape)
            storage, nbytes = fresh.untyped_storage(), fresh.untyped_storage().nbytes()
            storage.resize_(0)
            storage.resize_(nbytes)
            fresh.copy_(self._values(parameter.shape))
            parameter.data = fresh

    def replace_parameters(self) -> None:
        """Free the old parameters before the new ones are made, so that the new ones may get the old addresses."""
        for module in self.model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if self.rng.random() < 0.5:
                    shape = parameter.shape
                    delattr(module, name)
                    del parameter
                    gc.collect(0)
                    setattr(module, name, nn.Parameter(self._values(shape)))

    def load_state(self) -> None:
        state = {name: self._values(tensor.shape) for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(state, assign=self.rng.random() < 0.7)

    def swap(self) -> None:
        """Exchange the memory of two layers: every address is known, and each belongs to another parameter."""
        first, second = self.model.model.layers  # type: ignore[union-attr, misc]
        for a, b in zip(first.parameters(), second.parameters(), strict=True):
            a.data, b.data = b.data, a.data

    def slide(self) -> None:
        """Switch between the two halves of a storage that stays: only the offset differs."""
        sliding = [p for p in self.model.parameters() if p.untyped_storage().nbytes() == 2 * p.nbytes]
        for parameter in sliding:
            count = parameter.numel()
            start = 0 if parameter.storage_offset() else count
            whole = torch.as_strided(parameter.detach(), (2 * count,), (1,), 0)
            parameter.data = whole[start : start + count].view(parameter.shape)
        for parameter in [] if sliding else self._some():
            count = parameter.numel()
            parameter.data = self._values((2 * count,))[:count].view(parameter.shape)

    def turn(self) -> None:
        """Transpose square parameters: the same memory in another order."""
        for parameter in self._some():
            if parameter.dim() == 2 and parameter.shape[0] == parameter.shape[1]:
                parameter.data = parameter.data.t()

    def convert(self) -> None:
        self.model.double().float()

    def share(self) -> None:
        """Move parameters into torch's own shared memory."""
        for parameter in self._some():
            parameter.data = parameter.clone().share_memory_()

    # -- expected values -----------------------------------------------------------------------------------------

    def checksums(self) -> dict[str, str]:
        return {name: tensor_checksum(parameter.detach().clone()) for name, parameter in self.model.named_parameters()}


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Engine]:
    with Engine(model_path=str(tiny_llama), **SETTINGS) as engine:
        yield engine


@pytest.mark.parametrize("seed", at_depth(range(3)))
def test_served_weights_are_what_the_trainer_meant(engine: Engine, tiny_llama: Path, seed: int) -> None:
    trainer, by_id = MovingTrainer(tiny_llama, seed), 0
    engine.register_weights(trainer.model)
    for push in range(100):
        if trainer.rng.random() < 0.8:
            trainer.step()
        how = trainer.rng.choice(["registered", "named", "state", "registered again"])
        if how == "named":
            engine.update_weights_from_tensor(trainer.model.named_parameters(), partial=False)
        elif how == "state":
            engine.update_weights_from_tensor(trainer.model.state_dict().items(), partial=False)
        else:
            if how == "registered again":
                engine.unregister_weights()
                engine.register_weights(trainer.model)
                trainer.write()
            engine.push_weights(partial=False)
            by_id += 1
        meant, served = trainer.checksums(), engine.weights_checker()["ranks"][0]["checksums"]
        wrong = [name for name in meant if served[name] != meant[name]]
        assert not wrong, f"push {push} ({how}): {wrong[:4]} ({len(wrong)} in all) differ from the trainer's"
    assert by_id
    engine.unregister_weights()


# -- on a GPU --------------------------------------------------------------------------------------------------------


def copy_all(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])


@pytest.mark.cuda
def test_a_delayed_step_on_a_side_stream_is_served_whole(tiny_llama: Path) -> None:
    """A push includes an optimizer step that is still queued on a side stream, for which no code waits.

    Between pushes the memory is returned to the driver and allocated again, perhaps at the same addresses.
    """
    auto: Any = AutoModelForCausalLM
    model: nn.Module = auto.from_pretrained(tiny_llama, dtype=torch.float32).cuda()
    generator, stream = torch.Generator().manual_seed(0), torch.cuda.Stream()
    settings = {"device": "cuda", "dtype": "float32", "max_total_tokens": 4096, "log_level": "warning"}
    with Engine(model_path=str(tiny_llama), **settings) as engine:
        engine.register_weights(model)
        for push in range(12):
            if push % 4 == 3:
                engine.unregister_weights()
                shapes = [parameter.shape for parameter in model.parameters()]
                for parameter in model.parameters():
                    parameter.data = torch.empty(0, device="cuda")
                torch.cuda.empty_cache()
                for parameter, shape in zip(model.parameters(), shapes, strict=True):
                    parameter.data = torch.zeros(shape, device="cuda")
                engine.register_weights(model)
            meant = {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
            ready = {name: values.cuda() for name, values in meant.items()}
            queue_late(stream, functools.partial(copy_all, model, ready))
            if push % 2:
                engine.push_weights(partial=False)
            else:
                engine.update_weights_from_tensor(model.named_parameters(), partial=False)
            served = engine.weights_checker()["ranks"][0]["checksums"]
            wrong = [name for name, values in meant.items() if served[name] != tensor_checksum(values)]
            assert not wrong, f"push {push}: {wrong[:4]} ({len(wrong)} in all) differ from the trainer's"
        engine.unregister_weights()
