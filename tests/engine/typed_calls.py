"""Types that a type checker, and so an editor, infers for the engines' methods. `make lint` checks this file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Literal, assert_type

from torch import nn

from verl_server.engine.base import EngineBase
from verl_server.engine.verl_engine import VerlEngine
from verl_server.messages.results import (
    FinishReason,
    GenerateResult,
    InternalState,
    SchedulerInfo,
    ServerInfo,
    VersionSpan,
)


def generation(engine: EngineBase, ranks: VerlEngine) -> None:
    one = engine.generate("1 + 1 =", {"temperature": 0}, return_logprob=True, top_logprobs_num=2)
    assert_type(one, GenerateResult)
    assert_type(one["meta_info"]["finish_reason"], FinishReason | None)
    assert_type(one["meta_info"]["weight_versions"], list[VersionSpan])
    assert_type(engine.generate(input_ids=[1, 2]), GenerateResult)
    assert_type(engine.generate(["a", "b"]), list[GenerateResult])
    assert_type(engine.generate(input_ids=[[1], [2]], sampling_params=[{}, {}]), list[GenerateResult])
    assert_type(engine.generate("a", stream=True), Iterator[GenerateResult])
    assert_type(ranks.generate(input_ids=[1]), GenerateResult)
    assert_type(ranks.generate(input_ids=[[1]]), list[GenerateResult])
    engine.generate("a", return_logprobs=True)  # type: ignore[call-overload]
    engine.generate("a", top_logprobs_num="2")  # type: ignore[call-overload]
    ranks.generate("a", stream=True)  # type: ignore[call-overload]


async def awaited(engine: EngineBase) -> None:
    assert_type(await engine.async_generate("a", rid="r"), GenerateResult)
    assert_type(await engine.async_generate(input_ids=[[1]]), list[GenerateResult])
    assert_type(await engine.async_generate("a", stream=True), AsyncIterator[GenerateResult])
    await engine.async_generate("a", return_logprobs=True)  # type: ignore[call-overload]


def weights(engine: EngineBase, ranks: VerlEngine, model: nn.Module) -> None:
    for each in (engine, ranks):
        assert_type(each.update_weights_from_tensor(model.named_parameters(), mode="in_place"), tuple[bool, str])
        each.push_weights(version=1, partial=False, checksums=None)
        each.update_weights_from_disk("folder", weight_version="1", mode="abort")
        each.push_weights(vesion=1)  # type: ignore[call-arg]
        each.push_weights(mode="sometimes")  # type: ignore[arg-type]
        each.update_weights_from_disk("folder", partial=False)  # type: ignore[call-arg]
        assert_type(each.begin_weight_update(full=True), str)


def information(engine: EngineBase, ranks: VerlEngine) -> None:
    assert_type(engine.get_server_info(), ServerInfo)
    assert_type(ranks.get_server_info()["scheduler_info"], SchedulerInfo)
    assert_type(engine.scheduler_info["context_length"], int)
    assert_type(engine.get_internal_state(), InternalState)
    states: list[Literal["serving", "torn", "not_loaded", "asleep"]] = [engine.get_internal_state()["weights_state"]]
    assert states
