"""`GenerateReqInput`: a request to `/generate` or `Engine.generate`, and its conversion into samples.

`parse` decodes like every dialect (`json_convert`): null means the default, and a boolean is not an integer. A field of
SGLang that is not implemented is refused if it is set. `read_generate` parses a body and tokenizes the prompts, on the
event loop or in a text worker. `expand` returns the `Samples` of each prompt to the TokenizerManager.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from verl_server.errors import BadRequestError
from verl_server.messages.io_struct import PROMPT_HEADER
from verl_server.sampling_params import SamplingParams
from verl_server.server.generate_fields import UNSUPPORTED_FIELDS
from verl_server.server.limits import Limits
from verl_server.server.session_hints import hint_id
from verl_server.server.text.stop_regex import StopRegexes
from verl_server.server.text.text_tools import Ids, Job, ModelBounds, TextTools
from verl_server.version_demand import read_demand
from verl_server.web.json_body import given_fields, names_of_unknown, parse_json
from verl_server.web.json_convert import read_struct

SamplingLogprobsMode = Literal["selected", "support"]

_UNSET: tuple[Any, ...] = (None, False, 0, "", [], {})


class SessionParams(msgspec.Struct, frozen=True):
    """SGLang's `session_params`: the prompt continues a request of a session, which the owner's key opened."""

    id: str
    """The session, from `/open_session` or `POST /sessions`."""
    rid: str | None = None
    """`meta_info.id` of the request that is continued.

    Null: in a session that was opened with `streaming`, the last request is continued; in other sessions, the prompt is
    the whole prompt.
    """
    offset: int = 0
    """If positive: the number of tokens of that request (prompt and output) that are kept.

    If negative: the number of tokens at the end that are dropped. 0 keeps all of them.
    """
    replace: bool = False
    """Without effect: the earlier continuation stays in the record as a branch of its own."""
    drop_previous_output: bool = False
    """Keep the prompt of that request, and not its output."""


class GenerateReqInput(msgspec.Struct, kw_only=True):
    """Body of `POST /generate`, with SGLang's names and defaults.

    Where a field is one value or a list of such values, the list has one entry for each prompt.
    """

    text: str | list[str] | None = None
    """The prompt as text. Set exactly one of `text` and `input_ids`."""
    input_ids: list[int | list[int]] | None = None
    """The prompt as token ids. With the header `X-Verl-Prompt-Bytes`, they are int32 before the JSON instead."""
    prompt_lengths: list[int] | None = None
    """With the header `X-Verl-Prompt-Bytes`, the number of token ids of each prompt of a batch. Refused without it."""
    sampling_params: Any = None
    """The fields of `SamplingParams`, or a list of such objects."""
    rid: str | list[str] | None = None
    """Name of the request for `/abort_request`. Default: a random name."""
    stream: bool = False
    """Send server-sent events. Each event contains the whole result so far or, with the server's setting
    `incremental_streaming_output`, only what is new."""
    return_logprob: bool | list[bool] = False
    """Return the log-probability of every output token."""
    logprob_start_len: int | list[int] = -1
    """First prompt position whose log-probability is returned. -1: none of the prompt is returned."""
    top_logprobs_num: int | list[int] = 0
    """Number of most likely candidates that are returned for each position."""
    token_ids_logprob: list[int | list[int] | None] | None = None
    """Token ids whose log-probabilities are returned for each position."""
    return_sampling_mask: bool | list[bool] = False
    """Return all tokens that each output token was drawn from, as `meta_info.output_token_sampling_mask`. Needs greedy
    sampling or a `top_k` of at most the setting `max_top_logprobs`."""
    sampling_logprobs_mode: SamplingLogprobsMode | list[SamplingLogprobsMode | None] | None = None
    """With `return_sampling_mask`, the log-probabilities in `meta_info.output_token_sampling_logprobs`: of the sampled
    tokens ("selected", the default) or of all tokens that could be drawn ("support")."""
    return_text_in_logprobs: bool = False
    """Return the text of the token as the third entry of each [log-probability, token id, text]."""
    return_prompt_token_ids: bool = False
    """Return the token ids of the prompt as `prompt_token_ids`."""
    extra_key: str | list[str | None] | None = None
    """Namespace of the prefix cache. A request shares the KV cache only with requests of the same `extra_key` and
    `cache_salt`."""
    cache_salt: str | list[str | None] | None = None
    """A second part of the namespace of the prefix cache."""
    priority: int | None = None
    """Requests of a larger priority leave the waiting queue first. Null counts as 0. A running request is never
    interrupted. A request of low priority may wait for as long as requests of higher priority keep the server full."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many tokens at the end of each prompt. -1: as many as the model can serve together with
    `max_new_tokens`."""
    session_id: str | list[str | None] | None = None
    """Session of the request, at most 128 characters: a hint for the prefix cache, which changes no output. Requests
    with the same id are the turns of one conversation. It precedes the header `X-Session-ID`. In a recorded session it
    has no effect. `/close_session` ends it. Not with `session_params`."""
    conversation_id: str | list[str | None] | None = None
    """The same as `session_id`, for prompts without one."""
    session_params: SessionParams | None = None
    """Continue a request of a session with the tokens of this prompt. The session records them."""
    min_weight_version: str | None = None
    """Sample every token with this weight version, NUMBER@INCARNATION, or a later one of its incarnation. 409 if the
    server does not serve one. It precedes the header `X-Verl-Min-Weight-Version`, which precedes the session's
    default."""
    exact_weight_version: str | None = None
    """Sample every token with the weights of this label, or answer 409. If another version comes while the request
    runs, the output ends there. Not with `min_weight_version`. Its header is `X-Verl-Exact-Weight-Version`."""
    columnar: bool = False
    """Return token ids and log-probabilities as arrays (`verl_server.messages.columns`). SGLang ignores this field."""

    @classmethod
    def parse(cls, body: Any) -> GenerateReqInput:
        """Decode a JSON-like object. Raise BadRequestError. `unknown_fields` lists the keys that are no fields."""
        given = given_fields(body)
        for name, remedy in UNSUPPORTED_FIELDS.items():
            if name in given and not _is_unset(given[name]):
                raise BadRequestError(f"Field `{name}` is not supported: {remedy}.")
        request = read_struct(given, cls)
        if request.session_id and request.session_params is not None:
            raise BadRequestError(
                "session_id and session_params cannot both be set. session_params names a recorded session; leave "
                "session_id out."
            )
        read_demand(request.min_weight_version, request.exact_weight_version)
        return request

    @property
    def weight_demand(self) -> str:
        """The demand on the weight version (`version_demand`), or "" if the body states none. Raise BadRequestError."""
        return read_demand(self.min_weight_version, self.exact_weight_version)

    @property
    def is_single(self) -> bool:
        """True if the request has one prompt, and not a list of prompts."""
        if self.text is not None:
            return isinstance(self.text, str)
        return not (self.input_ids and isinstance(self.input_ids[0], list))

    def expand(self, count: int, is_single: bool, limits: Limits) -> Iterator[Samples]:
        """Return an iterator over the samples of each of `count` prompts.

        The caller may do other work between two prompts. Fields that concern all prompts are checked before this
        function returns, the other fields during the iteration. Both raise BadRequestError.
        """
        params = self._sampling_params(count)
        n = params[0].n
        limits.check_samples(count, n)
        flags = _per_prompt("return_logprob", self.return_logprob, count, n)
        starts = _per_prompt("logprob_start_len", self.logprob_start_len, count, n)
        tops = _per_prompt("top_logprobs_num", self.top_logprobs_num, count, n)
        wanted = self._token_ids_logprob(count, n)
        rids = self._rids(count, n, is_single, limits)
        namespaces = self._namespaces(count, limits)
        sessions = self._session_ids(count, limits)
        masks = _per_prompt("return_sampling_mask", self.return_sampling_mask, count, n)
        mask_modes = _per_prompt("sampling_logprobs_mode", self.sampling_logprobs_mode, count, n)
        if self.columnar and any(masks):
            raise BadRequestError("columnar replies hold no sampling masks: leave return_sampling_mask unset.")
        _check_int64("priority", self.priority)
        if self.columnar and self.return_text_in_logprobs:
            raise BadRequestError("columnar replies hold no text of tokens: leave return_text_in_logprobs unset.")
        return (
            _checked_samples(
                limits,
                n,
                rids=rids[i * n : (i + 1) * n] if rids else [uuid.uuid4().hex for _ in range(n)],
                sampling=params[i],
                return_logprob=flags[i],
                logprob_start_len=starts[i],
                top_logprobs_num=tops[i],
                token_ids_logprob=wanted[i],
                namespace=namespaces[i],
                session_id=sessions[i],
                return_sampling_mask=masks[i],
                sampling_logprobs_mode=mask_modes[i],
            )
            for i in range(count)
        )

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts: either texts or lists of token ids. Raise BadRequestError if there is none."""
        if self.prompt_lengths is not None:
            raise BadRequestError(
                f"prompt_lengths needs the header {PROMPT_HEADER}, and the token ids before the JSON. Otherwise, send "
                "input_ids instead."
            )
        if (self.text is None) == (self.input_ids is None):
            given = "Both were given" if self.text is not None else "Neither was given"
            raise BadRequestError(f"Either text, input_ids or input_embeds should be provided. {given}.")
        if self.text is not None:
            texts: list[str | list[int]] = [self.text] if isinstance(self.text, str) else list(self.text)
            if not texts:
                raise BadRequestError("text cannot be an empty list.")
            return texts
        ids = self.input_ids
        if not ids or ids == [[]]:
            raise BadRequestError("input_ids cannot be empty.")
        kinds = set(map(type, ids))  # a loop in C, because a prompt may be long
        if kinds == {int}:
            return [ids]  # type: ignore[list-item]
        if kinds != {list}:
            raise BadRequestError("input_ids mixes token ids and lists: send one list of ids, or a list of such lists.")
        nested: list[list[int]] = ids  # type: ignore[assignment]
        for i, prompt in enumerate(nested):
            if not prompt:
                raise BadRequestError(f"input_ids cannot be empty, but prompt {i} of the batch is.")
        return list(nested)

    def stop_regex(self) -> list[str]:
        """Return the patterns of all prompts, before they are checked."""
        raw = self.sampling_params if isinstance(self.sampling_params, list) else [self.sampling_params]
        given = [p.get("stop_regex") if isinstance(p, dict) else getattr(p, "stop_regex", None) for p in raw]
        patterns = [p for one in given for p in (one if isinstance(one, list) else [one])]
        return [pattern for pattern in patterns if isinstance(pattern, str)]

    def _sampling_params(self, count: int) -> list[Any]:
        """Return the sampling parameters of each prompt. Only the first entry is certain to be parsed."""
        raw = self.sampling_params
        if not isinstance(raw, list):
            return [SamplingParams.parse(raw)] * count
        if len(raw) != count:
            raise BadRequestError(f"sampling_params has {len(raw)} entries for {count} prompt(s).")
        return [SamplingParams.parse(raw[0]), *raw[1:]]

    def _token_ids_logprob(self, count: int, n: int) -> list[list[int] | None]:
        raw = self.token_ids_logprob
        if raw is None:
            return [None] * count
        if all(isinstance(x, int) for x in raw):
            return [raw] * count  # type: ignore[list-item]
        if any(isinstance(x, int) for x in raw):
            raise BadRequestError("token_ids_logprob mixes token ids and lists.")
        return _per_prompt("token_ids_logprob", raw, count, n)  # type: ignore[arg-type]

    def _namespaces(self, count: int, limits: Limits) -> list[str]:
        """Return the namespace of the prefix cache of each prompt: `extra_key` and `cache_salt`, joined."""
        parts = []
        for name in ("extra_key", "cache_salt"):
            keys = _entries(name, getattr(self, name), count)
            for key in keys:
                limits.check_namespace(name, key or "")
            parts.append(keys)
        return [_namespace(extra_key or "", salt or "") for extra_key, salt in zip(*parts, strict=True)]

    def _session_ids(self, count: int, limits: Limits) -> list[str]:
        """Return the scheduler's id of the session that each prompt names, or ""."""
        named: list[str | None] = [None] * count
        for name in ("session_id", "conversation_id"):
            ids = _entries(name, getattr(self, name), count)
            for one in ids:
                limits.check_session_id(name, one or "")
            named = [first or later for first, later in zip(named, ids, strict=True)]
        return [hint_id(one) for one in named]

    def kept_tokens(self, count: int, bounds: ModelBounds) -> list[int | None]:
        """Return how many tokens at the end of each of `count` prompts are kept; None keeps all."""
        keep = self.truncate_prompt_tokens
        if keep is None or keep >= 1:
            return [keep] * count
        if keep != -1:
            raise BadRequestError(f"truncate_prompt_tokens must be -1 or at least 1, not {keep}.")
        params = [p if isinstance(p, SamplingParams) else SamplingParams.parse(p) for p in self._sampling_params(count)]
        return [bounds.room_for_prompt(p.max_new_tokens) for p in params]

    def _rids(self, count: int, n: int, is_single: bool, limits: Limits) -> list[str]:
        """Return the request ids of all samples, or [] if the caller chose none."""
        rid = self.rid
        if rid is None or rid == "":
            return []
        for one in [rid] if isinstance(rid, str) else rid:
            limits.check_rid(one)
        if isinstance(rid, str):
            return [rid] if is_single and n == 1 else [f"{rid}_{i}" for i in range(count * n)]
        if len(rid) != count:
            raise BadRequestError(f"rid has {len(rid)} entries for {count} prompt(s).")
        rids = list(rid) if n == 1 else [f"{one}_{k}" for one in rid for k in range(n)]
        if len(set(rids)) != len(rids):
            twice = [name for name, times in Counter(rids).items() if times > 1]
            shown = f"{twice[:8]}" + (f" and {len(twice) - 8} more" if len(twice) > 8 else "")
            raise BadRequestError(f"Duplicate request IDs detected within the request: {shown}")
        return rids


