"""Log-probabilities pass from the sampler to the caller without losing a bit, and None stays where it was."""

from __future__ import annotations

import asyncio
import gc
import math
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
import torch

from verl_server.backends.vllm.outputs import RunningRequest
from verl_server.kernels.draw import LOWEST
from verl_server.messages.io_struct import BatchTokenIDOut, FinishReason, TokenizedGenerateReq
from verl_server.messages.packed import (
    PromptLogprobs,
    TokenLogprobs,
    pack_ids,
    pack_logprobs,
    unpack_ids,
    unpack_logprobs,
)
from verl_server.sampling.distribution import LogSoftmax
from verl_server.sampling.logprobs import RequestedCandidates, RequestedTokens, SamplingMasks, TopCandidates
from verl_server.sampling_params import SamplingParams
from verl_server.server.http.responses import write_json
from verl_server.server.request_state import ReqState


def test_packing_is_exact() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 10_000, dtype=np.uint32).view(np.float32)
    values = [*bits[np.isfinite(bits)].tolist(), 0.0, -0.0, 2.0**-149, LOWEST, math.inf, -math.inf]
    found = unpack_logprobs(pack_logprobs(values))
    assert found == values and {type(each) for each in found} == {float}
    assert math.isnan(unpack_logprobs(pack_logprobs([math.nan]))[0])
    ids = [0, 1, 151_935, 2**31 - 1]
    assert unpack_ids(pack_ids(ids)) == ids and {type(each) for each in unpack_ids(pack_ids(ids))} == {int}


def test_rows_of_arrays() -> None:
    values, ids = -np.arange(12, dtype=np.float32).reshape(3, 4), np.arange(12, dtype=np.int64).reshape(3, 4)
    whole = TokenLogprobs.rows(values, ids)
    assert [(each.logprobs, each.token_ids) for each in whole] == list(zip(values.tolist(), ids.tolist(), strict=True))
    some = TokenLogprobs.rows(values[:, 1:], ids[:, 1:], [2, 0, 9])
    assert [each.token_ids for each in some] == [[1, 2], [], [9, 10, 11]]
    assert [each.logprobs for each in some] == [[-1, -2], [], [-9, -10, -11]]
    assert TokenLogprobs.rows(values[:, :0], ids[:, :0]) == [TokenLogprobs(b"", b"")] * 3
    assert whole[1].first(2) == TokenLogprobs.of([-4, -5], [4, 5]) and whole[1].first(9) == whole[1]
    assert [len(each) for each in some] == [2, 0, 3]
    assert not any(map(gc.is_tracked, whole)), "a full collection must not visit the candidates of each position"


def test_the_sampler_reads_what_its_tensors_hold() -> None:
    rows = LogSoftmax(torch.randn(4, 50, generator=torch.Generator().manual_seed(0)))
    values, ids = rows.top(7)
    top = TopCandidates(rows, [7, 1, 3, 7], 50).read()
    assert [each.logprobs for each in top] == [v[:n] for v, n in zip(values.tolist(), [7, 1, 3, 7], strict=True)]
    assert [each.token_ids for each in top] == [v[:n] for v, n in zip(ids.tolist(), [7, 1, 3, 7], strict=True)]
    wanted = [(0, [3, 49]), (2, []), (3, [5])]
    requested = RequestedCandidates(rows, RequestedTokens(wanted, torch.device("cpu"))).read()
    assert [each.token_ids for each in requested] == [ids for _, ids in wanted]
    expected = [rows.of(torch.tensor([ids or [0]]).expand(4, -1))[row].tolist() for row, ids in wanted]
    assert requested[0].logprobs == expected[0] and requested[1].logprobs == [] and requested[2].logprobs == expected[2]


def test_a_sampling_mask_has_the_possible_tokens_or_none() -> None:
    logits = torch.full((3, 6), -torch.inf)
    logits[0, [1, 4]] = logits[1, [0, 2, 3]] = 0.0
    logits[2] = torch.arange(6.0)
    masks = SamplingMasks(LogSoftmax(logits), [2, 2, 6], 6).read()
    assert sorted(masks[0].token_ids) == [1, 4] and len(masks[1]) == 0
    assert masks[2].token_ids == [5, 4, 3, 2, 1, 0]


def finished(positions: int, top: int, prompt: list[int], **options: Any) -> ReqState:
    """Return a sample with `positions` output tokens and random candidates, which passed through a message."""
    req = TokenizedGenerateReq(
        rid="a",
        input_ids=prompt,
        sampling=SamplingParams(max_new_tokens=positions),
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=top,
        token_ids_logprob=[7],
    )
    random = np.random.default_rng(positions)

    def rows(n: int, count: int) -> list[TokenLogprobs]:
        values = -random.exponential(size=(n, count)).astype(np.float32)
        return TokenLogprobs.rows(values, random.integers(0, 2**31, (n, count)))

    tokens = list(range(positions))
    out = BatchTokenIDOut(
        rids=["a"],
        output_ids=[tokens],
        output_logprobs=[[-float(token) for token in tokens]],
        finish_reasons=[FinishReason(type="length", length=positions)],
        weight_version="1",
        cached_tokens=[0],
        num_retractions=[0],
        top_logprobs={0: rows(positions, top)},
        token_ids_logprobs={0: rows(positions, 1)},
    )
    n = len(prompt) - 1
    out.prompt_logprobs[0] = PromptLogprobs.of(
        prompt, rows(1, n)[0].logprobs, range(1, n + 1), top=[None, *rows(n, top)], requested=[None, *rows(n, 1)]
    )
    state = ReqState("a", req, None, **options)
    state.extend(msgspec.msgpack.decode(msgspec.msgpack.encode(out), type=BatchTokenIDOut), 0)
    return state


