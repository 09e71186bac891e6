"""An engine sends a demand on the weight version, and raises the same errors over HTTP and in this process."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.engine.restartable_server import Server
from verl_server import (
    BadRequestError,
    EngineBase,
    VersionBehindError,
    VersionSupersededError,
    WeightVersion,
    WeightVersionError,
)
from verl_server.messages.io_struct import FinishReason, TokenizedGenerateReq

ONE: dict[str, Any] = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
SERVED = WeightVersion(2, "5f2c9a1e")


@pytest.fixture
def serving(server: Server) -> Server:
    serve(server, "1@5f2c9a1e", "13", str(SERVED))
    return server


def serve(server: Server, *labels: str) -> None:
    async def note() -> None:
        for label in labels:
            server.stack.manager.controls.versions.note(label)

    server.stack.manager.run_sync(note(), 20)
    server.stack.scheduler.version = labels[-1]


async def streamed(engine: EngineBase, **demand: Any) -> list[Any]:
    return [frame async for frame in await engine.async_generate(**ONE, stream=True, **demand)]


def ways(engine: EngineBase, **demand: Any) -> list[Any]:
    """Return the calls that generate with this demand."""
    return [
        lambda: engine.generate(**ONE, **demand),
        lambda: list(engine.generate(**ONE, stream=True, **demand)),
        lambda: asyncio.run(engine.async_generate(**ONE, **demand)),
        lambda: asyncio.run(streamed(engine, **demand)),
    ]


def test_each_way_to_generate_sends_the_demand(engine: EngineBase, serving: Server) -> None:
    demands: list[tuple[dict[str, Any], str]] = [
        ({"min_weight_version": WeightVersion(1, "5f2c9a1e")}, ">=1@5f2c9a1e"),
        ({"exact_weight_version": SERVED}, str(SERVED)),
        ({"exact_weight_version": str(SERVED), "min_weight_version": None}, str(SERVED)),
    ]
    for demand, _ in demands:
        for call in ways(engine, **demand):
            assert call()
    serve(serving, "13")
    engine.generate(**ONE, exact_weight_version=13)
    sent = [m.weight_demand for m in serving.stack.scheduler.wait_for(TokenizedGenerateReq, 13)]
    assert sent == [text for _, text in demands for _ in range(4)] + ["13"]


ERRORS: list[tuple[dict[str, Any], type[WeightVersionError]]] = [
    ({"min_weight_version": SERVED.next()}, VersionBehindError),
    ({"exact_weight_version": "never served"}, VersionBehindError),
    ({"exact_weight_version": WeightVersion(1, "5f2c9a1e")}, VersionSupersededError),
    ({"exact_weight_version": 13}, VersionSupersededError),
]


@pytest.mark.parametrize(("demand", "kind"), ERRORS)
def test_an_unsatisfied_demand_is_one_error(
    engine: EngineBase, serving: Server, demand: dict[str, Any], kind: type[WeightVersionError]
) -> None:
    for call in ways(engine, **demand):
        with pytest.raises(kind, match=f"serves '{SERVED}'") as raised:
            call()
        assert (type(raised.value), raised.value.status_code) == (kind, 409)


def test_a_wrong_demand_is_refused(engine: EngineBase, serving: Server) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"min_weight_version": 13}, "'13' is a free label"),
        ({"min_weight_version": SERVED, "exact_weight_version": SERVED}, "cannot both be set"),
        ({"exact_weight_version": b"13"}, "is a text, an integer or a WeightVersion"),
        ({"exact_weight_version": ""}, "1 to 256 characters"),
    ]
    for demand, message in wrong:
        for call in ways(engine, **demand):
            with pytest.raises(BadRequestError, match=message):
                call()


@pytest.mark.parametrize("way", range(4))
def test_the_end_at_a_border_without_a_token_is_the_same_error(engine: EngineBase, serving: Server, way: int) -> None:
    scheduler = serving.stack.scheduler
    scheduler.hold = True
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(ways(engine, exact_weight_version=SERVED)[way])
        (req,) = scheduler.wait_for(TokenizedGenerateReq)
        running = scheduler.running.pop(req.rid)
        scheduler.emit(running, [], FinishReason.refused(VersionSupersededError("it is over"), at_border=True))
        with pytest.raises(VersionSupersededError, match="it is over"):
            call.result(20)
