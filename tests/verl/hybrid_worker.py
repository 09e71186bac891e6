"""verl's hybrid worker, with methods through which a test changes, reads and pushes the weights of two FSDP2 ranks."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class HybridWorker(ActorRolloutRefWorker):
    """A trainer rank and its rank of the rollout."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, seed: int) -> None:
        """Change the shards of this rank in place, as an optimizer's step would."""
        generator = torch.Generator().manual_seed(100 * seed + self.rank)
        with torch.no_grad():
            for parameter in self.actor.engine.module.parameters():
                shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                shard.add_(0.05 * torch.randn(shard.shape, generator=generator))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def forward_only(self) -> None:
        """Run a forward pass without a backward pass, which leaves parameters gathered."""
        with torch.no_grad():
            self.actor.engine.module(torch.tensor([[5, 6, 7]]))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def full_weights(self) -> dict[str, Any]:
        """Return the weights of the trainer, as numpy arrays by name."""
        state = self.actor.engine.module.state_dict()
        return {name: _full(value).clone().numpy() for name, value in state.items()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def push(self, kind: str, steps: int | None, failing_rank: int = -1, stop_at: int | None = None) -> None:
        """Push without the steps around it in `update_weights`.

        `kind`: "gathered", "shards", "staged" (an iterator over shards), "async" or "unknown name".
        The iterator of `failing_rank` raises an error at item `stop_at`, before its collective. With `failing_rank`
        None, all iterators end there; with -2, that of rank 1.
        """
        weights: Any = self._weights(kind)
        if stop_at is not None:
            weights = self._stopping(weights, failing_rank, stop_at)
        if kind == "async":
            weights = _asynchronous(weights)
        await self.rollout.update_weights(weights, global_steps=steps)

    def _weights(self, kind: str) -> Iterable[Any]:
        engine = self.actor.engine
        if kind == "shards":
            return engine.get_per_tensor_param()[0]
        if kind == "staged":
            return iter(engine.module.state_dict().items())
        gathered = FSDPEngineWithLMHead.get_per_tensor_param(engine)[0]
        return ((f"no.such.{name}" if kind == "unknown name" else name, value) for name, value in gathered)

    def _stopping(self, weights: Iterable[Any], failing_rank: int | None, stop_at: int) -> Iterator[Any]:
        iterator = iter(weights)
        for _ in range(stop_at):
            yield next(iterator)
        if failing_rank is None or (failing_rank == -2 and self.rank == 1):
            return
        if failing_rank == self.rank:
            raise RuntimeError("the iterator of this rank failed")
        yield from iterator

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def cut_buckets(self, num_bytes: int) -> None:
        """Let later pushes cut buckets of `num_bytes`."""
        self.rollout._push._bucket_bytes = num_bytes

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_grace(self, seconds: float) -> None:
        """Let this rank wait for only a short time after another rank has failed."""
        self.rollout._ranks._poll = self.rollout._ranks._grace = seconds

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def held(self) -> list[str]:
        """Return the registrations that this rank assumes the server to have open."""
        ids: list[str] = self.rollout._engine._pusher._registrations.open_ids()
        return ids

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def record_offloads(self) -> None:
        """Record, from now on, which registrations are open whenever verl moves the parameters to the CPU."""
        engine, self.open_at_offload = self.actor.engine, []
        move = type(engine).to

        def recorded(this: Any, device: str, **options: Any) -> None:
            self.open_at_offload.append((device, self.held()))
            move(this, device, **options)

        engine.to = types.MethodType(recorded, engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offloads(self) -> list[Any]:
        return self.open_at_offload

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def memory(self, action: str, tags: list[str] | None = None) -> None:
        """Call `resume` or `release` of this rank's adapter."""
        if action == "release":
            await self.rollout.release()
        else:
            await self.rollout.resume(tags)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def gathered_by_iteration(self) -> bool:
        """Return True if the engine's weights, iterated by another consumer, are the parent's full tensors."""
        mine = list(self.actor.engine.get_per_tensor_param()[0])
        parents = dict(FSDPEngineWithLMHead.get_per_tensor_param(self.actor.engine)[0])
        return [name for name, _ in mine] == list(parents) and all(
            not isinstance(value, DTensor) and torch.equal(value, parents[name]) for name, value in mine
        )


async def _asynchronous(weights: Iterable[Any]) -> Any:
    """Yield views of one buffer that is used again, as a checkpoint engine does."""
    buffer = torch.empty(0)
    for name, value in weights:
        if buffer.numel() < value.numel():
            buffer = torch.empty(value.numel())
        view = buffer[: value.numel()].view(value.shape)
        view.copy_(value)
        yield name, view
