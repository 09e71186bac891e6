"""`ReqState`: the frames of an incremental stream add up to the result of the whole output."""

from __future__ import annotations

from typing import Any

import pytest

from verl_server.messages import columns
from verl_server.messages.io_struct import BatchTokenIDOut, FinishReason, TokenizedGenerateReq
from verl_server.messages.packed import PromptLogprobs, TokenLogprobs
from verl_server.models.tiny import byte_tokenizer
from verl_server.sampling_params import SamplingParams
from verl_server.server.request_state import ReqState
from verl_server.server.text.stop_regex import StopRegexes

TOKENIZER = byte_tokenizer()


def decode(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True))


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def make(with_text: bool = True, columnar: bool = False, regex: str | None = None, **sampling: Any) -> ReqState:
    req = TokenizedGenerateReq(
        rid="0",
        input_ids=[5, 6, 7],
        sampling=SamplingParams(**sampling),
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        token_ids_logprob=[3],
        sampling_mask_num=0 if columnar else 4,
    )
    regexes = None if regex is None else StopRegexes([regex])
    return ReqState(
        "name",
        req,
        decode if with_text else None,
        stream=True,
        return_prompt_token_ids=True,
        columnar=columnar,
        stop_regexes=regexes,
        support_logprobs=not with_text,
    )


def feed(state: ReqState, position: int, token: int, last: bool) -> None:
    """Give the state one token of the output, and the prompt's log-probabilities with the first token."""
    candidates = TokenLogprobs.of([-0.5, -1.0 * position], [token, position])
    prompt = [None, candidates, candidates]
    out = BatchTokenIDOut(
        rids=["0"],
        output_ids=[[token]],
        output_logprobs=[[-0.25 * position]],
        finish_reasons=[FinishReason(type="length", length=position + 1) if last else None],
        weight_version="1",
        cached_tokens=[0],
        num_retractions=[0],
        top_logprobs={0: [candidates]},
        token_ids_logprobs={0: [TokenLogprobs.of([-2.0], [3])]},
        policy_logprobs={0: [-0.5 * position]} if state.req.sampling.edits else {},
        has_choice={0: [position % 2 == 0]} if state.req.sampling.bad_words else {},
        sampling_masks={0: [candidates]} if state.req.sampling_mask_num else {},
    )
    if position == 0:
        out.prompt_logprobs[0] = PromptLogprobs.of([5, 6, 7], [-1.0, -2.0], ranks=[1, 1], top=prompt, requested=prompt)
    state.extend(out, 0)


def frames_of(state: ReqState, ids: list[int], every: int) -> list[dict[str, Any]]:
    frames = []
    for position, token in enumerate(ids):
        feed(state, position, token, position == len(ids) - 1)
        if state.done or position % every == 0:
            frames.append(state.increment())
        if state.done:
            break
    return frames


def result_of(state: ReqState, ids: list[int]) -> dict[str, Any]:
    frames_of(state, ids, len(ids))
    return state.result()


@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize(
    "options", [{}, {"with_text": False}, {"columnar": True}, {"stop": ["END"], "bad_words": ["a"]}]
)
def test_increments_add_up_to_the_result(options: dict[str, Any], every: int) -> None:
    ids = encode("aé🙂 ENx END tail")
    frames, whole = frames_of(make(**options), ids, every), result_of(make(**options), ids)
    if options.get("columnar"):
        frames, whole = [columns.unpack(f) for f in frames], columns.unpack(whole)
    metas, meta = [f["meta_info"] for f in frames], whole["meta_info"]
    assert len(frames) > 1 and frames[0].keys() == frames[-1].keys() == whole.keys()
    assert "".join(f.get("text", "") for f in frames) == whole.get("text", "")
    assert [token for f in frames for token in f["output_ids"]] == whole["output_ids"]
    names = ["output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"]
    if not options.get("columnar"):
        names += ["output_token_sampling_mask", "output_token_sampling_logprobs"]
    if options.get("bad_words"):
        names += ["output_token_policy_logprobs", "output_token_has_choice"]
    for name in names:
        assert [each for m in metas for each in m[name]] == meta[name]
    for name in ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"):
        assert metas[0][name] == metas[-1][name] == meta[name] and len(meta[name]) == 3
        assert all(m[name] == [] for m in metas[1:-1])
    for name in ("completion_tokens", "output_token_logprobs_length", "finish_reason", "weight_versions"):
        assert metas[-1][name] == meta[name]
    assert all(m["finish_reason"] is None for m in metas[:-1])
    assert frames[-1]["prompt_token_ids"] == [5, 6, 7]


def test_text_that_a_stop_regex_cuts_may_have_been_sent() -> None:
    """A match may begin anywhere, so its beginning cannot be held back."""
    ids = encode("say 12. more")
    frames = frames_of(make(regex=r"\d+\."), ids, 1)
    assert "".join(f["text"] for f in frames) == "say 12"
    assert result_of(make(regex=r"\d+\."), ids)["text"] == "say "


@pytest.mark.parametrize(
    ("settings", "grammar", "reported", "known"),
    [
        ({}, "", False, "same"),
        ({"top_p": 0.5}, "", False, "same"),
        ({"logit_bias": {"3": 1.0}}, "", True, "given"),
        ({"logit_bias": {"3": 1.0}}, "", False, "unknown"),
        ({}, "a grammar", True, "given"),
        ({}, "a grammar", False, "unknown"),
        ({"logprobs_mode": "sampling", "top_p": 0.5}, "", False, "unknown"),  # what vLLM reports
        ({"logprobs_mode": "raw", "temperature": 0.5}, "", True, "given"),
        ({"logprobs_mode": "raw"}, "", False, "same"),
    ],
)
def test_a_result_says_where_the_policys_logprobs_are(
    settings: dict[str, Any], grammar: str, reported: bool, known: str
) -> None:
    req = TokenizedGenerateReq(rid="0", sampling=SamplingParams(**settings), return_logprob=True, grammar=grammar)
    state = ReqState("name", req, None)
    out = BatchTokenIDOut(
        rids=["0"],
        output_ids=[[5, 6]],
        output_logprobs=[[0.0, -1.0]],
        finish_reasons=[FinishReason(type="length", length=2)],
        weight_version="1",
        cached_tokens=[0],
        num_retractions=[0],
        policy_logprobs={0: [-2.0, -3.0]} if reported else {},
        has_choice={0: [False, True]} if reported and grammar else {},
    )
    state.extend(out, 0)
    meta = state.meta_info()
    assert meta["policy_logprobs"] == known
    assert meta.get("output_token_policy_logprobs") == ([-2.0, -3.0] if reported else None)
    assert meta.get("output_token_has_choice") == ([0, 1] if reported and grammar else None)
    state.shows_logprobs = False
    assert "policy_logprobs" not in state.meta_info()
