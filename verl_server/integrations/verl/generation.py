"""verl's generate call as a request of this server, and the result as the fields of verl's `TokenOutput`.

Pure functions, called by `ServerActor.generate`.
"""

from __future__ import annotations

import hashlib
from typing import Any

from verl_server.errors import BadRequestError, ContextLengthError, VerlServerError
from verl_server.integrations.verl.settings import ServingOptions
from verl_server.integrations.verl.step_labels import step_of
from verl_server.messages.results import GenerateResult, MetaInfo
from verl_server.sampling_params import SamplingParams
from verl_server.weight_version import WeightVersion

_RENAMED = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
"""vLLM's name of a sampling parameter, which verl uses, too -> this server's name."""
_OWN_MEANING = ("logprobs", "prompt_logprobs")
"""Sampling parameters of verl that are fields of a request of this server."""


def check_text_only(fields: dict[str, Any]) -> None:
    """Raise BadRequestError if `fields`, the other keywords of verl's call, has a value."""
    given = [name for name, value in fields.items() if value is not None and value != [] and value != {}]
    if given:
        raise BadRequestError(
            f"generate was called with {', '.join(given)}, which rollout.name=verl_server does not support: the server "
            "takes token ids and sampling parameters only."
        )


def generate_request(
    prompt_ids: list[int],
    sampling_params: dict[str, Any],
    request_id: str,
    context_length: int,
    options: ServingOptions,
) -> dict[str, Any]:
    """Return the keywords of `async_generate` for one call of verl. The caller's dict is not changed.

    The request has no `session_id`, because `request_id` names no conversation. verl's `LLMServerClient` sends a new id
    for each turn or, with `full_determinism`, the same ids in each step.

    `context_length` is the most tokens in prompt and output together. Raise BadRequestError for an unknown sampling
    parameter, and ContextLengthError for a prompt that is too long.
    """
    params = _sampling_params(sampling_params, options)
    with_logprobs = bool(params.pop("logprobs", False))
    candidates = params.pop("prompt_logprobs", None)
    params["max_new_tokens"] = _token_limit(len(prompt_ids), params.get("max_new_tokens"), context_length, options)
    if with_logprobs and options.logprobs_mode != "default":
        params.setdefault("logprobs_mode", options.logprobs_mode)
    if options.deterministic_seed is not None:
        params.setdefault("sampling_seed", _seed(options.deterministic_seed, request_id, len(prompt_ids)))
    request: dict[str, Any] = {"input_ids": prompt_ids, "sampling_params": params}
    if with_logprobs or candidates is not None:
        request["return_logprob"] = True
    if candidates is not None:
        request["logprob_start_len"] = 0
    if candidates:
        request["top_logprobs_num"] = int(candidates)
    return request


def _sampling_params(sampling_params: dict[str, Any], options: ServingOptions) -> dict[str, Any]:
    """Return verl's parameters under this server's names, with the defaults of `options`."""
    params: dict[str, Any] = {}
    for name, value in sampling_params.items():
        own = _RENAMED.get(name, name)
        if own not in SamplingParams.__struct_fields__ and own not in _OWN_MEANING:
            known = sorted({*SamplingParams.__struct_fields__, *_OWN_MEANING, *_RENAMED})
            raise BadRequestError(f"Unknown sampling parameter {name!r}; known: {', '.join(known)}.")
        if own in params:
            raise BadRequestError(f"Sampling parameters {name!r} and {own!r} are the same limit: set only one.")
        if value is not None:
            params[own] = value
    if params.get("min_new_tokens") and "min_tokens" in sampling_params:  # vLLM's name has vLLM's meaning
        params.setdefault("stop_after_min_new_tokens", True)
    if params.pop("n", 1) != 1:
        raise BadRequestError("Sampling parameter n must be 1: verl's generate call returns one sample.")
    params.setdefault("repetition_penalty", options.repetition_penalty)
    params.setdefault("ignore_eos", options.ignore_eos)
    return params


def _token_limit(prompt_tokens: int, requested: int | None, context_length: int, options: ServingOptions) -> int:
    """Return the most output tokens: the requested limit, or the rest of verl's lengths, within the context."""
    room = context_length - prompt_tokens
    if room < 0:
        cause = "actor_rollout_ref.rollout.max_model_len, else the model's max_position_embeddings"
        raise ContextLengthError.of(prompt_tokens, 0, context_length, cause)
    limit = room if requested is None else int(requested)
    if requested is None and options.response_length is not None:
        total = (options.prompt_length or 0) + options.response_length
        limit = min(options.response_length, total - prompt_tokens)
    return max(0, min(limit, room))


