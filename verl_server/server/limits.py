"""`Limits`: the limits of one request, from the server's settings. Every refusal names the setting.

The TokenizerManager and the text workers check a request before they do any work that grows with the request.
"""

from __future__ import annotations

import msgspec

from verl_server.errors import BadRequestError
from verl_server.sampling_params import GRAMMARS, TOP_K_ALL, SamplingParams
from verl_server.server.session_hints import LONGEST_ID
from verl_server.server_args import ServerArgs

_LEAST_TEXT_LENGTH = 4 * 2**20
"""Smallest default of `max_text_length`, in characters."""
_CHARACTERS_PER_TOKEN = 8
"""Characters for each token of the context.

A token has fewer on average, so the default accepts every text that fits.
"""
_MAX_RID_LENGTH = 1024
"""Largest length of a request id in characters. Every frame of a stream repeats the id."""
_MAX_NAMESPACE_LENGTH = 1024
"""Largest length of `extra_key` and of `cache_salt` in characters. Every message of a sample contains them."""


class Limits(msgspec.Struct, kw_only=True, frozen=True):
    """Limits of one request. The fields are settings of `ServerArgs`, which describes them.

    Each `check_` method raises BadRequestError if a limit is exceeded.
    """

    max_text_length: int
    max_samples_per_request: int
    max_prompt_tokens_per_request: int
    max_top_logprobs: int
    max_token_ids_logprob: int
    max_logprobs_per_request: int
    max_stop_strings: int
    max_stop_length: int
    max_stop_token_ids: int
    max_logit_bias: int
    max_allowed_token_ids: int
    max_bad_words: int
    max_bad_words_length: int
    max_grammar_length: int

    @classmethod
    def of(cls, server_args: ServerArgs, context_length: int) -> Limits:
        """Return the limits of a server. The default of `max_text_length` grows with `context_length` (tokens)."""
        given = {name: getattr(server_args, name) for name in cls.__struct_fields__}
        if given["max_text_length"] is None:
            given["max_text_length"] = max(_LEAST_TEXT_LENGTH, _CHARACTERS_PER_TOKEN * context_length)
        return cls(**given)

    def check_text(self, length: int, what: str) -> None:
        self._check("max_text_length", f"The request has {{}} {what}", length)

    def check_samples(self, prompts: int, n: int) -> None:
        what = f"{prompts} prompt(s) with n={n} are {{}} samples"
        self._check("max_samples_per_request", what, prompts * n)

    def check_prompt_tokens(self, tokens: int) -> None:
        self._check("max_prompt_tokens_per_request", "The prompts of all samples have {} tokens", tokens)

    def check_rid(self, rid: str) -> None:
        if len(rid) > _MAX_RID_LENGTH:
            raise BadRequestError(f"rid has {len(rid)} characters; this server accepts at most {_MAX_RID_LENGTH}.")

    def check_namespace(self, name: str, part: str) -> None:
        if len(part) > _MAX_NAMESPACE_LENGTH:
            raise BadRequestError(
                f"{name} has {len(part)} characters; this server accepts at most {_MAX_NAMESPACE_LENGTH}."
            )

    def check_session_id(self, name: str, session_id: str) -> None:
        if len(session_id) > LONGEST_ID:
            raise BadRequestError(f"{name} has {len(session_id)} characters; this server accepts at most {LONGEST_ID}.")

    def check_sampling(self, sampling: SamplingParams) -> None:
        stop = [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop or []
        self._check("max_stop_strings", "sampling_params.stop has {} strings", len(stop))
        longest = max(map(len, stop), default=0)
        self._check("max_stop_length", "sampling_params.stop has a string of {} characters", longest)
        ids = len(sampling.stop_token_ids or ())
        self._check("max_stop_token_ids", "sampling_params.stop_token_ids has {} entries", ids)
        for name in GRAMMARS:
            length = len(getattr(sampling, name) or "")
            self._check("max_grammar_length", f"sampling_params.{name} has {{}} characters", length)
        self._check("max_logit_bias", "sampling_params.logit_bias has {} entries", len(sampling.logit_bias or ()))
        allowed = len(sampling.allowed_token_ids or ())
        self._check("max_allowed_token_ids", "sampling_params.allowed_token_ids has {} entries", allowed)
        words = sampling.bad_words or ()
        self._check("max_bad_words", "sampling_params.bad_words has {} words", len(words))
        self._check("max_bad_words_length", "sampling_params.bad_words has {} characters", sum(map(len, words)))

    def check_candidates(self, top_logprobs: int, token_ids: list[int] | None) -> None:
        """Check the number of candidates at one position, which are returned beside the sampled token."""
        self._check("max_top_logprobs", "top_logprobs_num is {}", top_logprobs)
        self._check("max_token_ids_logprob", "token_ids_logprob has {} entries", len(token_ids or ()))

    def check_sampling_mask(self, top_k: int) -> None:
        if top_k > max(self.max_top_logprobs, 1):
            given = "sampling_params.top_k is not set" if top_k >= TOP_K_ALL else f"sampling_params.top_k is {top_k}"
            raise BadRequestError(
                f"return_sampling_mask needs greedy sampling or top_k of at most {self.max_top_logprobs} (setting "
                f"max_top_logprobs), but {given}."
            )

    def check_reply(self, candidates: int) -> None:
        what = "The reply may have {} log-probabilities of candidates (candidates for each position, times positions)"
        self._check("max_logprobs_per_request", what, candidates)

    def _check(self, setting: str, what: str, count: int) -> None:
        if count > (most := getattr(self, setting)):
            raise BadRequestError(f"{what.format(count)}; this server accepts at most {most} (setting {setting}).")
