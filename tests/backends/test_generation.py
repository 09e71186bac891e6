"""What every engine generates: tokens, log-probabilities, ends, seeds, and refusals."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.backends.served import LONG_PROMPT, PROMPT, REFUSED, REQUESTS, RUNNING, Served
from tests.parity.harness import random_prompt
from tests.waiting import eventually
from verl_server import BadRequestError


def close(found: float, wanted: Any, served: Served) -> bool:
    return abs(found - float(wanted)) < served.tolerance


def test_greedy_tokens_and_log_probabilities(served: Served) -> None:
    reply = served.generate(tokens=12)
    logprobs = served.logprobs(PROMPT + reply["output_ids"])[len(PROMPT) - 1 : -1]
    assert reply["output_ids"] == logprobs.argmax(-1).tolist()
    for (found, token, _), row in zip(reply["meta_info"]["output_token_logprobs"], logprobs, strict=True):
        assert close(found, row[token], served)
    meta = reply["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 12)
    assert meta["finish_reason"] == {"type": "length", "length": 12}


def test_many_prompts_at_once(served: Served) -> None:
    prompts = [PROMPT[i:] for i in range(20)]
    replies = served.generate(prompts, tokens=6)
    for prompt, reply in zip(prompts, replies, strict=True):  # type: ignore[call-overload]
        assert (
            reply["output_ids"]
            == served.logprobs(prompt + reply["output_ids"])[len(prompt) - 1 : -1].argmax(-1).tolist()
        )


def test_streams_have_the_tokens_of_whole_replies(served: Served) -> None:
    whole = served.generate(tokens=8)
    *_, last = served.generate(tokens=8, stream=True)
    assert last["output_ids"] == whole["output_ids"]
    found, wanted = (reply["meta_info"]["output_token_logprobs"] for reply in (last, whole))
    assert all(close(a, b, served) for (a, _, _), (b, _, _) in zip(found, wanted, strict=True))


def test_log_probabilities_of_the_prompt(served: Served) -> None:
    found = served.generate(LONG_PROMPT, tokens=1, logprob_start_len=3)["meta_info"]["input_token_logprobs"]
    logprobs = served.logprobs(LONG_PROMPT)
    assert [token for _, token, _ in found] == LONG_PROMPT[3:]
    assert found[0][0] is None
    for position, (logprob, token, _) in enumerate(found[1:], start=4):
        assert close(logprob, logprobs[position - 1, token], served)


def test_top_log_probabilities(served: Served) -> None:
    reply = served.generate(tokens=3, top_logprobs_num=4)
    logprobs = served.logprobs(PROMPT + reply["output_ids"])[len(PROMPT) - 1 : -1]
    for found, row in zip(reply["meta_info"]["output_top_logprobs"], logprobs, strict=True):
        best = row.topk(4)
        assert [token for _, token, _ in found] == best.indices.tolist()
        assert all(close(a, b, served) for (a, _, _), b in zip(found, best.values, strict=True))


def test_stop_tokens_and_stop_strings(served: Served) -> None:
    ids = served.generate(tokens=8)["output_ids"]
    stopped = served.generate(tokens=8, sampling_params={"stop_token_ids": [ids[3]], "ignore_eos": False})
    assert stopped["output_ids"] == ids[: ids.index(ids[3]) + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[3]}
    params = {"stop_token_ids": [ids[3]], "ignore_eos": False, "min_new_tokens": 8}
    kept = served.generate(tokens=8, sampling_params=params)
    assert ids[3] not in kept["output_ids"][:7]
    text = served.generate(tokens=8)["text"]
    ended = served.generate(tokens=8, sampling_params={"stop": [text[2:4]]})
    assert ended["meta_info"]["finish_reason"]["type"] == "stop"
    assert text[2:4] not in ended["text"]


def test_draws_depend_on_their_seed(served: Served) -> None:
    def draw(seed: int) -> list[int]:
        params = {"temperature": 1.0, "sampling_seed": seed}
        return list(served.generate(tokens=12, sampling_params=params)["output_ids"])

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    samples = served.generate(tokens=12, sampling_params={"temperature": 1.0, "n": 3})
    assert len({tuple(sample["output_ids"]) for sample in samples}) == 3


def test_log_probabilities_have_the_temperature(served: Served) -> None:
    reply = served.generate(tokens=6, sampling_params={"temperature": 0.5, "sampling_seed": 3})
    tokens = PROMPT + reply["output_ids"]
    rows = torch.log_softmax(served.logprobs(tokens) / 0.5, -1)[len(PROMPT) - 1 : -1]
    for (found, token, _), row in zip(reply["meta_info"]["output_token_logprobs"], rows, strict=True):
        assert close(found, row[token], served)


def test_a_reply_says_which_log_probabilities_it_has(served: Served) -> None:
    """vLLM's are those after the filters, those of the other engines are those before."""
    params = {"temperature": 0.8, "top_k": 3, "sampling_seed": 3}
    reply = served.generate(tokens=6, sampling_params=params)
    mode = reply["meta_info"]["logprobs_mode"]
    assert mode == ("sampling" if served.engine == "vllm" else "default")
    rows = (served.logits(PROMPT + reply["output_ids"]) / 0.8)[len(PROMPT) - 1 : -1]
    for (found, token, _), row in zip(reply["meta_info"]["output_token_logprobs"], rows, strict=True):
        allowed = row if mode == "default" else row.topk(3).values
        assert close(found, row[token] - allowed.logsumexp(-1), served)
    assert served.generate(tokens=2)["meta_info"]["logprobs_mode"] == "default", "greedy sampling has no filter"


