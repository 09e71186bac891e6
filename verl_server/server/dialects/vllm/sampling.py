"""The `sampling_params` of vLLM, and their conversion into SGLang's, which the rest of the server uses."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from verl_server import lora
from verl_server.errors import BadRequestError
from verl_server.web.json_body import names_of_unknown
from verl_server.web.json_convert import read_struct

_NO_INTERNALS = "this server returns tokens and log-probabilities only"

SAMPLING_REFUSED = {
    **lora.REQUEST_FIELDS,
    "prompt_logprob_token_ids": "use prompt_logprobs",
    "prompt_logprob_start": "use prompt_logprobs",
    "extra_args": "there are no custom processors of logits and no transfer of the KV cache",
    "thinking_token_budget": "use max_tokens",
    "repetition_detection": "use repetition_penalty or stop",
    "watermarking": "tokens are drawn from the model's distribution",
    "routed_experts_prompt_start": _NO_INTERNALS,
    "trace_decode_token_ids": "use logit_bias or allowed_token_ids",
    "logits_processors": "use logit_bias, allowed_token_ids or structured_outputs",
}
"""vLLM's sampling parameters that are refused if they are set, each with the reason or the alternative."""

SAMPLING_WITHOUT_EFFECT = {
    "output_kind": "`stream` decides whether the answer is sent in parts",
    "flat_logprobs": "it names a form inside vLLM; the answer is the same",
    "detokenize": "the text is computed only if `output_mode` or `stop` needs it",
    "skip_clone": "it concerns the memory of vLLM's process",
    "skip_reading_prefix_cache": "the cache holds what would be computed",
}
"""vLLM's sampling parameters that are accepted and have no effect, each with the reason."""


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's constraint on the output. Set exactly one of the fields."""

    json: str | dict[str, Any] | bool | None = None
    """JSON schema, as an object or as text. True is any JSON."""
    regex: str | None = None
    """Regular expression that the whole output matches."""
    choice: list[str] | None = None
    """Texts of which the output is one."""
    grammar: str | None = None
    """Grammar, as `ebnf` of `SamplingParams`."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Structural tag, as an object or as text."""

    def sampling_params(self) -> dict[str, str]:
        """Return the constraint under SGLang's name. Raise BadRequestError unless exactly one is set."""
        given = {name: getattr(self, name) for name in self.__struct_fields__ if getattr(self, name)}
        if len(given) != 1:
            raise BadRequestError(f"structured_outputs needs exactly one of {', '.join(self.__struct_fields__)}.")
        ((name, value),) = given.items()
        if name == "json_object":
            return {"json_schema": '{"type":"object"}'}
        if name == "choice":
            return {"ebnf": "start: " + " | ".join(orjson.dumps(text).decode() for text in value)}
        names = {"json": "json_schema", "regex": "regex", "grammar": "ebnf", "structural_tag": "structural_tag"}
        return {names[name]: value if isinstance(value, str) else orjson.dumps(value).decode()}


class VllmSamplingParams(msgspec.Struct, kw_only=True):
    """vLLM's `sampling_params`. Null means the default."""

    n: int = 1
    """Number of choices."""
    max_tokens: int | None = None
    """Largest number of output tokens. Default: as many as the context has room for."""
    min_tokens: int = 0
    """Fewest output tokens. Before this number, no EOS, stop token or stop string ends the output."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Nucleus sampling. 1: off."""
    top_k: int = 0
    """Sample from this number of most likely tokens. 0 or -1: off."""
    min_p: float = 0.0
    """Smallest probability relative to the most likely token. 0: off."""
    presence_penalty: float = 0.0
    """`presence_penalty` of `SamplingParams`."""
    frequency_penalty: float = 0.0
    """`frequency_penalty` of `SamplingParams`."""
    repetition_penalty: float = 1.0
    """`repetition_penalty` of `SamplingParams`."""
    seed: int | None = None
    """`sampling_seed` of `SamplingParams`."""
    stop: str | list[str] | None = None
    """Strings that end the output."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the output."""
    ignore_eos: bool = False
    """Continue after EOS and `stop_token_ids`."""
    include_stop_str_in_output: bool = False
    """Keep the matched stop string in the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Put spaces between special tokens in the text."""
    logprobs: int | None = None
    """Return the log-probability of each output token, and this number of most likely candidates. -1: all."""
    prompt_logprobs: int | None = None
    """Return the log-probability of each prompt token, and this number of most likely candidates. -1: all."""
    logprob_token_ids: list[int] | None = None
    """Return the log-probabilities of these token ids for each output token, in place of the most likely candidates."""
    logit_bias: dict[str, float] | None = None
    """`logit_bias` of `SamplingParams`."""
    allowed_token_ids: list[int] | None = None
    """`allowed_token_ids` of `SamplingParams`."""
    bad_words: list[str] | None = None
    """`bad_words` of `SamplingParams`."""
    structured_outputs: StructuredOutputs | None = None
    """Constraint on the output."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many tokens at the end of the prompt. -1: as many as the model can serve."""
    stream_interval: int | None = None
    """Tokens between two events of a stream."""

    @classmethod
    def known_fields(cls) -> list[str]:
        """Return the names of all fields that the object may have."""
        return [*cls.__struct_fields__, *SAMPLING_REFUSED, *SAMPLING_WITHOUT_EFFECT]

    @classmethod
    def parse(cls, raw: Any) -> tuple[VllmSamplingParams, list[str]]:
        """Return (parameters, names of unknown fields). Raise BadRequestError."""
        if raw is None:
            raw = {}
        if not isinstance(raw, dict):
            raise BadRequestError(f"sampling_params must be an object, not {type(raw).__name__}.")
        given = {key: value for key, value in raw.items() if value is not None}
        for name, remedy in SAMPLING_REFUSED.items():
            if given.get(name) not in (None, False, 0, "", [], {}):
                raise BadRequestError(f"sampling_params.{name} is not supported: {remedy}.")
        params = read_struct(given, cls, "sampling_params: ")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) < -1:
                raise BadRequestError(f"sampling_params.{name} must be null, -1 or at least 0.")
        return params, names_of_unknown(raw, params)

    def sglang_params(self) -> dict[str, Any]:
        """Return the settings under SGLang's names. Settings that are off are omitted."""
        params: dict[str, Any] = {
            "n": self.n,
            "max_new_tokens": self.max_tokens,
            "min_new_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or -1,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "spaces_between_special_tokens": self.spaces_between_special_tokens,
            "no_stop_trim": self.include_stop_str_in_output,
        }
        others = {
            "stop_after_min_new_tokens": bool(self.min_tokens) or None,
            "sampling_seed": self.seed,
            "stop": self.stop or None,
            "stop_token_ids": self.stop_token_ids or None,
            "logit_bias": self.logit_bias or None,
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words": self.bad_words or None,
            "stream_interval": self.stream_interval,
        }
        params |= {name: value for name, value in others.items() if value is not None}
        if self.structured_outputs is not None:
            params |= self.structured_outputs.sampling_params()
        return params

    def logprob_fields(self, vocab_size: int) -> dict[str, Any]:
        """Return the fields of `GenerateReqInput` that request log-probabilities."""
        output = vocab_size if self.logprobs == -1 else self.logprobs
        prompt = vocab_size if self.prompt_logprobs == -1 else self.prompt_logprobs
        if output is None and prompt is None and not self.logprob_token_ids:
            return {}
        return {
            "return_logprob": True,
            "logprob_start_len": -1 if prompt is None else 0,
            "top_logprobs_num": max(output or 0, prompt or 0),
            "token_ids_logprob": self.logprob_token_ids or None,
        }
