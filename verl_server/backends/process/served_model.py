"""`ServedModel`: an engine's model on one worker, with the interface `UpdatedModel` for weight updates.

Names and shapes are those of the checkpoint, which trainers push. Engines fuse, shard and repack parameters for their
kernels. At the start, the engine's loader is traced, and the trace is proved. So each update copies most tensors
directly into the live storage. The engine's own loader loads the other tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from verl_server.backends.process.live_model import LiveModel
from verl_server.backends.process.load_plan import LoadPlan
from verl_server.backends.process.load_proof import prove, unwritten_modules
from verl_server.backends.process.module_loader import ModuleLoader
from verl_server.files.model_folder import resolve_model_folder
from verl_server.ipc.tp_group import TpGroup
from verl_server.models.expert_stacks import expanded_shapes, expert_stacks
from verl_server.models.loader import (
    WeightMap,
    WeightSlot,
    check_tied,
    checkpoint_shapes,
    dummy_tensors,
    iter_checkpoint,
)
from verl_server.server_args import ServerArgs
from verl_server.weight_sync.receiver.names import listed
from verl_server.worker.weights.updated_model import ReleasableMemory

logger = logging.getLogger(__name__)


class ServedModel:
    def __init__(
        self, live: LiveModel, tp: TpGroup, server_args: ServerArgs, memory: ReleasableMemory | None = None
    ) -> None:
        self.device, self.memory = live.device, memory
        self._live = live
        folder = resolve_model_folder(server_args.model_path, server_args.revision)
        shapes, aliases = _parameter_shapes(folder), {}
        if live.ties_embeddings and "model.embed_tokens.weight" in shapes:
            shapes.pop("lm_head.weight", None)
            aliases["lm_head.weight"] = "model.embed_tokens.weight"
        slots = {name: WeightSlot(name, shape, live.dtype, []) for name, shape in shapes.items()}
        is_dummy = server_args.load_format == "dummy"
        if not is_dummy:
            check_tied(aliases, folder)  # engines leave the head of a tied pair out in silence
        first = {} if is_dummy else live.digests()
        self._unserved: frozenset[str] = frozenset()
        self._loader = self._proved_loader(slots, tp)
        self.weight_map = WeightMap(slots, aliases, expert_stacks(slots), self._loader, self._unserved)
        self._install(dummy_tensors(slots, live.device) if is_dummy else iter_checkpoint(folder))
        if differing := self._differing(first):
            self._loader.unproved = (
                f"{live.engine}'s loader does not restore {len(differing)} tensors of this model "
                f"({listed(differing)}), so its weights cannot be updated. Generation works with the weights of the "
                "start."
            )
            logger.error(self._loader.unproved)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _proved_loader(self, slots: dict[str, WeightSlot], tp: TpGroup) -> ModuleLoader:
        """Set the pieces of slots that copies can write, and return the loader of the other slots.

        All ranks load the same tensors with the loader. Record the tensors that the engine reads on no rank, such as
        layers for multi-token prediction. After the call, the model has codes instead of weights.
        """
        live = self._live
        try:
            trace, loaded = live.trace(slots)
            plan = LoadPlan(trace, loaded, live.tensors())
        except Exception as error:  # a loader may do anything
            logger.warning("%s's loader cannot be traced, so every update goes through it: %r", live.engine, error)
            return ModuleLoader(live, live.groups(slots), overwritten=slots)
        groups = plan.groups(slots)
        loader = ModuleLoader(live, groups, trace.overwritten)
        prove(live, plan, slots, loader.load)
        unwritten = unwritten_modules(live, plan, slots, loader.load)
        copied = plan.pieces()
        loader.names = frozenset[str]().union(*_of_all_ranks(tp, [name for name in groups if name not in copied]))
        self._unserved = frozenset(slots).difference(*_of_all_ranks(tp, list(groups)))
        for name in loader.names & groups.keys():
            plan.reload(groups[name], "it is reloaded on another rank")
        if lost := sorted({name for names in _of_all_ranks(tp, unwritten) for name in names}):
            loader.unproved = (
                f"{live.engine}'s loader changes nothing in {len(lost)} modules of this model ({listed(lost)}) when it "
                "loads them again, so its weights cannot be updated. Generation works with the weights of the start."
            )
            logger.error(loader.unproved)
        if self._unserved:
            logger.info(
                "%s reads %d tensors of the checkpoint on no rank, so updates may omit them: %s",
                live.engine,
                len(self._unserved),
                listed(sorted(self._unserved)),
            )
        for name, pieces in plan.pieces().items():
            slots[name].pieces, slots[name].dtype = pieces, pieces[0][0].dtype
        live.pin(plan.copied())
        plan.log(slots, live.engine)
        return loader

    def _install(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        slots, names = self.weight_map.slots, self._loader.names

        def rest() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                if name in names:
                    yield name, tensor
                elif name in slots:
                    slots[name].copy_from(tensor)

        if names:
            self._loader.load(rest())
        else:
            for name, _ in rest():
                raise AssertionError(name)

    def _differing(self, first: dict[str, str]) -> list[str]:
        now = self._live.digests() if first else {}
        return [name for name in first if now.get(name) != first[name]]


def _of_all_ranks(tp: TpGroup, names: list[str]) -> list[list[str]]:
    """Return the names of every rank."""
    return [msgspec.msgpack.decode(data, type=list[str]) for data in tp.gather(msgspec.msgpack.encode(names))]


def _parameter_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of a checkpoint.

    If it has no weights, read the shapes from transformers' model of its config.
    """
    if any(folder.glob("*.safetensors")):
        return checkpoint_shapes(folder)
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return expanded_shapes({name: tuple(parameter.shape) for name, parameter in model.named_parameters()})