def test_a_prompt_is_scored_without_new_tokens(served: Served) -> None:
    reply = served.generate(tokens=0, logprob_start_len=0)
    assert reply["output_ids"] == [] and reply["meta_info"]["finish_reason"]["type"] == "length"
    rows = served.logprobs(PROMPT)
    for (found, token, _), row in zip(reply["meta_info"]["input_token_logprobs"][1:], rows, strict=False):
        assert close(found, row[token], served)
    assert len(reply["meta_info"]["input_token_logprobs"]) == len(PROMPT)


@pytest.mark.parametrize(
    "params",
    [{"top_k": 1}, {"top_p": 1e-4}, {"min_p": 0.999}],
    ids=lambda params: next(iter(params)),
)
def test_filters_that_leave_one_token(served: Served, params: dict[str, Any]) -> None:
    greedy = served.generate(tokens=6)["output_ids"]
    assert (
        served.generate(tokens=6, sampling_params={"temperature": 1.0, "sampling_seed": 1} | params)["output_ids"]
        == greedy
    )


def test_bias(served: Served) -> None:
    assert served.generate(tokens=4, sampling_params={"logit_bias": {"77": 100.0}})["output_ids"] == [77] * 4


def test_allowed_tokens(served: Served) -> None:
    _skip_if_refused(served, "allowed_token_ids")
    allowed = served.generate(tokens=6, sampling_params={"temperature": 1.0, "allowed_token_ids": [50, 51]})
    assert set(allowed["output_ids"]) <= {50, 51}


def test_penalties(served: Served) -> None:
    params = {"presence_penalty": 2.0, "frequency_penalty": 1.0, "repetition_penalty": 1.3}
    ids = served.generate(tokens=8, sampling_params=params)["output_ids"]
    logits = served.logits(PROMPT + ids)[len(PROMPT) - 1 : -1]
    for i, row in enumerate(logits):
        counts = torch.bincount(torch.tensor(ids[:i], dtype=torch.long), minlength=len(row))
        seen = counts > 0
        seen[PROMPT] = True
        row = torch.where(seen, torch.where(row > 0, row / 1.3, row * 1.3), row) - 1.0 * counts - 2.0 * (counts > 0)
        assert ids[i] == int(row.argmax())


def test_a_request_may_fill_the_context(served: Served) -> None:
    longest = served.adapter.get_server_info()["scheduler_info"]["context_length"]
    assert longest > 8192 - 16, "engines may need some tokens themselves"
    reply = served.generate(random_prompt(longest - 8, seed=4), tokens=8)
    assert len(reply["output_ids"]) == 8 and reply["meta_info"]["finish_reason"]["type"] == "length"
    with pytest.raises(BadRequestError, match="context"):
        served.generate(random_prompt(longest - 8, seed=4), tokens=9)


