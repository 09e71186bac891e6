"""Request states, stop strings, control calls and the death of the scheduler, against a fake scheduler."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.conftest import MakeStack, Stack
from verl_server.errors import (
    BadRequestError,
    ControlTimeoutError,
    ServerDiedError,
    ServerUnavailableError,
    VerlServerError,
)
from verl_server.messages import io_struct as io
from verl_server.messages.weight_requests import UpdateWeightsFromTensorReq, UpdateWeightVersionReq
from verl_server.server.generate_request import GenerateReqInput
from verl_server.server.submission import bad_words_ids


async def _result(stack: Stack, **body: Any) -> Any:
    generation = await stack.manager.submit(GenerateReqInput.parse(body))
    try:
        return await generation.result()
    finally:
        generation.close()


def start(stack: Stack, **body: Any) -> Any:
    """Start a generation in the background and return its future."""
    return asyncio.run_coroutine_threadsafe(_result(stack, **body), stack.manager.loop)


def run(stack: Stack, **body: Any) -> Any:
    return stack.manager.run_sync(_result(stack, **body), timeout=20)


# -- results ------------------------------------------------------------------------------------------------


def test_result_has_the_documented_fields(stack: Stack) -> None:
    out = run(stack, input_ids=[10, 20], sampling_params={"max_new_tokens": 3}, rid="mine")
    assert out["output_ids"] == [21, 22, 23]
    meta = out["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 3, 0)
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 3}]
    assert meta["num_retractions"] == 0 and meta["e2e_latency"] > 0
    assert "output_token_logprobs" not in meta


def test_logprob_layout(stack: Stack) -> None:
    out = run(
        stack,
        input_ids=[10, 20, 30],
        sampling_params={"max_new_tokens": 2},
        return_logprob=True,
        logprob_start_len=1,
        top_logprobs_num=2,
        token_ids_logprob=[7, 5],
    )
    meta = out["meta_info"]
    assert meta["output_token_logprobs"] == [(-0.31, 31, None), (-0.32, 32, None)]
    assert meta["output_token_logprobs_length"] == 2
    assert meta["input_token_logprobs"] == [(None, 20, None), (-3.75, 30, None)]
    assert meta["output_top_logprobs"] == [[(-1.0, 0, None), (-2.0, 1, None)]] * 2
    assert meta["output_token_ids_logprobs"] == [[(-2.0, 7, None), (-2.0, 5, None)]] * 2


def test_logprob_text_on_request(stack: Stack) -> None:
    ids = stack.text.encode("ab")
    out = run(
        stack,
        input_ids=[ids[0]],
        sampling_params={"max_new_tokens": 1},
        return_logprob=True,
        return_text_in_logprobs=True,
    )
    assert out["meta_info"]["output_token_logprobs"][0][2] == "b"


def test_version_spans_follow_an_update_in_flight(stack: Stack) -> None:
    stack.scheduler.hold = True
    future = start(stack, input_ids=[1], sampling_params={"max_new_tokens": 4, "ignore_eos": True})
    (req,) = stack.scheduler.wait_for(io.TokenizedGenerateReq)
    running = stack.scheduler.running[req.rid]
    stack.scheduler.control = lambda message: _emit(stack, running, message)
    for name in ("v1", "v1", "v2"):
        stack.manager.run_sync(stack.manager.control(UpdateWeightVersionReq(new_version=name)), timeout=5)
    stack.scheduler.release()
    meta = future.result(timeout=10)["meta_info"]
    assert meta["weight_versions"] == [
        {"version": "v1", "start": 0, "end": 2},
        {"version": "v2", "start": 2, "end": 4},
    ]
    assert meta["weight_version"] == "v2"


def _emit(stack: Stack, running: Any, message: UpdateWeightVersionReq) -> io.ControlReply:
    stack.scheduler.version = message.new_version
    stack.scheduler.emit(running, [9], None)
    return io.ControlReply(id=message.id, success=True)


def test_sampling_masks_in_both_modes(stack: Stack) -> None:
    body: dict[str, Any] = {"input_ids": [10], "sampling_params": {"max_new_tokens": 2, "top_k": 5}}
    selected = run(stack, **body, return_sampling_mask=True)["meta_info"]
    support = run(stack, **body, return_sampling_mask=[True], sampling_logprobs_mode="support")["meta_info"]
    names = ["output_token_sampling_mask", "output_token_sampling_logprobs", "output_token_sampling_mask_length"]
    assert [selected[name] for name in names] == [[[11, 12], [12, 13]], [-0.5, -0.5], 2]
    assert [support[name] for name in names] == [[[11, 12], [12, 13]], [[-0.5, -1.0]] * 2, 2]
    assert "output_token_logprobs" not in selected and names[0] not in run(stack, **body)["meta_info"]
    over_http = stack.generate(**body, return_sampling_mask=True, sampling_logprobs_mode="support")["meta_info"]
    assert [over_http[name] for name in names] == [support[name] for name in names]
    assert stack.scheduler.wait_for(io.TokenizedGenerateReq)[0].sampling_mask_num == 10


@pytest.mark.parametrize("mode", ["default", "raw", "sampling"])
def test_the_mode_of_logprobs_is_named_where_there_are_logprobs(stack: Stack, mode: str) -> None:
    sampling = {"max_new_tokens": 1, "logprobs_mode": mode}
    out = run(stack, input_ids=[10], sampling_params=sampling, return_logprob=True)
    assert out["meta_info"]["logprobs_mode"] == mode
    assert "logprobs_mode" not in run(stack, input_ids=[10], sampling_params=sampling)["meta_info"]


def test_the_scheduler_gets_priority_namespace_and_words_as_tokens(stack: Stack) -> None:
    sampling = {"max_new_tokens": 1, "bad_words": ["ab", " ab", "c"], "allowed_token_ids": [5, 6]}
    run(stack, input_ids=[[1], [2]], sampling_params=sampling, priority=7, extra_key=["x", None], cache_salt="y")
    first, second = stack.scheduler.wait_for(io.TokenizedGenerateReq, 2)
    encode = stack.text.encode
    # The tokenizer has a token for each byte, so a leading space is a token more and the word's last token the same.
    assert first.bad_words_ids == second.bad_words_ids == [encode("ab", False), encode("c", False)]
    assert first.sampling.allowed_token_ids == [5, 6] and first.priority == second.priority == 7
    assert "" != first.namespace != second.namespace != ""
    run(stack, input_ids=[1], sampling_params={"max_new_tokens": 1})
    plain = stack.scheduler.wait_for(io.TokenizedGenerateReq, 3)[-1]
    assert (plain.priority, plain.namespace, plain.bad_words_ids) == (0, "", [])


def test_a_word_counts_with_and_without_a_leading_space() -> None:
    ids = {"cat": [1], " cat": [2], "new york": [3, 4], " new york": [5, 4], "ab": [6], " ab": [7, 6]}
    words = ["cat", " new york", "ab"]
    assert bad_words_ids(words, ids.__getitem__) == [[1], [2], [3, 4], [5, 4], [6]]
    with pytest.raises(BadRequestError, match="without tokens"):
        bad_words_ids(["x"], lambda text: [])


# -- stops --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 3, None])
def test_stop_string_does_not_depend_on_message_boundaries(stack: Stack, chunk: int | None) -> None:
    ids = stack.text.encode("one END two")
    stack.scheduler.script = lambda req: ids
    stack.scheduler.chunk = chunk
    body = {"input_ids": [1], "sampling_params": {"stop": ["END"], "max_new_tokens": 50}, "return_logprob": True}
    out = run(stack, **body)
    assert out["text"] == "one "
    assert out["output_ids"] == stack.text.encode("one END")
    assert len(out["meta_info"]["output_token_logprobs"]) == len(out["output_ids"])
    assert out["meta_info"]["finish_reason"] == {"type": "stop", "matched": "END"}
    assert out["meta_info"]["weight_versions"][-1]["end"] == len(out["output_ids"])


def test_stop_string_frees_the_request_in_the_scheduler(stack: Stack) -> None:
    ids = stack.text.encode("xEND")
    stack.scheduler.hold = True
    future = start(stack, input_ids=[1], sampling_params={"stop": "END", "max_new_tokens": 50})
    (req,) = stack.scheduler.wait_for(io.TokenizedGenerateReq)
    running = stack.scheduler.running[req.rid]

    def emit(message: Any) -> io.ControlReply:
        stack.scheduler.emit(running, ids, None)
        stack.scheduler.emit(running, [5, 6, 7], None)  # a step that was launched before the stop was found
        return io.ControlReply(id=message.id, success=True)

    stack.scheduler.control = emit
    stack.manager.run_sync(stack.manager.control(io.ContinueGenerationReq()), timeout=5)
    assert future.result(timeout=5)["output_ids"] == ids
    assert [m.rid for m in stack.scheduler.wait_for(io.FinishReq)] == [req.rid]


def test_late_tokens_do_not_reach_a_new_request_of_the_same_rid(stack: Stack) -> None:
    ids = stack.text.encode("END")
    stack.scheduler.hold = True
    first = start(stack, input_ids=[1], rid="same", sampling_params={"stop": "END", "max_new_tokens": 9})
    (req,) = stack.scheduler.wait_for(io.TokenizedGenerateReq)
    old = stack.scheduler.running[req.rid]

    def emit(message: Any) -> io.ControlReply:
        stack.scheduler.emit(old, ids if old.sent == 0 else [99, 99], None)
        return io.ControlReply(id=message.id, success=True)

    stack.scheduler.control = emit
    stack.manager.run_sync(stack.manager.control(io.ContinueGenerationReq()), timeout=5)
    first.result(timeout=5)
    second = start(stack, input_ids=[50], rid="same", sampling_params={"max_new_tokens": 2})
    stack.scheduler.wait_for(io.TokenizedGenerateReq, 2)
    stack.manager.run_sync(stack.manager.control(io.ContinueGenerationReq()), timeout=5)
    stack.scheduler.release()
    assert second.result(timeout=5)["output_ids"] == [51, 52]


def test_matched_stop_token_is_an_output_id_but_not_text(stack: Stack) -> None:
    a, b, c = stack.text.encode("abc")
    stack.scheduler.script = lambda req: [a, b, c]
    params = {"stop_token_ids": [b], "max_new_tokens": 9}
    out = run(stack, input_ids=[1], sampling_params=params)
    assert (out["text"], out["output_ids"]) == ("a", [a, b])
    assert out["meta_info"]["finish_reason"] == {"type": "stop", "matched": b}
    out = run(stack, input_ids=[1], sampling_params=params | {"no_stop_trim": True})
    assert out["text"] == "ab"


def test_stop_ids_are_the_models_and_the_callers(stack: Stack) -> None:
    run(stack, input_ids=[9], sampling_params={"stop_token_ids": [77], "max_new_tokens": 1})
    run(stack, input_ids=[9], sampling_params={"stop_token_ids": [77], "max_new_tokens": 1, "ignore_eos": True})
    first, second = stack.scheduler.wait_for(io.TokenizedGenerateReq, 2)
    assert (first.stop_ids, second.stop_ids) == ([2, 77], [])


@pytest.mark.parametrize("unknown", [-1, 320, 10**9, 2**70])
def test_stop_ids_outside_the_vocabulary_have_no_effect(stack: Stack, unknown: int) -> None:
    run(stack, input_ids=[9], sampling_params={"stop_token_ids": [unknown, 319], "max_new_tokens": 1})
    run(stack, input_ids=[9], sampling_params={"stop_token_ids": [unknown], "max_new_tokens": 1, "min_new_tokens": 1})
    first, second = stack.scheduler.wait_for(io.TokenizedGenerateReq, 2)
    assert (first.stop_ids, first.sampling.stop_token_ids) == ([2, 319], [319])
    assert (second.stop_ids, second.sampling.stop_token_ids) == ([2], [])


def test_unbounded_request_runs_to_the_end_of_the_context(stack: Stack) -> None:
    start(stack, input_ids=[9] * 6, sampling_params={"max_new_tokens": None}).result(timeout=10)
    (req,) = stack.scheduler.wait_for(io.TokenizedGenerateReq)
    assert req.sampling.max_new_tokens == 250


# -- accepting and refusing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"input_ids": [5] * 256}, "prompt is too long: 256 tokens > 255 maximum. This"),
        (
            {"input_ids": [5] * 200, "sampling_params": {"max_new_tokens": 100}},
            "you requested 300 tokens: 200 in the prompt and 100 for",
        ),
        ({"input_ids": [320]}, "token id 320, outside the vocabulary of 320 tokens"),
        ({"input_ids": [-1]}, "token id -1"),
        ({"input_ids": [2**70]}, "outside the vocabulary"),
        ({"input_ids": [5], "sampling_params": {"allowed_token_ids": [999]}}, "allowed_token_ids holds token id 999"),
        ({"input_ids": [5], "sampling_params": {"logit_bias": {"999": 1.0}}}, "logit_bias holds token id 999"),
        ({"input_ids": [5], "token_ids_logprob": [-3]}, "token_ids_logprob holds token id -3"),
        ({"input_ids": [5], "logprob_start_len": -2}, "logprob_start_len must be -1 or in 0..1"),
        ({"input_ids": [5], "logprob_start_len": 2}, "logprob_start_len"),
        ({"input_ids": [5], "top_logprobs_num": -1}, "top_logprobs_num"),
        ({"text": ""}, "input_ids cannot be empty"),
        ({"text": "\ud800"}, "cannot be tokenized"),
        ({"input_ids": [5], "sampling_params": {"stream_interval": 2**70}}, "stream_interval"),
        ({"input_ids": [[5]] * 100, "sampling_params": {"n": 4096}}, "409600 samples"),
    ],
)
def test_refused_before_anything_is_sent(stack: Stack, body: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        run(stack, **body)
    assert says in str(caught.value)
    assert stack.manager.num_requests == 0
    run(stack, input_ids=[5], sampling_params={"max_new_tokens": 1})
    assert len(stack.scheduler.wait_for(io.TokenizedGenerateReq)) == 1


def test_duplicate_rid_is_refused_while_the_first_runs(stack: Stack) -> None:
    stack.scheduler.hold = True
    first = start(stack, input_ids=[5], rid="r", sampling_params={"max_new_tokens": 1})
    stack.scheduler.wait_for(io.TokenizedGenerateReq)
    with pytest.raises(BadRequestError, match="Duplicate request ID detected: r"):
        run(stack, input_ids=[5], rid="r")
    stack.scheduler.release()
    assert first.result(timeout=5)["output_ids"] == [6]
    assert run(stack, input_ids=[5], rid="r", sampling_params={"max_new_tokens": 1})["output_ids"] == [6]


def test_text_is_refused_without_a_tokenizer(make_stack: MakeStack) -> None:
    stack = make_stack(skip_tokenizer_init=True)
    with pytest.raises(BadRequestError, match="skip_tokenizer_init"):
        run(stack, text="hello")
    with pytest.raises(BadRequestError, match="use stop_token_ids"):
        run(stack, input_ids=[5], sampling_params={"stop": "x"})
    out = run(stack, input_ids=[5], sampling_params={"max_new_tokens": 1})
    assert out["output_ids"] == [6] and "text" not in out


def test_abort_returns_partial_output(stack: Stack) -> None:
    stack.scheduler.hold = True
    future = start(stack, input_ids=[5], rid="r", sampling_params={"max_new_tokens": 9})
    stack.scheduler.wait_for(io.TokenizedGenerateReq)
    stack.manager.loop.call_soon_threadsafe(stack.manager.abort_request, "r")
    reason = future.result(timeout=5)["meta_info"]["finish_reason"]
    assert reason == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


@pytest.mark.parametrize(("status", "kind"), [(400, BadRequestError), (503, ServerUnavailableError)])
def test_refusal_by_the_scheduler_is_raised(stack: Stack, status: int, kind: type[VerlServerError]) -> None:
    stack.scheduler.hold = True
    future = start(stack, input_ids=[5])
    (req,) = stack.scheduler.wait_for(io.TokenizedGenerateReq)
    running = stack.scheduler.running.pop(req.rid)

    def refuse(message: Any) -> io.ControlReply:
        reason = io.FinishReason(type="abort", message="The request queue is full.", status_code=status)
        stack.scheduler.emit(running, [], reason)
        return io.ControlReply(id=message.id, success=True)

    stack.scheduler.control = refuse
    stack.manager.run_sync(stack.manager.control(io.ContinueGenerationReq()), timeout=5)
    with pytest.raises(kind, match="queue is full"):
        future.result(timeout=5)


def test_cancelled_caller_leaves_nothing_behind(stack: Stack) -> None:
    stack.scheduler.hold = True
    future = start(stack, input_ids=[[5], [6]])
    sent = stack.scheduler.wait_for(io.TokenizedGenerateReq, 2)
    future.cancel()
    aborted = stack.scheduler.wait_for(io.AbortReq, 2)
    assert sorted(m.rid for m in aborted) == sorted(m.rid for m in sent)
    assert stack.manager.num_requests == 0


# -- streams ------------------------------------------------------------------------------------------------


async def _frames(stack: Stack, **body: Any) -> list[dict[str, Any]]:
    obj = GenerateReqInput.parse(body | {"stream": True})
    return [frame async for frame in stack.manager.generate_request(obj)]  # type: ignore[misc]


def test_frames_are_cumulative_and_end_like_the_plain_result(stack: Stack) -> None:
    ids = stack.text.encode("aé🙂 END tail")
    stack.scheduler.script = lambda req: ids
    stack.scheduler.chunk = 1
    body: dict[str, Any] = {"input_ids": [1], "sampling_params": {"stop": ["END"], "max_new_tokens": 50}}
    frames = stack.manager.run_sync(_frames(stack, **body), timeout=20)
    for before, after in itertools.pairwise(frames):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert all(f["meta_info"]["finish_reason"] is None for f in frames[:-1])
    last, plain = frames[-1], run(stack, **body)
    assert (last["text"], last["output_ids"]) == (plain["text"], plain["output_ids"]) == ("aé🙂 ", ids[:-5])


def test_incremental_frames_hold_what_is_new(make_stack: MakeStack) -> None:
    stack = make_stack(incremental_streaming_output=True)
    stack.scheduler.chunk = 1
    body = {"input_ids": [[40], [50]], "sampling_params": {"max_new_tokens": 20}, "return_logprob": True}
    frames = stack.manager.run_sync(_frames(stack, **body), timeout=20)
    for i, plain in enumerate(run(stack, **body)):
        own = [f for f in frames if f["index"] == i]
        assert "".join(f["text"] for f in own) == plain["text"]
        assert [token for f in own for token in f["output_ids"]] == plain["output_ids"]
        logprobs = [each for f in own for each in f["meta_info"]["output_token_logprobs"]]
        assert logprobs == plain["meta_info"]["output_token_logprobs"]


def test_batch_frames_carry_their_index(stack: Stack) -> None:
    frames = stack.manager.run_sync(
        _frames(stack, input_ids=[[11], [21]], sampling_params={"max_new_tokens": 2}), timeout=20
    )
    last = {f["index"]: f["output_ids"] for f in frames}
    assert last == {0: [12, 13], 1: [22, 23]}


def test_closing_a_stream_aborts_its_request(stack: Stack) -> None:
    stack.scheduler.hold = True

    async def leave() -> None:
        obj = GenerateReqInput.parse({"input_ids": [1], "stream": True})
        frames = stack.manager.generate_request(obj)
        step = asyncio.ensure_future(anext(frames))
        while stack.manager.num_requests == 0:
            await asyncio.sleep(0)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        await frames.aclose()

    stack.manager.run_sync(leave(), timeout=5)
    stack.scheduler.wait_for(io.AbortReq)
    assert stack.manager.num_requests == 0


# -- control ------------------------------------------------------------------------------------------------


def test_a_message_that_no_socket_holds_reaches_the_scheduler(stack: Stack) -> None:
    payload = "A" * (8 << 20)
    req = UpdateWeightsFromTensorReq(serialized_named_tensors=[payload])
    assert stack.manager.run_sync(stack.manager.control(req), timeout=10).success
    (received,) = stack.scheduler.wait_for(UpdateWeightsFromTensorReq)
    assert received.serialized_named_tensors == [payload]
    assert run(stack, input_ids=[10], sampling_params={"max_new_tokens": 2})["output_ids"] == [11, 12]


def test_replies_are_matched_by_id_not_by_order(stack: Stack) -> None:
    kept: list[Any] = []

    def swap(message: Any) -> io.ControlReply | None:
        kept.append(message)
        if len(kept) < 2:
            return None
        reply = io.ControlReply(id=kept[1].id, success=True, message="second")
        stack.scheduler.send(reply)
        return io.ControlReply(id=kept[0].id, success=True, message="first")

    stack.scheduler.control = swap
    with ThreadPoolExecutor(2) as pool:
        manager = stack.manager
        first = pool.submit(lambda: manager.run_sync(manager.control(io.FlushCacheReq()), timeout=10))
        stack.scheduler.wait_for(io.FlushCacheReq)
        second = pool.submit(lambda: manager.run_sync(manager.control(io.FlushCacheReq()), timeout=10))
        assert (first.result(10).message, second.result(10).message) == ("first", "second")


def test_unanswered_control_call_ends_with_its_name(stack: Stack) -> None:
    stack.scheduler.control = lambda message: None
    with pytest.raises(ControlTimeoutError, match=r"FlushCache within 0 s"):
        stack.manager.run_sync(stack.manager.control(io.FlushCacheReq(), timeout=0.05), timeout=10)
    stack.scheduler.control = None
    assert stack.manager.run_sync(stack.manager.control(io.FlushCacheReq()), timeout=10).success


@pytest.mark.parametrize(
    ("req", "says"),
    [
        (UpdateWeightsFromTensorReq(named_tensors=[], mode="nonsense"), "nonsense"),  # type: ignore[arg-type]
        (UpdateWeightsFromTensorReq(named_tensors=[], weight_version=7), "weight_version"),  # type: ignore[arg-type]
        (UpdateWeightVersionReq(new_version="9" * 5000), "length <= 256"),
        (io.FlushCacheReq(timeout="soon"), "timeout"),  # type: ignore[arg-type]
    ],
)
def test_control_call_that_the_scheduler_could_not_read_is_refused_at_once(stack: Stack, req: Any, says: str) -> None:
    with pytest.raises(BadRequestError, match=says):
        stack.manager.run_sync(stack.manager.control(req), timeout=10)
    assert not stack.manager.controls.in_flight and not stack.scheduler.received


def test_sync_call_from_the_own_loop_raises_instead_of_deadlocking(stack: Stack) -> None:
    async def nested() -> None:
        stack.manager.run_sync(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="own event loop"):
        stack.manager.run_sync(nested(), timeout=5)


def test_async_calls_work_from_another_loop(stack: Stack) -> None:
    async def elsewhere() -> Any:
        work = _result(stack, input_ids=[5], sampling_params={"max_new_tokens": 1})
        return await stack.manager.run_async(work)

    assert asyncio.run(elsewhere())["output_ids"] == [6]


# -- the end of the scheduler and of the server ----------------------------------------------------------------


def test_death_of_the_scheduler_fails_everything_at_once(stack: Stack) -> None:
    stack.scheduler.hold = True
    stack.scheduler.control = lambda message: None
    manager = stack.manager
    waiting = [start(stack, input_ids=[5]) for _ in range(3)]
    waiting.append(asyncio.run_coroutine_threadsafe(manager.control(io.FlushCacheReq()), manager.loop))
    stack.scheduler.wait_for(io.TokenizedGenerateReq, 3)
    stack.scheduler.wait_for(io.FlushCacheReq)
    began = time.monotonic()
    stack.child.code = -9
    for future in waiting:
        with pytest.raises(ServerDiedError, match=r"(?s)scheduler-tp0 ended with signal SIGKILL.*Boom: the reason"):
            future.result(timeout=5)
    assert time.monotonic() - began < 3
    with pytest.raises(ServerDiedError, match="SIGKILL"):
        run(stack, input_ids=[5])
    with pytest.raises(ServerDiedError, match="SIGKILL"):
        manager.run_sync(manager.control(io.FlushCacheReq()), timeout=5)
    assert isinstance(stack.deaths[0], ServerDiedError)


def test_shutdown_ends_requests_with_their_partial_output(stack: Stack) -> None:
    stack.scheduler.hold = True
    future = start(stack, input_ids=[5])
    stack.scheduler.wait_for(io.TokenizedGenerateReq)
    stack.manager.shutdown()
    assert future.result(timeout=5)["meta_info"]["finish_reason"]["type"] == "abort"
    with pytest.raises(ServerUnavailableError, match="shut down"):
        run(stack, input_ids=[5])
    assert not any(t.name == "tokenizer-manager" and t.is_alive() for t in threading.enumerate())
