"""`Generation` wakes its caller when there is something to return, and returns all updates of a sample at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from verl_server.errors import ServerDiedError, ServerUnavailableError, VersionSupersededError
from verl_server.messages.io_struct import BatchTokenIDOut, FinishReason, TokenizedGenerateReq
from verl_server.messages.packed import TokenLogprobs
from verl_server.sampling_params import SamplingParams
from verl_server.server.generation import Generation, failure
from verl_server.server.request_state import ReqState


def make(count: int, stream: bool = False, **sampling: Any) -> Generation:
    params = SamplingParams(max_new_tokens=4, **sampling)
    reqs = [TokenizedGenerateReq(rid=f"{i}", input_ids=[1], sampling=params) for i in range(count)]
    return Generation([ReqState(req.rid, req, None, stream=stream) for req in reqs], False, lambda state: None)


def step(
    generation: Generation,
    i: int,
    tokens: list[int],
    reason: FinishReason | None = None,
    logprobs: Sequence[float] = (),
    **more: Any,
) -> None:
    """Append the scheduler's next tokens to sample i."""
    out = BatchTokenIDOut(
        rids=[""],
        output_ids=[tokens],
        output_logprobs=[list(logprobs)],
        finish_reasons=[reason],
        weight_version="1",
        cached_tokens=[0],
        num_retractions=[0],
        **more,
    )
    generation.states[i].extend(out, 0)


END = FinishReason(type="length", length=1)


def test_a_caller_is_woken_once_when_all_are_done() -> None:
    async def main() -> None:
        generation = make(3)
        call = asyncio.ensure_future(generation.result())
        for i in (2, 0, 1):
            step(generation, i, [i])
            await asyncio.sleep(0)
            assert not generation._wake.is_set()
            step(generation, i, [i], END)
        results = await asyncio.wait_for(call, 5)
        assert [r["output_ids"] for r in results] == [[0, 0], [1, 1], [2, 2]], (
            "the results must be in order of the samples"
        )

    asyncio.run(main())


def test_results_with_candidates_are_built_while_other_samples_run() -> None:
    async def main() -> None:
        generation = make(3)
        for state in generation.states:
            state.req.return_logprob, state.req.top_logprobs_num, state.shows_logprobs = True, 2, True
        call = asyncio.ensure_future(generation.result())
        await asyncio.sleep(0)
        candidates = TokenLogprobs.of([-0.5, -1.0], [7, 8])
        for i in (2, 0, 1):
            step(generation, i, [i], END, logprobs=[-0.5], top_logprobs={0: [candidates]})
            await asyncio.sleep(0.01)
            assert set(generation._results) == {2: {2}, 0: {2, 0}, 1: {2, 0}}[i]
        results = await asyncio.wait_for(call, 5)
        assert [r["output_ids"] for r in results] == [[0], [1], [2]]
        assert all(r["meta_info"]["output_top_logprobs"] == [[(-0.5, 7, None), (-1.0, 8, None)]] for r in results)

    asyncio.run(main())


BORDER = FinishReason.refused(VersionSupersededError("it is over"), at_border=True)


def test_the_tokens_of_a_sample_that_a_push_ended_are_a_result() -> None:
    """Also for a session, which stores them after the client has left."""

    async def main() -> None:
        generation = make(2)
        step(generation, 0, [5])
        for i in range(2):
            step(generation, i, [], BORDER)
        cut, empty = generation.states
        assert failure(cut) is None and isinstance(failure(empty), VersionSupersededError)
        results = await asyncio.wait_for(generation.result(), 5)
        assert [result["output_ids"] for result in results] == [[5], []]
        with pytest.raises(VersionSupersededError, match="it is over"):
            alone = make(1)
            step(alone, 0, [], BORDER)
            await asyncio.wait_for(alone.result(), 5)

    asyncio.run(main())


@pytest.mark.parametrize("failed", [0, 1])
def test_one_failure_ends_the_wait_for_the_others(failed: int) -> None:
    async def main() -> None:
        generation = make(2)
        call = asyncio.ensure_future(generation.result())
        await asyncio.sleep(0)
        generation.states[failed].fail(ServerDiedError("gone"))
        with pytest.raises(ServerDiedError, match="gone"):
            await asyncio.wait_for(call, 5)
        refused = make(2)
        step(refused, failed, [], FinishReason(type="abort", message="full", status_code=503))
        with pytest.raises(ServerUnavailableError, match="full"):
            await asyncio.wait_for(refused.result(), 5)

    asyncio.run(main())


def test_a_stream_is_told_all_the_news_at_once_and_each_end_once() -> None:
    async def main() -> None:
        generation = make(2, stream=True)
        seen: list[tuple[int, int, bool]] = []
        for token in range(3):
            step(generation, 1, [token])
        step(generation, 0, [5])
        async for i, state in generation.updates():
            seen.append((i, len(state.output_ids), state.done))
            if len(seen) == 1:  # before the turn of sample 0, which has new tokens, too
                step(generation, 0, [6], END)
            elif len(seen) == 2:
                step(generation, 1, [7])
                step(generation, 1, [8], END)
        assert seen == [(1, 3, False), (0, 2, True), (1, 5, True)]

    asyncio.run(asyncio.wait_for(main(), 5))


def test_frames_come_every_stream_interval_tokens() -> None:
    async def main() -> None:
        generation = make(1, stream=True, stream_interval=3)
        updates = generation.updates()
        for token in range(2):
            step(generation, 0, [token])
        assert not generation._wake.is_set()
        step(generation, 0, [2])
        _, state = await asyncio.wait_for(anext(updates), 5)
        assert state.result()["output_ids"] == [0, 1, 2]

    asyncio.run(main())


def test_frames_of_a_stream_keep_their_distance() -> None:
    """Between the first frame and the last one, tokens wait for the next frame. Neither of these two is delayed."""

    async def main() -> None:
        gap = 3600.0
        params = SamplingParams(max_new_tokens=4)
        state = ReqState("0", TokenizedGenerateReq(rid="0", input_ids=[1], sampling=params), None, stream=True)
        generation = Generation([state], True, lambda state: None, lambda: gap)
        updates = generation.updates()
        step(generation, 0, [5])
        assert (await asyncio.wait_for(anext(updates), 5))[0] == 0
        waits = asyncio.ensure_future(anext(updates))
        await asyncio.sleep(0)
        for token in (6, 7):
            step(generation, 0, [token])
            await asyncio.sleep(0)
            assert not generation._wake.is_set() and generation._timer is not None
        step(generation, 0, [8], END)
        _, last = await asyncio.wait_for(waits, 5)
        assert last.output_ids == [5, 6, 7, 8] and generation._timer is None
        assert [update async for update in updates] == []

    asyncio.run(main())


def test_a_delayed_frame_arrives() -> None:
    async def main() -> None:
        params = SamplingParams(max_new_tokens=4)
        state = ReqState("0", TokenizedGenerateReq(rid="0", input_ids=[1], sampling=params), None, stream=True)
        generation = Generation([state], True, lambda state: None, lambda: 0.01)
        updates = generation.updates()
        for token in (5, 6):
            step(generation, 0, [token])
            await asyncio.wait_for(anext(updates), 5)
        assert state.output_ids == [5, 6]

    asyncio.run(main())