def test_repeated_prompts_read_the_cache(fresh: Served) -> None:
    assert fresh.generate(LONG_PROMPT, tokens=2)["meta_info"]["cached_tokens"] == 0
    again = fresh.generate(LONG_PROMPT, tokens=2)
    assert again["meta_info"]["cached_tokens"] >= 128
    assert again["output_ids"] == fresh.generate(LONG_PROMPT, tokens=2)["output_ids"]
    assert fresh.adapter.flush_cache(timeout=10)
    assert fresh.generate(LONG_PROMPT, tokens=2)["meta_info"]["cached_tokens"] == 0


def test_namespaces_share_no_cache(fresh: Served) -> None:
    fresh.generate(LONG_PROMPT, tokens=2, extra_key="a")
    assert fresh.generate(LONG_PROMPT, tokens=2, extra_key="b")["meta_info"]["cached_tokens"] == 0
    assert fresh.generate(LONG_PROMPT, tokens=2, extra_key="a")["meta_info"]["cached_tokens"] >= 128


def test_an_abort_returns_what_was_generated(fresh: Served) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = fresh.begin(pool, tokens=2 * RUNNING)
        fresh.adapter.abort_request(abort_all=True)
        reply = running.result(60)
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(reply["output_ids"]) < 2 * RUNNING
    fresh.judge(PROMPT, reply)
    assert eventually(lambda: _running(fresh) == 0)


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TAG = {
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</a>"},
        ],
    }
}


@pytest.mark.parametrize(
    ("field", "grammar", "pattern"),
    [
        ("json_schema", json.dumps(SCHEMA), r"\{\s*\"a\"\s*:\s*[12]\s*\}"),
        ("regex", "(yes|no){2}", "(yes|no){2}"),
        ("ebnf", 'root ::= "a" | "b" root', "b*a"),
        ("structural_tag", json.dumps(TAG), r"<a>\{\s*\"a\"\s*:\s*[12]\s*\}</a>"),
    ],
)
def test_outputs_follow_a_grammar(served: Served, field: str, grammar: str, pattern: str) -> None:
    params = {field: grammar, "temperature": 1.0, "sampling_seed": 5, "ignore_eos": False}
    reply = served.generate(tokens=400, sampling_params=params)
    assert re.fullmatch(pattern, reply["text"]), reply["text"]
    assert reply["meta_info"]["finish_reason"]["type"] == "stop"


def test_bad_words_are_not_sampled(served: Served) -> None:
    _skip_if_refused(served, "bad_words")
    text = served.generate(tokens=16)["text"]
    word = next(letter for letter in text if letter.isascii() and letter.isprintable() and letter != " ")
    kept = served.generate(tokens=16, sampling_params={"bad_words": [word]})
    assert word not in kept["text"]


def test_what_the_engine_cannot_do_is_refused_by_name(served: Served) -> None:
    with pytest.raises(BadRequestError, match="context"):
        served.generate(LONG_PROMPT, tokens=100_000)
    with pytest.raises(BadRequestError, match="vocabulary"):
        served.generate([5, 320])
    if served.engine != "embedded":
        named = served.adapter.get_server_info()["scheduler_info"]["unsupported"]
        assert REFUSED[served.engine] == REQUESTS.keys() & set(named)
    for name in REFUSED[served.engine]:
        with pytest.raises(BadRequestError, match=re.escape(f"does not support {name}")):
            served.generate(**REQUESTS[name])
    assert len(served.generate(tokens=3)["output_ids"]) == 3


def _skip_if_refused(served: Served, name: str) -> None:
    if name in REFUSED[served.engine]:
        pytest.skip(f"{served.engine} refuses {name}: test_what_the_engine_cannot_do_is_refused_by_name")


def _running(served: Served) -> int:
    return int(served.adapter.get_server_info()["internal_states"][0]["num_running_reqs"])


def test_the_server_names_its_engine(served: Served) -> None:
    info = served.adapter.get_server_info()
    assert info["engine"] == served.engine
    if served.engine != "embedded":
        assert str(info["engine_version"]).startswith(served.engine)