@dataclass(slots=True)
class Samples:
    """The completions of one prompt, named by `rids`. They share all other settings, except for the seed."""

    rids: list[str]
    sampling: SamplingParams
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: list[int] | None
    namespace: str
    """Namespace of the prefix cache."""
    session_id: str
    """The scheduler's id of the session that the request names; "" if it names none."""
    return_sampling_mask: bool
    sampling_logprobs_mode: SamplingLogprobsMode | None
    bad_words_ids: list[list[int]] = field(default_factory=list)
    """Token sequences of `sampling.bad_words`. The TokenizerManager sets them, and `stop_regexes`."""
    stop_regexes: StopRegexes | None = None
    """The compiled `sampling.stop_regex`."""

    def sampling_of(self, k: int) -> SamplingParams:
        """Return the settings of sample `k`.

        The seed of sample `k` is `sampling_seed + k`, so that n seeded samples differ and can be repeated.
        """
        copy = msgspec.structs.replace(self.sampling, n=1)
        if copy.sampling_seed is not None and k:
            copy.sampling_seed = (copy.sampling_seed + k + 2**63) % 2**64 - 2**63  # stays a 64-bit integer
        return copy

    def candidates(self, prompt_tokens: int, new_tokens: int) -> int:
        """Return the number of candidates' log-probabilities in the reply, over all samples."""
        masks = len(self.rids) * new_tokens * self.sampling_mask_num
        if not self.return_logprob:
            return masks
        start = self.logprob_start_len
        positions = new_tokens + (prompt_tokens - start if start >= 0 else 0)
        return masks + len(self.rids) * positions * (self.top_logprobs_num + len(self.token_ids_logprob or ()))

    @property
    def sampling_mask_num(self) -> int:
        """The most tokens of a sampling mask, or 0 if no mask is returned.

        They are the `top_k` tokens, and as many tokens again that are as likely as the last of the `top_k`.
        """
        return 2 * self.sampling.top_k if self.return_sampling_mask else 0


