"""`SamplingParams`: the sampling settings of one request, with SGLang's names, defaults and limits.

`SamplingParams.parse` decodes a dict or JSON object. An unknown key, a wrong type or a value out of range raises a
`BadRequestError` that names the key. A key of SGLang that we do not implement also raises if it is set. The
scheduler receives the settings inside `TokenizedGenerateReq`.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from verl_server import lora
from verl_server.errors import BadRequestError
from verl_server.web.json_convert import convert_json

TOP_K_ALL = 1 << 30
"""`top_k` value that keeps the whole vocabulary."""

LogprobsMode = Literal["default", "raw", "sampling"]
"""The distribution of the log-probabilities of output tokens; see `SamplingParams.logprobs_mode`."""

PolicyLogprobs = Literal["same", "given", "unknown"]
"""The policy's log-probability of an output token is log-softmax(model's logits / temperature), which a trainer
computes. "same": it is the reported log-probability. "given": it is returned beside the reported log-probability, which
is of edited logits. "unknown": the reported log-probability is of edited logits, and the policy's was not computed."""

EDITS = (
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
    *("min_new_tokens", "allowed_token_ids", "bad_words"),
)
"""Fields that edit the model's logits before a token is drawn. A grammar edits them, too."""
FILTERS = ("top_p", "top_k", "min_p")
"""Fields that remove tokens from the distribution, whose log-probabilities are those before the removal by default."""

_GREEDY_BELOW = 1e-6
_INT_BOUND = 1 << 31
_MOST_STOP_REGEX, _MOST_STOP_REGEX_BYTES = 32, 256
"""Most `stop_regex` patterns, and most bytes of one. Source: SGLang."""
UNSUPPORTED_PARAMS = {
    "beam_width": "use `n` independent samples",
    "custom_params": "custom logit processors are not implemented",
    "watermark": "watermarks are not implemented",
    "choice": "use `regex`, or `json_schema` with an enum",
    **lora.REQUEST_FIELDS,
}
"""SGLang's sampling parameters that are refused if they are set, each with what to do instead."""
HARMLESS_PARAMS: dict[str, tuple[Any, ...]] = {"beam_width": (1,)}
"""Values of them that are accepted, because they request what happens in any case."""

GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
"""Fields that hold a grammar for constrained decoding."""


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling settings of one request. Source: SGLang's `sampling_params` (v0.5.23)."""

    max_new_tokens: int | None = 128
    """Largest number of output tokens. 0 only prefills; None generates until the context is full."""
    min_new_tokens: int = 0
    """EOS and `stop_token_ids` cannot be sampled before this many output tokens."""
    stop_after_min_new_tokens: bool = False
    """Stop strings and patterns that end within the first `min_new_tokens` tokens do not count, as in vLLM. In SGLang
    they end the output."""
    temperature: float = 1.0
    """Divisor of the logits. 0 always takes the most likely token (greedy)."""
    top_p: float = 1.0
    """Sample from the most likely tokens whose total probability reaches this, in (0, 1]."""
    top_k: int = TOP_K_ALL
    """Sample from this many of the most likely tokens. -1 keeps the whole vocabulary."""
    min_p: float = 0.0
    """Sample from tokens that are at least this many times as likely as the most likely one, in [0, 1]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that it is in the output, in [-2, 2]."""
    presence_penalty: float = 0.0
    """Subtracted from a token's logit once if it is in the output, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive logits and multiplies negative logits of tokens in prompt or output, in (0, 2]."""
    stop: str | list[str] | None = None
    """Strings that end the output."""
    stop_regex: str | list[str] | None = None
    """Regular expressions (RE2 syntax) that end the output. Matches of up to 1024 characters are found; for large
    patterns the bound is smaller."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the output, beside EOS. Ids outside the vocabulary have no effect; vLLM's own route refuses
    them."""
    n: int = 1
    """Number of samples for the prompt."""
    ignore_eos: bool = False
    """Continue after EOS and `stop_token_ids`."""
    skip_special_tokens: bool = True
    """Leave special tokens out of `text`."""
    spaces_between_special_tokens: bool = True
    """Put spaces between special tokens in `text`."""
    no_stop_trim: bool = False
    """Keep the matched stop string, the match of a stop regex or the stop token in `text`."""
    stream_interval: int | None = None
    """Tokens between two frames of a stream."""
    logit_bias: dict[str, float] | None = None
    """Token id (as a string) -> value added to its logit."""
    allowed_token_ids: list[int] | None = None
    """Only these token ids can be sampled. The name is vLLM's."""
    bad_words: list[str] | None = None
    """Words that cannot be sampled: the last token of a word is forbidden while the output ends with the other tokens
    of the word. Each word counts with and without a leading space. The name is vLLM's."""
    logprobs_mode: LogprobsMode = "default"
    """Distribution of the log-probabilities of output tokens. "default": over the allowed tokens, after penalties and
    temperature, before top-k, top-p and min-p. "raw": the model's logits at temperature 1, without penalty, bias or
    mask. "sampling": the distribution that the token was drawn from, with all filters; greedy sampling has
    log-probability 0 for its token. Log-probabilities of prompt tokens are always raw."""
    json_schema: str | None = None
    """JSON schema that the output must satisfy."""
    regex: str | None = None
    """Regular expression that the whole output must match."""
    ebnf: str | None = None
    """Grammar of the output: GBNF (`root ::= ...`) or Lark (`start: ...`)."""
    structural_tag: str | None = None
    """Constraints for parts of the output, as SGLang's and xgrammar's JSON object."""
    sampling_seed: int | None = None
    """64-bit seed. A sample is a function of (seed, position, distribution), independent of the rest of the batch."""

    @classmethod
    def parse(cls, raw: Any) -> SamplingParams:
        """Build from a dict; None counts as {}. Null values mean the default, except that `max_new_tokens` may be null.

        Raise BadRequestError that names the key and the allowed values.
        """
        if isinstance(raw, cls):
            raw.verify()
            return raw
        if raw is None:
            raw = {}
        if not isinstance(raw, dict):
            raise BadRequestError(f"sampling_params must be an object, not {type(raw).__name__}.")
        given = {key: value for key, value in raw.items() if value is not None}
        for key, remedy in UNSUPPORTED_PARAMS.items():
            if given.pop(key, "") not in ("", [], {}, False, *HARMLESS_PARAMS.get(key, ())):
                raise BadRequestError(f"sampling_params.{key} is not supported: {remedy}.")
        try:
            params = convert_json(given, cls)
        except msgspec.ValidationError as error:
            # msgspec says "Object contains unknown field `x`" or "Expected `int`, got `str` - at `$.top_k`".
            message = str(error).replace("Object contains unknown field", "unknown field").replace("$.", "")
            known = ", ".join(f"`{name}`" for name in cls.__struct_fields__)
            hint = f", expected one of {known}" if "unknown field" in message else ""
            raise BadRequestError(f"sampling_params: {message}{hint}") from None
        if "max_new_tokens" in raw and raw["max_new_tokens"] is None:
            params.max_new_tokens = None
        params.verify()
        return params

    def verify(self) -> None:
        """Check the range of every value, and normalize greedy sampling, `top_k` and `stop` in place.

        Raise BadRequestError that names the key and the allowed values.
        """
        for name in ("max_new_tokens", "min_new_tokens", "top_k", "stream_interval"):
            _check((getattr(self, name) or 0) < _INT_BOUND, name, getattr(self, name), f"below {_INT_BOUND}")
        _check(self.max_new_tokens is None or self.max_new_tokens >= 0, "max_new_tokens", self.max_new_tokens, ">= 0")
        _check(self.min_new_tokens >= 0, "min_new_tokens", self.min_new_tokens, ">= 0")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise BadRequestError(
                f"min_new_tokens ({self.min_new_tokens}) exceeds max_new_tokens ({self.max_new_tokens})."
            )
        _check(
            math.isfinite(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "finite, >= 0"
        )
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _check(self.top_k == -1 or self.top_k >= 1, "top_k", self.top_k, "-1 or >= 1")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", self.frequency_penalty, "in [-2, 2]")
        _check(-2 <= self.presence_penalty <= 2, "presence_penalty", self.presence_penalty, "in [-2, 2]")
        _check(0 < self.repetition_penalty <= 2, "repetition_penalty", self.repetition_penalty, "in (0, 2]")
        _check(self.n >= 1, "n", self.n, ">= 1")
        _check(
            self.stream_interval is None or self.stream_interval >= 1, "stream_interval", self.stream_interval, ">= 1"
        )
        if self.sampling_seed is not None:
            _check(-(2**63) <= self.sampling_seed < 2**63, "sampling_seed", self.sampling_seed, "a 64-bit integer")
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.stop:
            _check(all(self.stop), "stop", self.stop, "non-empty strings")
            _check(all(_is_utf8(text) for text in self.stop), "stop", "a lone surrogate", "valid Unicode")
        self._verify_stop_regex()
        _check(self.allowed_token_ids != [], "allowed_token_ids", [], "null or at least one token id")
        for word in self.bad_words or []:
            _check(bool(word.strip()), "bad_words", word, "words that are not empty")
            _check(_is_utf8(word), "bad_words", "a lone surrogate", "valid Unicode")
        for token, bias in (self.logit_bias or {}).items():
            # int() raises an error of its own for very long numbers, so the length is limited.
            _check(token.isascii() and token.isdigit() and len(token) < 20, "logit_bias", token, "token ids as keys")
            _check(math.isfinite(bias), "logit_bias", bias, "finite values")
        for name in GRAMMARS:
            if not getattr(self, name):
                setattr(self, name, None)  # SGLang's clients send ""
        grammars = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(grammars) > 1:
            raise BadRequestError(f"sampling_params has {' and '.join(grammars)}: set at most one of them.")
        for name in grammars:
            _check(_is_utf8(getattr(self, name)), name, "a lone surrogate", "valid Unicode")
        if self.temperature < _GREEDY_BELOW:
            self.temperature, self.top_k = 0.0, 1
        if self.top_k == -1:
            self.top_k = TOP_K_ALL

    def _verify_stop_regex(self) -> None:
        """Check number and length of the patterns. `server.stop_regex` compiles them where the text is."""
        if isinstance(self.stop_regex, str):
            self.stop_regex = [self.stop_regex]
        patterns = self.stop_regex or []
        most, longest = _MOST_STOP_REGEX, _MOST_STOP_REGEX_BYTES
        _check(len(patterns) <= most, "stop_regex", f"{len(patterns)} patterns", f"at most {most} patterns")
        for pattern in patterns:
            _check(bool(pattern), "stop_regex", pattern, "patterns that are not empty")
            _check(_is_utf8(pattern), "stop_regex", "a lone surrogate", "valid Unicode")
            length = len(pattern.encode())
            _check(length <= longest, "stop_regex", f"a pattern of {length} bytes", f"at most {longest} bytes each")

    def verify_vocab(self, vocab_size: int) -> None:
        """Raise BadRequestError if a token id is outside the vocabulary: it would be an invalid index on the device."""
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if ids:  # min and max are loops in C, because there may be thousands of ids
                worst = min(ids) if min(ids) < 0 else max(ids)
                _check(0 <= worst < vocab_size, name, worst, f"a token id in 0..{vocab_size - 1}")
        for key in self.logit_bias or {}:
            _check(int(key) < vocab_size, "logit_bias", key, f"a token id in 0..{vocab_size - 1}")

    @property
    def is_filtered(self) -> bool:
        """True if tokens are drawn from a part of the vocabulary: with top-k, top-p or min-p."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k != TOP_K_ALL or self.min_p > 0)

    @property
    def edits(self) -> list[str]:
        """The `EDITS` that are set."""
        return [name for name in EDITS if getattr(self, name) and getattr(self, name) != _UNEDITED[name]]

    @property
    def reports_policy(self) -> bool:
        """True if the reported log-probabilities are the policy's, unless a grammar edits the logits."""
        mode = self.logprobs_mode
        if mode == "raw" and self.temperature not in (0.0, 1.0):
            return False
        return not (mode == "sampling" and (self.is_filtered or self.is_greedy)) and not self.edits

    @property
    def is_greedy(self) -> bool:
        """True if every step takes the most likely token."""
        return self.top_k == 1


_UNEDITED = {name: getattr(SamplingParams(), name) for name in EDITS}


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise BadRequestError(f"sampling_params.{name} must be {rule}, not {value!r:.100}.")
