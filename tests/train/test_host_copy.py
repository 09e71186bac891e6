"""A copy of weights and optimizer has the values of the time when it was taken, and uses its memory again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.train.test_checkpoints import make_trainer, train
from verl_server.train.checkpoints import state_of
from verl_server.train.host_copy import HostCopy
from verl_server.train.ranks import setup_ranks
from verl_server.train.run_end import Progressing

pytestmark = pytest.mark.usefixtures("one_rank")


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        return [tensor for found in value.values() for tensor in tensors(found)]
    if isinstance(value, list):
        return [tensor for found in value for tensor in tensors(found)]
    return [value] if isinstance(value, Tensor) else []


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_later_steps_do_not_change_the_copy(policy_folder: Path, dtype: torch.dtype) -> None:
    """With bfloat16 passes, the parameters are DTensors."""
    trainer, copy = make_trainer(policy_folder, dtype), HostCopy()
    train(trainer, 0, 1)
    state = state_of(trainer.state.models, trainer.state.progress(Progressing(1, 1)))
    before = [local(tensor).clone() for tensor in tensors(state)]
    copied = copy.take(state)
    assert any(isinstance(tensor, DTensor) for tensor in tensors(copied)) == (dtype == torch.bfloat16)
    train(trainer, 1, 2)
    assert not all(torch.equal(local(now), then) for now, then in zip(tensors(state), before, strict=True))
    assert all(torch.equal(local(now), then) for now, then in zip(tensors(copied), before, strict=True))
    assert copied["optimizer"]["param_groups"][0]["lr"] != trainer.optimizer.param_groups[0]["lr"]
    again = copy.take(state_of(trainer.state.models, trainer.state.progress(Progressing(2, 2))))
    places = [[local(tensor).data_ptr() for tensor in tensors(found)] for found in (copied, again)]
    assert places[0] == places[1] and len(set(places[0])) == len(before)


def test_the_memory_is_that_of_the_state(policy_folder: Path) -> None:
    """A tensor that is a view of a larger storage is copied without the rest, which a file would have, too."""
    storage = torch.arange(12.0)
    copied = HostCopy().take({"part": storage[4:8], "other": [storage[::2], 3.0, "text", (0.9, 0.95)]})
    assert copied["part"].tolist() == [4, 5, 6, 7] and copied["part"].untyped_storage().size() == 16
    assert copied["other"][0].tolist() == [0, 2, 4, 6, 8, 10] and copied["other"][1:] == [3.0, "text", (0.9, 0.95)]


@pytest.mark.cuda
def test_on_cuda_the_copy_is_between_the_kernels_around_it() -> None:
    """A step that is still running when the copy is taken is in the copy, and the step that follows is not."""
    setup_ranks("cuda")
    weight = torch.zeros(2**22, device="cuda")
    copy = HostCopy()
    copy.take({"weight": weight})
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    weight.fill_(1.0)
    copied = copy.take({"weight": weight})["weight"]
    weight.fill_(2.0)
    torch.cuda.synchronize()
    assert copied.device.type == "cpu" and bool((copied == 1.0).all())