class ReadRequest(msgspec.Struct, kw_only=True):
    """A request whose prompts are tokenized and checked against the model."""

    request: GenerateReqInput
    """The request without `text` and `input_ids`."""
    prompts: list[Ids]
    is_single: bool
    """True if the request has one prompt, and not a list of prompts."""
    unknown_fields: list[str] = []
    """Names of unknown fields of the body."""


def read_generate(tools: TextTools, body: bytes) -> ReadRequest:
    """Parse the body of a `/generate` request and tokenize the prompts. Raise BadRequestError or NeedsWorkerError."""
    raw = parse_json(body)
    request = GenerateReqInput.parse(raw)
    patterns = request.stop_regex()
    tools.check_regex_place(patterns)
    read = read_prompts(tools, request)
    for pattern in patterns:
        StopRegexes([pattern])
    read.unknown_fields = names_of_unknown(raw, request)
    return read


def read_prompts(tools: TextTools, request: GenerateReqInput) -> ReadRequest:
    """Tokenize the prompts of `request`. Raise BadRequestError or NeedsWorkerError."""
    given = request.prompts()
    if tools.in_worker:  # refuse a wrong request here, instead of sending it back to the parent
        for _ in request.expand(len(given), request.is_single, tools.limits):
            pass
    tools.limits.check_samples(len(given), 1)
    return ReadRequest(
        request=msgspec.structs.replace(request, text=None, input_ids=None),
        prompts=tools.prompts(given, request.kept_tokens(len(given), tools.bounds)),
        is_single=request.is_single,
    )