def _seed(seed: int, request_id: str, prompt_tokens: int) -> int:
    """Return a seed that repeats for the same request in the same turn, in whichever order requests arrive."""
    digest = hashlib.sha256(f"{seed}:{request_id}:{prompt_tokens}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 11  # 53 bits: every JSON reader keeps them exactly


def output_fields(result: GenerateResult, request: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of verl's `TokenOutput` for the result of `request`.

    Raise VerlServerError if the log-probabilities do not match the tokens.
    """
    meta, token_ids = result["meta_info"], list(result["output_ids"])
    finish = meta["finish_reason"]
    fields: dict[str, Any] = {
        "token_ids": token_ids,
        "log_probs": None,
        "stop_reason": "aborted" if finish is not None and finish["type"] == "abort" else "completed",
        "num_preempted": meta["num_retractions"],
        "extra_fields": _version_fields(meta) | {"num_cached_tokens": meta["cached_tokens"]},
    }
    if request.get("return_logprob"):
        triples = meta.get("output_token_logprobs") or []
        if len(triples) != len(token_ids):
            raise VerlServerError(
                f"Request {meta['id']} has {len(token_ids)} output tokens and {len(triples)} log-probabilities."
            )
        fields["log_probs"] = [float(triple[0]) for triple in triples]
        fields["extra_fields"] |= _policy_fields(meta)
    if request.get("logprob_start_len") == 0:
        fields["extra_fields"] |= _prompt_logprobs(meta, request)
    return fields


def _policy_fields(meta: MetaInfo) -> dict[str, Any]:
    """Return the fields of `MetaInfo` about the policy's own log-probabilities. Leave out absent fields.

    verl reads `log_probs` only, as those of the rollout. For a caller that forces tools, or sets penalties or a bias,
    these fields have the values that its actor computes, and the tokens that had no alternative.
    """
    found: dict[str, Any] = {}
    for name in ("policy_logprobs", "output_token_policy_logprobs", "output_token_has_choice"):
        if name in meta:
            found[name] = meta[name]
    return found


def rejected_fields(global_steps: int | None) -> dict[str, Any]:
    """Return the fields of `TokenOutput` for a request that was not sent, because its replica rejects requests."""
    steps = {"global_steps": global_steps, "min_global_steps": global_steps, "max_global_steps": global_steps}
    return {
        "token_ids": [],
        "log_probs": [],
        "stop_reason": "aborted",
        "num_preempted": 0,
        "extra_fields": steps | {"weight_versions": [], "num_cached_tokens": 0},
    }


def _version_fields(meta: MetaInfo) -> dict[str, Any]:
    """Return the weight versions of the output tokens as verl's steps.

    `weight_versions` is a list of [step or None, number of tokens] in the order of the tokens. A free label counts as
    None. Minimum and maximum are None if there is a free label, or if the steps are of several incarnations, because
    those have no order.
    """
    spans = meta.get("weight_versions", [])
    labels = [span["version"] for span in spans] or [meta["weight_version"]]
    versions = [WeightVersion.parse(label) for label in labels]
    known = [version for version in versions if version is not None]
    is_ordered = len(known) == len(versions) and len({version.incarnation for version in known}) == 1
    return {
        "global_steps": step_of(labels[-1]),
        "min_global_steps": min(known).number if is_ordered else None,
        "max_global_steps": max(known).number if is_ordered else None,
        "weight_versions": [[step_of(span["version"]), span["end"] - span["start"]] for span in spans],
    }


def _prompt_logprobs(meta: MetaInfo, request: dict[str, Any]) -> dict[str, Any]:
    """Return `prompt_ids` and `prompt_logprobs`, of shape (prompt tokens, candidates), as verl's teachers expect them.

    Row i holds the candidates for prompt token i + 1, the most likely first; without candidates the token itself. The
    last row, which no prompt token follows, is zero.
    """
    candidates = request.get("top_logprobs_num", 0)
    rows: list[Any] = list(meta["input_top_logprobs"] if candidates else ([t] for t in meta["input_token_logprobs"]))
    ids = [[int(entry[1]) for entry in row] for row in rows[1:]]
    logprobs = [[float(entry[0]) for entry in row] for row in rows[1:]]
    width = max(candidates, 1)
    return {"prompt_ids": [*ids, [0] * width], "prompt_logprobs": [*logprobs, [0.0] * width]}
