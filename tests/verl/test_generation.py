"""verl's generate call as our request, and our result as verl's TokenOutput."""

from __future__ import annotations

from typing import Any

import pytest
from verl.workers.rollout.replica import TokenOutput

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.integrations.verl.generation import (
    check_text_only,
    generate_request,
    output_fields,
    rejected_fields,
)
from verl_server.integrations.verl.settings import ServingOptions
from verl_server.integrations.verl.step_labels import StepLabels, step_of
from verl_server.sampling_params import SamplingParams

PROMPT = list(range(10))
VERL = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
"""The sampling parameters that verl's agent loop sends."""


def request(params: dict[str, Any], prompt: list[int] = PROMPT, context: int = 100, **options: Any) -> dict[str, Any]:
    return generate_request(prompt, params, "id", context, ServingOptions(**options))


def result(ids: list[int], spans: list[tuple[str, int, int]], finish: str = "stop", **meta: Any) -> Any:
    return {
        "output_ids": ids,
        "meta_info": {
            "id": "id-0",
            "finish_reason": {"type": finish},
            "cached_tokens": 3,
            "num_retractions": 1,
            "weight_version": spans[-1][0] if spans else "5@5f2c9a1e",
            "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in spans],
            "output_token_logprobs": [[-0.5 * i, token, None] for i, token in enumerate(ids)],
            **meta,
        },
    }


def test_the_agent_loops_parameters() -> None:
    sent = request(VERL, prompt_length=8, response_length=16)
    params = sent["sampling_params"]
    assert sent["input_ids"] == PROMPT
    assert sent["return_logprob"]
    assert params.items() >= {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0}.items()
    assert "logprobs" in VERL  # the caller uses its dict again
    SamplingParams.parse(params)


@pytest.mark.parametrize(
    ("given", "options", "limit"),
    [
        ({}, {"prompt_length": 12, "response_length": 16}, 16),
        ({}, {"prompt_length": 4, "response_length": 16}, 10),  # a later turn: 4 + 16 tokens in total
        ({}, {"prompt_length": 2, "response_length": 4}, 0),
        ({}, {}, 90),
        ({"max_tokens": 7}, {"response_length": 16}, 7),
        ({"max_new_tokens": 7}, {}, 7),
        ({"max_tokens": 1000}, {}, 90),
        ({"max_tokens": -1}, {}, 0),
    ],
)
def test_the_limit_of_tokens(given: dict[str, Any], options: dict[str, Any], limit: int) -> None:
    assert request(given, **options)["sampling_params"]["max_new_tokens"] == limit


def test_a_prompt_that_is_too_long() -> None:
    with pytest.raises(BadRequestError, match="prompt is too long: 10 tokens > 8 maximum"):
        request({}, context=9)


