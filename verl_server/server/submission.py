"""`Submission`: converts a request whose prompts are tokenized into the samples for the scheduler.

The TokenizerManager calls it on its event loop, and sends the samples afterwards. All samples are checked against the
limits of the server and of the served model before the first sample is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from verl_server.errors import BadRequestError
from verl_server.grammar.source import grammar_of
from verl_server.messages.io_struct import TokenizedGenerateReq
from verl_server.messages.results import SchedulerInfo
from verl_server.sampling_params import GRAMMARS
from verl_server.server.generate_request import GenerateReqInput, ReadRequest, Samples, check_samples
from verl_server.server.request_state import ReqState, Write
from verl_server.server.slices import Slices
from verl_server.server.text.grammar_checks import CheckedGrammar
from verl_server.server.text.stop_regex import StopRegexes
from verl_server.server.text.text_tools import Ids, count_ids
from verl_server.server.text.tokenizer import ModelText
from verl_server.server.text_service import TextService
from verl_server.server_args import ServerArgs

Encode = Callable[[TokenizedGenerateReq], bytes]
"""A function that encodes a message to the scheduler.

It raises BadRequestError for values that a message cannot contain.
"""


class Submission:
    def __init__(
        self,
        server_args: ServerArgs,
        model_text: ModelText,
        scheduler_info: SchedulerInfo,
        serial: Iterator[int],
        encode: Encode,
    ) -> None:
        """Take `serial`, which yields the numbers of the messages to the scheduler."""
        self.text = TextService(server_args, model_text, scheduler_info)
        self._model_text = model_text
        self._filters_logprobs = scheduler_info.get("logprobs_after_filters", False)
        self._serial = serial
        self._encode = encode

    async def samples(
        self, read: ReadRequest, write: Write | None, session_id: str, demand: str, slices: Slices
    ) -> list[tuple[ReqState, bytes]]:
        """Return the state of each sample, and its message to the scheduler. Raise BadRequestError.

        `write` and `session_id` are those of `TokenizerManager.submit_read`. `demand` is the request's demand on the
        weight version.
        """
        text = self.text
        made: list[tuple[ReqState, bytes]] = []
        tokens = candidates = 0
        requested = read.request.expand(len(read.prompts), read.is_single, text.limits)
        for ids, samples in zip(read.prompts, requested, strict=True):
            count = count_ids(ids)
            self._check(samples, count)
            grammar = grammar_of(samples.sampling)
            checked = None if grammar is None else await text.grammars.check(grammar)
            await self._prepare_text(samples, slices)
            assert samples.sampling.max_new_tokens is not None
            tokens += count * len(samples.rids)
            candidates += samples.candidates(count, samples.sampling.max_new_tokens)
            text.limits.check_prompt_tokens(tokens)
            text.limits.check_reply(candidates)
            for k in range(len(samples.rids)):
                if made:  # a request of one sample is one slice
                    await slices.end()
                state = self._make_state(read.request, samples, k, ids, write, checked, session_id, demand)
                made.append((state, self._encode(state.req)))
        return made

    def _check(self, samples: Samples, prompt_tokens: int) -> None:
        """Check the samples of one prompt against the model, and settle what depends on the model.

        A missing `max_new_tokens` becomes as high as possible. Stop ids outside the vocabulary, which no output can
        have, are left out: clients send those of another tokenizer, and SGLang accepts them.
        """
        bounds = self.text.bounds
        check_samples(samples, prompt_tokens, bounds, has_tokenizer=self._model_text.tokenizer is not None)
        if samples.sampling.max_new_tokens is None:
            # Context, KV cache and reply limit the output.
            room = bounds.longest - prompt_tokens
            if each := samples.candidates(prompt_tokens, 1) - (prompt := samples.candidates(prompt_tokens, 0)):
                room = min(room, (self.text.limits.max_logprobs_per_request - prompt) // each)
            samples.sampling = msgspec.structs.replace(samples.sampling, max_new_tokens=max(1, room))
        stops = samples.sampling.stop_token_ids or []
        if len(known := [token for token in stops if 0 <= token < bounds.vocab_size]) < len(stops):
            samples.sampling = msgspec.structs.replace(samples.sampling, stop_token_ids=known)
        if self._filters_logprobs and samples.sampling.is_filtered and samples.sampling.logprobs_mode == "default":
            samples.sampling = msgspec.structs.replace(samples.sampling, logprobs_mode="sampling")  # what it will be

    async def _prepare_text(self, samples: Samples, slices: Slices) -> None:
        """Tokenize `bad_words` and compile `stop_regex`. Raise BadRequestError."""
        sampling, encode = samples.sampling, self._model_text.encode
        if sampling.bad_words:
            samples.bad_words_ids = bad_words_ids(sampling.bad_words, lambda word: encode(word, False))
        if sampling.stop_regex:
            for pattern in sampling.stop_regex:
                StopRegexes([pattern])  # RE2's module keeps it for the next line
                await slices.end()
            samples.stop_regexes = StopRegexes(sampling.stop_regex)

    def _make_state(
        self,
        obj: GenerateReqInput,
        samples: Samples,
        k: int,
        ids: Ids,
        write: Write | None,
        grammar: CheckedGrammar | None,
        session_id: str,
        demand: str,
    ) -> ReqState:
        """Return the state of sample `k` of a prompt."""
        model, sampling = self._model_text, samples.sampling_of(k)
        stop_ids = [] if sampling.ignore_eos else [*model.eos_token_ids, *(sampling.stop_token_ids or [])]
        decode = None
        if model.tokenizer is not None:
            decode = model.decoder(sampling.skip_special_tokens, sampling.spaces_between_special_tokens)
        # The name in scheduler messages is never used again. So late tokens of an ended request cannot reach a new
        # request whose caller chose the same rid.
        req = TokenizedGenerateReq(
            rid=f"{next(self._serial)}:{samples.rids[k]}",
            input_ids=ids if isinstance(ids, list) else [],
            packed_ids=ids if isinstance(ids, bytes) else b"",
            sampling=sampling,
            stop_ids=stop_ids,
            return_logprob=samples.return_logprob,
            logprob_start_len=samples.logprob_start_len if samples.return_logprob else -1,
            top_logprobs_num=samples.top_logprobs_num if samples.return_logprob else 0,
            token_ids_logprob=samples.token_ids_logprob if samples.return_logprob else None,
            sampling_mask_num=min(samples.sampling_mask_num, self.text.bounds.vocab_size),
            bad_words_ids=samples.bad_words_ids,
            namespace=samples.namespace,
            priority=obj.priority or 0,
            session_id=samples.session_id or session_id,
            weight_demand=demand,
        )
        if grammar is not None:
            req.sampling = msgspec.structs.replace(sampling, **dict.fromkeys(GRAMMARS))
            req.grammar, req.grammar_bytes = grammar.translation, grammar.compiled_bytes
        return ReqState(
            samples.rids[k],
            req,
            decode,
            stream=obj.stream,
            logprob_text=obj.return_text_in_logprobs,
            return_prompt_token_ids=obj.return_prompt_token_ids,
            columnar=obj.columnar,
            stop_regexes=samples.stop_regexes,
            support_logprobs=samples.sampling_logprobs_mode == "support",
            write=write,
        )


def bad_words_ids(words: Sequence[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Return the token sequences of `SamplingParams.bad_words`. `encode` adds no special tokens. Raise BadRequestError
    for a word without tokens.

    A word is tokenized with and without a leading space, because tokenizers have other tokens for a word inside a text.
    The second form counts if it differs in its first token and has the same number of tokens: otherwise its first token
    is a space, and its last tokens are those of the first form. Source: vLLM's `bad_words`.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain, spaced = encode(word.lstrip()), encode(" " + word.lstrip())
        if not plain:
            raise BadRequestError(f"sampling_params.bad_words has a word without tokens: {word!r:.100}.")
        found[tuple(plain)] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found[tuple(spaced)] = None
    return [list(ids) for ids in found]