NAMES = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")


@pytest.mark.parametrize("prompt", [[5], [5, 6, 7]])
def test_the_lists_of_a_result(prompt: list[int]) -> None:
    state = finished(2, 3, prompt)
    meta = state.result()["meta_info"]
    assert meta["input_token_logprobs"][0] == (None, 5, None)
    assert meta["input_top_logprobs"][0] is None and meta["input_token_ids_logprobs"][0] is None
    assert all(len(meta[name]) == len(prompt) for name in NAMES)
    assert meta["output_token_logprobs"] == [(0.0, 0, None), (-1.0, 1, None)]
    for found, position in zip(state.output_top, meta["output_top_logprobs"], strict=True):
        assert position == [(*pair, None) for pair in zip(found.logprobs, found.token_ids, strict=True)]
        assert [[type(each) for each in triple] for triple in position] == [[float, int, type(None)]] * 3
    prompt_logprobs = state.prompt_logprobs
    assert prompt_logprobs is not None and prompt_logprobs.ranks == [None, *range(1, len(prompt))]
    assert [value for value, _, _ in meta["input_token_logprobs"]] == prompt_logprobs.logprobs
    assert prompt_logprobs.logprobs[0] is None and None not in prompt_logprobs.logprobs[1:]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("with_text", [False, True])
@pytest.mark.parametrize(("positions", "prompt"), [(3, [5]), (3, [5, 6, 7]), (900, [5, 6] * 500)])
def test_the_encoded_lists_are_those_of_the_result(
    positions: int, prompt: list[int], with_text: bool, stream: bool
) -> None:
    """Few candidates are encoded with the result, and many before it, block by block."""
    options: dict[str, Any] = {"logprob_text": with_text}
    plain, encoded = (finished(positions, 5, prompt, **options, **more) for more in ({}, {"write": write_json}))
    encoded.stream = stream
    for state in (plain, encoded):
        state._logprob_decode = (lambda ids: f"<{ids[0]}>") if with_text else None
    asyncio.run(encoded.write_candidates())
    assert bool(encoded._written) == (stream or positions > 100)
    expected, found = plain.result()["meta_info"], orjson.loads(orjson.dumps(encoded.written_result()))["meta_info"]
    for name in (*NAMES, "output_top_logprobs", "output_token_ids_logprobs"):
        assert found[name] == orjson.loads(orjson.dumps(expected[name])), name
    assert expected["output_top_logprobs"][0][0][2] == (
        None if not with_text else f"<{plain.output_top[0].token_ids[0]}>"
    )


def test_each_distinct_token_is_decoded_once() -> None:
    """The triples have the text of each token, also where a token occurs again."""
    state, decoded = finished(3, 2, [5, 6, 5, 5]), []

    def decode(ids: list[int]) -> str:
        decoded.append(ids)
        return f"<{ids[0]}>"

    state._logprob_decode = decode
    assert [text for _, _, text in state.prompt_triples()] == ["<5>", "<6>", "<5>", "<5>"]
    assert sorted(decoded) == [[5], [6]]


def test_the_garbage_collector_forgets_the_triples_of_a_result() -> None:
    """A caller keeps millions of triples, and each full collection visits every tracked object."""
    meta = finished(50, 3, [5] * 50).result()["meta_info"]
    gc.collect()
    for name in ("input_token_logprobs", "output_token_logprobs"):
        assert meta[name] and not any(map(gc.is_tracked, meta[name]))
    for name in ("input_top_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
        assert not any(gc.is_tracked(triple) for position in meta[name] for triple in position or ())


def test_vllm_outputs() -> None:
    """A row of vLLM has the sampled token or the prompt's token first, then the most likely ones."""
    values = -torch.rand(3, 3, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(9).reshape(3, 3)
    req = TokenizedGenerateReq(
        rid="a",
        input_ids=[4, 5, 6, 7],
        sampling=SamplingParams(max_new_tokens=3),
        return_logprob=True,
        logprob_start_len=1,
        top_logprobs_num=2,
    )
    output = SimpleNamespace(
        new_token_ids=[0, 3, 6],
        new_logprobs=SimpleNamespace(logprobs=values.numpy(), logprob_token_ids=ids.numpy()),
        new_prompt_logprobs_tensors=SimpleNamespace(
            logprobs=values, logprob_token_ids=ids, selected_token_ranks=torch.tensor([3, 1, 2])
        ),
        finish_reason=None,
        prefill_stats=None,
    )
    new = RunningRequest(req).new_tokens(output)
    assert new.logprobs == values[:, 0].tolist() and new.top_logprobs is not None
    assert [(each.logprobs, each.token_ids) for each in new.top_logprobs] == list(
        zip(values[:, 1:].tolist(), ids[:, 1:].tolist(), strict=True)
    )
    prompt = new.prompt_logprobs
    assert prompt is not None and prompt.top is not None
    assert prompt.token_ids == [5, 6, 7] and prompt.ranks == [None, 1, 2]
    assert prompt.logprobs == [None, *values[1:, 0].tolist()]
    assert prompt.top == [None, *new.top_logprobs[1:]]
