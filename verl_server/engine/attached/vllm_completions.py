"""`VllmCompletions`: `/generate` requests carried out by `/v1/completions` of a genuine vLLM server.

That route takes token ids and returns them (`return_token_ids`), with log-probabilities of the tokens by id. Every
sampling setting is sent, because vLLM reads missing settings from the model's `generation_config.json`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import orjson

from verl_server.engine.base import Result
from verl_server.engine.http_answers import json_request
from verl_server.engine.http_transport import HttpTransport
from verl_server.errors import BadRequestError
from verl_server.messages.results import GenerateResult, LogprobTriple
from verl_server.sampling_params import GRAMMARS, TOP_K_ALL, PolicyLogprobs, SamplingParams

_ROUTE = "/v1/completions"
_OPTIONS = {
    "rid",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_prompt_token_ids",
    "extra_key",
    "cache_salt",
    "priority",
    "truncate_prompt_tokens",
}
"""Options of `/generate` that vLLM's route can express."""
_HINTS = ("session_id",)
"""Options of `/generate` that change no output."""
_THREADS = 64
"""The most requests of one batch that run at the same time."""


class ServedWeights(NamedTuple):
    """The weights that a vLLM server has, as far as its adapter knows."""

    label: str
    """Their version label. A caller may give one free label to several weights."""
    pages: str
    """Names these weights and no others. Only requests with the same name may share pages of the KV cache."""


class VllmCompletions:
    """The `GenerateTransport` of an attached vLLM server."""

    def __init__(
        self, transport: HttpTransport, model: str, logprobs_mode: str | None, served: Callable[[], ServedWeights]
    ) -> None:
        """`logprobs_mode` is vLLM's setting, or None if it is unknown. `served` returns the weights of now."""
        self._transport, self._model, self._served = transport, model, served
        self._logprobs_mode = logprobs_mode

    def generate(self, body: dict[str, Any], timeout: float | None) -> Result:
        prompts = _split(body)
        with ThreadPoolExecutor(min(len(prompts), _THREADS)) as pool:
            found = list(pool.map(lambda one: self._one(one, timeout), prompts))
        return _joined(body, found)

    async def async_generate(self, body: dict[str, Any], timeout: float | None) -> Result:
        return _joined(body, await asyncio.gather(*(self._async_one(one, timeout) for one in _split(body))))

    def stream(self, body: dict[str, Any], timeout: float | None) -> Iterator[GenerateResult]:
        sample = _Sample(self._only(body), self._model, self._logprobs_mode, self._served)
        for event in self._transport.events(_ROUTE, json_request(sample.request | _STREAM), timeout):
            yield from sample.frames(event)

    async def async_stream(self, body: dict[str, Any], timeout: float | None) -> AsyncIterator[GenerateResult]:
        sample = _Sample(self._only(body), self._model, self._logprobs_mode, self._served)
        async for event in self._transport.async_events(_ROUTE, json_request(sample.request | _STREAM), timeout):
            for frame in sample.frames(event):
                yield frame

    def _one(self, body: dict[str, Any], timeout: float | None) -> list[GenerateResult]:
        sample = _Sample(body, self._model, self._logprobs_mode, self._served)
        answer = self._transport.exchange(_ROUTE, json_request(sample.request), timeout)
        return sample.results(orjson.loads(answer.content))

    async def _async_one(self, body: dict[str, Any], timeout: float | None) -> list[GenerateResult]:
        sample = _Sample(body, self._model, self._logprobs_mode, self._served)
        answer = await self._transport.async_exchange(_ROUTE, json_request(sample.request), timeout)
        return sample.results(orjson.loads(answer.content))

    def _only(self, body: dict[str, Any]) -> dict[str, Any]:
        prompts = _split(body)
        if len(prompts) != 1:
            raise BadRequestError("With a vLLM server, a stream has one prompt: stream the prompts one by one.")
        return prompts[0]


_STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def _split(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one body for each prompt, without the hints that vLLM does not have.

    A field that is a list has one entry for each prompt. Raise BadRequestError for another number of entries.
    """
    body = {name: value for name, value in body.items() if name not in _HINTS}
    prompts = body.get("input_ids", body.get("text"))
    if ("input_ids" in body) == ("text" in body):
        raise BadRequestError("Give either a prompt or input_ids.")
    if not prompts:
        raise BadRequestError("The prompt is empty. It needs at least one token.")
    name = "input_ids" if "input_ids" in body else "text"
    if not isinstance(prompts, list) or (prompts and isinstance(prompts[0], int)):
        return [body]
    bodies = [body | {name: prompt} for prompt in prompts]
    for key, value in body.items():
        if key == name or not isinstance(value, list):
            continue
        if len(value) != len(prompts):
            raise BadRequestError(f"{key} has {len(value)} entries for {len(prompts)} prompts.")
        for one, entry in zip(bodies, value, strict=True):
            one[key] = entry
    if isinstance(body.get("rid"), str):
        bodies = [one | {"rid": f"{body['rid']}_{i}"} for i, one in enumerate(bodies)]
    return bodies


def _joined(body: dict[str, Any], found: list[list[GenerateResult]]) -> Result:
    """Return one result for one prompt with one sample, else a list."""
    results = [result for one in found for result in one]
    prompts = body.get("input_ids", body.get("text"))
    is_batch = isinstance(prompts, list) and not (prompts and isinstance(prompts[0], int))
    return results if is_batch or len(results) != 1 else results[0]


class _Sample:
    """One prompt: the request to vLLM, and the translation of the answer or of the events of a stream."""

    def __init__(
        self, body: dict[str, Any], model: str, logprobs_mode: str | None, served: Callable[[], ServedWeights]
    ) -> None:
        unknown = sorted(
            name for name in body.keys() - _OPTIONS - {"input_ids", "text", "sampling_params", "stream"} if body[name]
        )
        if unknown:
            raise BadRequestError(f"A vLLM server cannot express {', '.join(unknown)}: leave the option unset.")
        self._body, self._params = body, SamplingParams.parse(body.get("sampling_params"))
        self._rid = body.get("rid") or uuid.uuid4().hex
        self._top = int(body.get("top_logprobs_num") or 0)
        self._start = int(body.get("logprob_start_len", -1))
        self._served, self._began_with = served, served()
        self._mode = _logprobs_mode(logprobs_mode, self._params)
        self._began = time.monotonic()
        self._so_far: dict[int, dict[str, Any]] = {}
        """Index of a choice -> all events of the stream so far, merged into one choice."""
        self.request = self._request(model)

    def _request(self, model: str) -> dict[str, Any]:
        body, wants = self._body, bool(self._body.get("return_logprob"))
        request = _sampling(self._params) | {
            "model": model,
            "prompt": body.get("input_ids", body.get("text")),
            "request_id": self._rid,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "cache_salt": _salt(self._began_with.pages, body.get("extra_key"), body.get("cache_salt")),
        }
        if wants:
            request["logprobs"] = self._top
        if wants and self._start >= 0:
            request["prompt_logprobs"] = self._top
        if body.get("priority"):
            request["priority"] = -int(body["priority"])  # the smallest number is the first in vLLM
        if body.get("truncate_prompt_tokens") is not None:
            request["truncate_prompt_tokens"] = body["truncate_prompt_tokens"]
        return request

    def results(self, answer: dict[str, Any]) -> list[GenerateResult]:
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        return [self._result(choice, answer.get("usage") or {}) for choice in choices]

    def frames(self, event: dict[str, Any]) -> Iterator[GenerateResult]:
        """Add an event of the stream, and return the results so far that the event changed."""
        for choice in event["choices"]:
            index = int(choice["index"])
            so_far = self._so_far.setdefault(index, {"text": "", "token_ids": [], "logprobs": None})
            _add(so_far, choice)
            frame = self._result(so_far, event.get("usage") or {})
            if self._params.n > 1:
                frame["index"] = index
            yield frame

    def _result(self, choice: dict[str, Any], usage: dict[str, Any]) -> GenerateResult:
        ids, prompt_ids = choice["token_ids"] or [], choice.get("prompt_token_ids") or []
        now, reason = self._served(), choice.get("finish_reason")
        meta: dict[str, Any] = {
            "id": self._rid,
            "finish_reason": _finish_reason(reason, choice.get("stop_reason"), ids),
            "prompt_tokens": usage.get("prompt_tokens", len(prompt_ids)),
            "completion_tokens": len(ids),
            "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            "weight_version": now.label,
            "e2e_latency": time.monotonic() - self._began,
        }
        if reason is not None and now == self._began_with:  # else nobody knows where the border is
            meta["weight_versions"] = [{"version": now.label, "start": 0, "end": len(ids)}]
        if self._body.get("return_logprob"):
            meta |= self._logprobs(choice, ids, prompt_ids)
        result: Any = {"text": choice["text"], "output_ids": ids, "meta_info": meta}
        if self._body.get("return_prompt_token_ids"):
            result["prompt_token_ids"] = prompt_ids
        found: GenerateResult = result
        return found

    def _logprobs(self, choice: dict[str, Any], ids: list[int], prompt_ids: list[int]) -> dict[str, Any]:
        logprobs = choice.get("logprobs") or {"token_logprobs": [], "top_logprobs": []}
        meta: dict[str, Any] = {
            "output_token_logprobs": [
                (value, token, None) for value, token in zip(logprobs["token_logprobs"], ids, strict=True)
            ],
            "output_token_logprobs_length": len(ids),
            "input_token_logprobs": [],
        }
        if self._mode is not None:
            meta["logprobs_mode"] = self._mode
        meta["policy_logprobs"] = _policy_logprobs(self._mode, self._params)
        if self._top:
            tops = [
                {int(name.removeprefix("token_id:")): v for name, v in top.items()} for top in logprobs["top_logprobs"]
            ]
            meta["output_top_logprobs"] = [_best(top, self._top) for top in tops]
        if self._start >= 0 and (positions := choice.get("prompt_logprobs")):
            later = [{int(token): e["logprob"] for token, e in p.items()} for p in positions[self._start + 1 :]]
            tokens = prompt_ids[self._start :]
            values = [None, *(position[token] for position, token in zip(later, tokens[1:], strict=True))]
            meta["input_token_logprobs"] = [(value, token, None) for value, token in zip(values, tokens, strict=True)]
            if self._top:
                meta["input_top_logprobs"] = [None, *(_best(position, self._top) for position in later)]
        return meta


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """Return vLLM's sampling fields."""
    refused = {
        "stop_regex": params.stop_regex,
        "logprobs_mode": params.logprobs_mode != "default",
        "max_new_tokens=0": params.max_new_tokens == 0,
    }
    for name in (name for name, is_set in refused.items() if is_set):
        raise BadRequestError(f"sampling_params.{name} cannot be expressed to a vLLM server.")
    grammars = {
        "json": params.json_schema,
        "regex": params.regex,
        "grammar": params.ebnf,
        "structural_tag": params.structural_tag,
    }
    fields: dict[str, Any] = {
        "max_tokens": params.max_new_tokens,
        "min_tokens": params.min_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": 0 if params.top_k == TOP_K_ALL else params.top_k,
        "min_p": params.min_p,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "repetition_penalty": params.repetition_penalty,
        "stop": params.stop or [],
        "stop_token_ids": [] if params.ignore_eos else params.stop_token_ids or [],
        "n": params.n,
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": params.skip_special_tokens,
        "spaces_between_special_tokens": params.spaces_between_special_tokens,
        "include_stop_str_in_output": params.no_stop_trim,
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words or [],
        "seed": params.sampling_seed,
        "structured_outputs": {name: text for name, text in grammars.items() if text} or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _salt(*parts: Any) -> str:
    """Return vLLM's `cache_salt` for the weights of a request and its namespaces.

    Requests of two weights share no page, whatever vLLM does with its cache at an update. A digest is sent, because
    vLLM 0.32 permits at most 128 characters, and neither `@`, which versions contain, nor slashes.
    """
    return hashlib.sha256(orjson.dumps(parts)).hexdigest()


def _logprobs_mode(vllms: str | None, params: SamplingParams) -> str | None:
    """Return `meta_info.logprobs_mode` for vLLM's setting, None if the setting is not known."""
    if vllms != "processed_logprobs":
        return "raw" if vllms == "raw_logprobs" else None
    return "sampling" if params.is_filtered else "default"


def _policy_logprobs(mode: str | None, params: SamplingParams) -> PolicyLogprobs:
    """Return `meta_info.policy_logprobs`: vLLM reports one log-probability, and counts no choice under masks."""
    has_grammar = any(getattr(params, name) for name in GRAMMARS)
    is_raw = mode == "raw" and params.temperature in (0.0, 1.0)
    return "same" if (mode == "default" or is_raw) and not params.edits and not has_grammar else "unknown"


def _finish_reason(reason: str | None, stop: int | str | None, ids: list[int]) -> dict[str, Any] | None:
    match reason:
        case None:
            return None
        case "stop":
            return {"type": "stop", "matched": stop if stop is not None else ids[-1] if ids else None}
        case "length":
            return {"type": "length", "length": len(ids)}
        case "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None}
        case other:
            return {"type": "abort", "message": f"vLLM ended the request: {other}", "status_code": 500}


def _best(candidates: dict[int, float], count: int) -> list[LogprobTriple]:
    best = sorted(candidates.items(), key=lambda item: -item[1])[:count]
    return [(value, token, None) for token, value in best]


def _add(so_far: dict[str, Any], choice: dict[str, Any]) -> None:
    """Add the part of a choice that an event of a stream contains."""
    so_far["text"] += choice.get("text") or ""
    so_far["token_ids"] = so_far["token_ids"] + (choice.get("token_ids") or [])
    if logprobs := choice.get("logprobs"):
        earlier = so_far["logprobs"] or {"token_logprobs": [], "top_logprobs": []}
        so_far["logprobs"] = {name: earlier[name] + (logprobs.get(name) or []) for name in earlier}
    for name in ("finish_reason", "stop_reason", "prompt_token_ids", "prompt_logprobs"):
        if choice.get(name) is not None:
            so_far[name] = choice[name]