GENERATE = Job("generate", read_generate, ReadRequest)


def check_samples(samples: Samples, prompt_tokens: int, bounds: ModelBounds, has_tokenizer: bool) -> None:
    """Check the options of one prompt's samples against the served model.

    Raise BadRequestError for a wrong option, and ContextLengthError if prompt and output are longer than the context.
    """
    count = prompt_tokens
    bounds.check_length(count, samples.sampling.max_new_tokens or 0)
    bounds.check_ids("sampling_params.allowed_token_ids", samples.sampling.allowed_token_ids)
    bounds.check_ids("sampling_params.logit_bias", [int(token) for token in samples.sampling.logit_bias or ()])
    bounds.check_ids("token_ids_logprob", samples.token_ids_logprob)
    for name, remedy in (("stop", "stop_token_ids"), ("stop_regex", "stop_token_ids"), ("bad_words", "logit_bias")):
        if getattr(samples.sampling, name) and not has_tokenizer:
            raise BadRequestError(f"`{name}` needs a tokenizer: use {remedy} on a skip_tokenizer_init server.")
    start = samples.logprob_start_len
    if start < -1 or start > count:
        raise BadRequestError(f"logprob_start_len must be -1 or in 0..{count} (the prompt's length), not {start}.")
    if not 0 <= samples.top_logprobs_num <= bounds.vocab_size:
        raise BadRequestError(f"top_logprobs_num must be in 0..{bounds.vocab_size}, not {samples.top_logprobs_num}.")


