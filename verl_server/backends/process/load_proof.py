"""`prove`: proves before the server is ready that weight updates write the same bytes as the engine's own loader.

The engine loads codes instead of weights (`weight_sync.receiver.load_trace.codes`). Each parameter that the plan would
copy is compared with the codes, byte for byte. If a module differs, each update loads it through the engine. The caller
must install the weights again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from verl_server.backends.process.live_model import LiveModel
from verl_server.backends.process.load_plan import LoadPlan
from verl_server.models.loader import WeightSlot
from verl_server.weight_sync.checksum import tensor_checksums
from verl_server.weight_sync.receiver.load_trace.codes import ROUNDS, coded
from verl_server.weight_sync.receiver.load_trace.proof import ParameterProof

Load = Callable[[Iterable[tuple[str, Tensor]]], object]


def prove(live: LiveModel, plan: LoadPlan, slots: Mapping[str, WeightSlot], load: Load) -> None:
    """Load codes through the engine with `load`. For each module whose copies are not proved, plan a reload instead.

    After the call, the model has codes instead of weights.
    """
    copied = plan.copied()
    if not copied:
        return
    numbers = {name: number for number, name in enumerate(slots)}
    tensors = live.tensors()
    proofs = {name: ParameterProof(tensors[name], copies) for name, copies in copied.items()}
    sources = {copy.source: None for copies in copied.values() for copy in copies}
    others = {name: tensor for name, tensor in tensors.items() if name not in copied}
    before, kernels = _digests(others), live.kernels()
    for round_ in range(ROUNDS):

        def code(name: str, round_: int = round_) -> Tensor:
            slot = slots[name]
            return coded(numbers[name], slot.shape, slot.dtype, live.device, round_)

        load((name, code(name)) for name in sources)
        for name in [name for name, proof in proofs.items() if not proof.holds(code)]:
            plan.reload(name.rpartition(".")[0], "its loader writes other bytes than the copies")
            del proofs[name]
    for module, held in live.kernels().items():
        if held.keys() != kernels[module].keys() or any(held[name] is not kernels[module][name] for name in held):
            plan.reload(module, "its kernel is made from its weights")
    after = _digests({name: tensor for name, tensor in live.tensors().items() if name not in copied})
    for name in before:
        if after.get(name) != before[name]:
            # Made from other weights, in the same module or in one beside it, when the engine processes them.
            above = name.rpartition(".")[0].rpartition(".")[0]
            plan.reload_below(above, f"{name} is derived from its weights")


def unwritten_modules(live: LiveModel, plan: LoadPlan, slots: Mapping[str, WeightSlot], load: Load) -> list[str]:
    """Load codes into the modules that each update reloads. Return the modules in which nothing has changed.

    An update would be without effect there. After the call, the model has codes instead of weights.
    """
    modules, groups = plan.reloaded_with_weights(), plan.groups(slots)
    reloaded = {groups[source] for sources in modules.values() for source in sources}
    before = _states(live, modules)
    load(
        (name, coded(number, slot.shape, slot.dtype, live.device, ROUNDS))
        for number, (name, slot) in enumerate(slots.items())
        if groups.get(name) in reloaded
    )
    after = _states(live, modules)
    return [module for module in modules if before[module] and after[module] == before[module]]


def _states(live: LiveModel, modules: Iterable[str]) -> dict[str, dict[str, object]]:
    """Return {module: checksums of its tensors, and its kernels, by name}. Kernels are equal only to themselves."""
    kernels = live.kernels()
    found: dict[str, dict[str, object]] = {module: dict(kernels.get(module, {})) for module in modules}
    for name, digest in live.digests().items():
        module, _, attribute = name.rpartition(".")
        if module in found:
            found[module][attribute] = digest
    return found


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return dict(zip(tensors, tensor_checksums(tensor.contiguous() for tensor in tensors.values()), strict=True))