def test_names_of_vllm() -> None:
    params = request({"min_tokens": 2, "seed": 5, "include_stop_str_in_output": True, "stop": None})["sampling_params"]
    assert params.items() >= {"min_new_tokens": 2, "sampling_seed": 5, "no_stop_trim": True}.items()
    assert "stop" not in params


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"best_of": 2}, "Unknown sampling parameter 'best_of'"),
        ({"n": 2}, "n must be 1"),
        ({"max_tokens": 1, "max_new_tokens": 2}, "set only one"),
    ],
)
def test_a_parameter_is_refused_by_name(params: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        request(params)


def test_defaults_of_the_rollout_settings() -> None:
    options = {"ignore_eos": True, "repetition_penalty": 1.1, "logprobs_mode": "raw"}
    params = request({"logprobs": True}, **options)["sampling_params"]
    assert params.items() >= options.items()
    assert "logprobs_mode" not in request({}, **options)["sampling_params"]
    assert request({"ignore_eos": False}, **options)["sampling_params"]["ignore_eos"] is False


def test_min_tokens_has_vllms_meaning() -> None:
    assert request({"min_tokens": 3})["sampling_params"]["stop_after_min_new_tokens"] is True
    assert "stop_after_min_new_tokens" not in request({"min_new_tokens": 3})["sampling_params"]


def test_deterministic_seeds() -> None:
    """Under full determinism the seed depends on the request and the turn, not on the order of arrival."""

    def seed(prompt: list[int], rid: str = "a") -> int:
        sent = generate_request(prompt, {}, rid, 100, ServingOptions(deterministic_seed=1))
        return int(sent["sampling_params"]["sampling_seed"])

    assert seed(PROMPT) == seed(PROMPT)
    assert len({seed(PROMPT), seed([*PROMPT, 1]), seed(PROMPT, "b")}) == 3
    assert "sampling_seed" not in request({})["sampling_params"]


@pytest.mark.parametrize("name", ["image_data", "video_data", "audio_data", "mm_processor_kwargs", "bootstrap_room"])
def test_other_inputs_are_refused_by_name(name: str) -> None:
    check_text_only({name: None})
    with pytest.raises(BadRequestError, match=name):
        check_text_only({name: ["x"]})


def test_the_output() -> None:
    output = TokenOutput(
        **output_fields(result([7, 8, 9], [("3@5f2c9a1e", 0, 2), ("4@5f2c9a1e", 2, 3)]), request(VERL))
    )
    assert output.token_ids == [7, 8, 9]
    assert output.log_probs == [0.0, -0.5, -1.0]
    assert (output.stop_reason, output.num_preempted) == ("completed", 1)
    assert output.extra_fields == {
        "global_steps": 4,
        "min_global_steps": 3,
        "max_global_steps": 4,
        "weight_versions": [[3, 2], [4, 1]],
        "num_cached_tokens": 3,
    }
    assert (
        TokenOutput(**output_fields(result([7], [("3@5f2c9a1e", 0, 1)], finish="length"), {})).stop_reason
        == "completed"
    )
    assert TokenOutput(**output_fields(result([7], [("3@5f2c9a1e", 0, 1)]), {})).log_probs is None


def test_the_output_says_what_is_known_of_the_policys_logprobs() -> None:
    given = {"policy_logprobs": "given", "output_token_policy_logprobs": [-2.0], "output_token_has_choice": [0]}
    output = TokenOutput(**output_fields(result([7], [("3@5f2c9a1e", 0, 1)], **given), request(VERL)))
    assert output.extra_fields.items() >= given.items()
    unknown = output_fields(result([7], [("3@5f2c9a1e", 0, 1)], policy_logprobs="unknown"), request(VERL))[
        "extra_fields"
    ]
    assert unknown["policy_logprobs"] == "unknown" and not given.keys() & unknown.keys() - {"policy_logprobs"}


def test_an_abort_keeps_its_tokens() -> None:
    output = TokenOutput(**output_fields(result([7, 8], [("3@5f2c9a1e", 0, 2)], finish="abort"), request(VERL)))
    assert (output.token_ids, output.log_probs, output.stop_reason) == ([7, 8], [0.0, -0.5], "aborted")


def test_an_output_without_tokens_has_the_servers_version() -> None:
    fields = output_fields(result([], [], finish="abort"), request(VERL))["extra_fields"]
    assert (fields["global_steps"], fields["min_global_steps"], fields["max_global_steps"]) == (5, 5, 5)
    assert fields["weight_versions"] == []


def test_labels_that_are_no_steps() -> None:
    for free in ("default", "1", "unnumbered-1@5f2c9a1e"):
        fields = output_fields(result([7, 8], [(free, 0, 1), ("1@5f2c9a1e", 1, 2)]), {})["extra_fields"]
        assert (fields["global_steps"], fields["min_global_steps"], fields["max_global_steps"]) == (1, None, None)
        assert fields["weight_versions"] == [[None, 1], [1, 1]]


def test_steps_of_a_job_and_of_its_resumed_one_have_no_order() -> None:
    fields = output_fields(result([7, 8], [("13@aaaaaaaa", 0, 1), ("12@bbbbbbbb", 1, 2)]), {})["extra_fields"]
    assert (fields["global_steps"], fields["min_global_steps"], fields["max_global_steps"]) == (12, None, None)
    assert fields["weight_versions"] == [[13, 1], [12, 1]]


def test_the_labels_of_a_resumed_job_are_others() -> None:
    lost, resumed = StepLabels("aaaaaaaa"), StepLabels("bbbbbbbb")
    labels = [job.next_label(step) for job in (lost, resumed) for step in (12, 13, None, None)]
    assert labels[:4] == ["12@aaaaaaaa", "13@aaaaaaaa", "unnumbered-3@aaaaaaaa", "unnumbered-4@aaaaaaaa"]
    assert len(set(labels)) == 8
    assert [step_of(label) for label in labels] == [12, 13, None, None] * 2


def test_missing_logprobs_are_an_error() -> None:
    broken = result([7, 8], [("3@5f2c9a1e", 0, 2)], output_token_logprobs=[[-0.5, 7, None]])
    with pytest.raises(VerlServerError, match="2 output tokens and 1 log-prob"):
        output_fields(broken, request(VERL))


def test_a_rejected_request_counts_as_aborted() -> None:
    output = TokenOutput(**rejected_fields(6))
    assert (output.token_ids, output.log_probs, output.stop_reason) == ([], [], "aborted")
    assert output.extra_fields["global_steps"] == output.extra_fields["max_global_steps"] == 6


@pytest.mark.parametrize("candidates", [0, 2])
def test_prompt_logprobs_of_a_teacher(candidates: int) -> None:
    """verl's teacher reads one row for each token: the row at i belongs to token i + 1, and the last row is zero."""
    sent = request({"prompt_logprobs": candidates, "max_tokens": 1}, prompt=[4, 5, 6])
    assert (sent["logprob_start_len"], sent.get("top_logprobs_num", 0)) == (0, candidates)
    answer = result(
        [7],
        [("3@5f2c9a1e", 0, 1)],
        input_token_logprobs=[[None, 4, None], [-1.0, 5, None], [-2.0, 6, None]],
        input_top_logprobs=[None, [[-0.1, 9, None], [-1.0, 5, None]], [[-0.2, 8, None], [-2.0, 6, None]]],
    )
    fields = output_fields(answer, sent)["extra_fields"]
    expected = [[9, 5], [8, 6], [0, 0]] if candidates else [[5], [6], [0]]
    assert fields["prompt_ids"] == expected
    expected_logprobs = [[-0.1, -1.0], [-0.2, -2.0], [0.0, 0.0]] if candidates else [[-1.0], [-2.0], [0.0]]
    assert fields["prompt_logprobs"] == expected_logprobs