def _entries(name: str, value: Any, count: int) -> list[Any]:
    """Return the entry of each prompt: `value`, or the entries of `value` if it is a list."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise BadRequestError(f"{name} has {len(value)} entries for {count} prompt(s).")
    return value


def _namespace(extra_key: str, cache_salt: str) -> str:
    """Join both parts, with the length of the first part in front, so that different pairs give different texts."""
    return f"{len(extra_key)}:{extra_key}{cache_salt}" if extra_key or cache_salt else ""


def _check_int64(name: str, value: int | None) -> None:
    if value is not None and not -(2**63) <= value < 2**63:
        raise BadRequestError(f"{name} must be a 64-bit integer, not {value}.")


def _is_unset(value: Any) -> bool:
    return value in _UNSET or (isinstance(value, list) and all(x is None for x in value))


def _per_prompt(name: str, value: Any, count: int, n: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if n > 1:
        raise BadRequestError(f"{name} must not be a list when sampling_params.n > 1.")
    return _entries(name, value, count)


def _checked_samples(limits: Limits, n: int, sampling: Any, **fields: Any) -> Samples:
    """Return `Samples` that are within the limits. `sampling` is a `SamplingParams`, or its unparsed form."""
    params = sampling if isinstance(sampling, SamplingParams) else SamplingParams.parse(sampling)
    if params.n != n:
        raise BadRequestError("sampling_params.n must be the same for all prompts of a batch.")
    limits.check_sampling(params)
    samples = Samples(sampling=params, **fields)
    limits.check_candidates(samples.top_logprobs_num, samples.token_ids_logprob)
    if samples.return_sampling_mask:
        limits.check_sampling_mask(params.top_k)
    elif samples.sampling_logprobs_mode is not None:
        raise BadRequestError("sampling_logprobs_mode needs return_sampling_mask=true.")
    return samples
