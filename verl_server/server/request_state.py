"""`ReqState`: one sample in progress in the TokenizerManager, and its conversion into a result object.

`extend` takes the scheduler's tokens, looks for stop strings and stop regexes, and records what `meta_info` reports. It
runs once for each token of each request, so it only appends; the result object is built when a caller reads it. A
`ReqState` is used on the TokenizerManager's event loop only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from verl_server.messages import columns
from verl_server.messages.io_struct import BatchTokenIDOut, FinishReason, TokenizedGenerateReq
from verl_server.messages.packed import ITEM, PromptLogprobs, TokenLogprobs, pack_ids, pack_logprobs
from verl_server.messages.results import LogprobTriple
from verl_server.sampling_params import PolicyLogprobs
from verl_server.server.slices import Slices
from verl_server.server.text.detokenizer import OutputText
from verl_server.server.text.stop_regex import StopRegexes
from verl_server.server.text.text_tools import Decoder, Ids, count_ids, pack, unpack

_MASK, _MASK_LOGPROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"
Write = Callable[[Any], Any]
"""A function that encodes a part of a reply. The encoder of the whole reply copies the returned object unchanged."""
Convert = Callable[[list[Any]], list[Any]]
"""A function that converts the candidates of each position."""
_AT_ONCE, _AT_ONCE_WITH_TEXT = 4096, 512
"""The most candidates that are encoded together with their result: (without texts, with texts).

Either number takes about 1 ms.
"""


class ReqState:
    """Progress of one sample. `rid` is the caller's name of the request, `req.rid` the name in scheduler messages."""

    def __init__(
        self,
        rid: str,
        req: TokenizedGenerateReq,
        decode: Decoder | None,
        *,
        stream: bool = False,
        logprob_text: bool = False,
        return_prompt_token_ids: bool = False,
        columnar: bool = False,
        stop_regexes: StopRegexes | None = None,
        support_logprobs: bool = False,
        write: Write | None = None,
    ) -> None:
        self.rid = rid
        self.req = req
        self._prompt: Ids = req.packed_ids or req.input_ids
        self.num_prompt_tokens = count_ids(self._prompt)
        self.decode = decode
        self.stream = stream
        self.return_prompt_token_ids = return_prompt_token_ids
        self.columnar = columnar
        self._support_logprobs = support_logprobs
        self._write = write
        self._written: dict[str, list[Any]] = {}
        self._logprob_decode = decode if logprob_text else None
        self.created = time.monotonic()
        self.first_token: float | None = None
        self.finished: float | None = None
        self.output_ids: list[int] = []
        self.output_logprobs: list[float] = []
        """Log-probability of each of `output_ids`, if requested."""
        self.output_policy: list[float] = []
        """Log-probability of each of `output_ids` under the policy, if it is known and differs from `output_logprobs`.
        """
        self.output_choices: list[bool] = []
        """For each of `output_ids`: True if masks allowed another token. Only if the engine counted this."""
        self.output_top: list[TokenLogprobs] = []
        """Most likely candidates at the position of each of `output_ids`, if requested."""
        self.output_requested: list[TokenLogprobs] = []
        """Candidates of `token_ids_logprob` at the position of each of `output_ids`, if requested."""
        self.output_masks: list[TokenLogprobs] = []
        """Tokens that each of `output_ids` was drawn from, if requested."""
        self.request_name: str | None = None
        """The caller's name of the whole request, which may have several samples."""
        self.is_sent = False
        """True if the scheduler knows the sample."""
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.weight_version = ""
        self._versions: list[tuple[str, int]] = []  # (version, index of the first token that was sampled under it)
        self.cached_tokens = 0
        self.num_retractions = 0
        self.prompt_logprobs: PromptLogprobs | None = None
        self.on_news: Callable[[ReqState], None] = _ignore
        """Called at the end and, with `stream`, every `stream_interval` tokens. Must not raise."""
        self.shows_logprobs = req.return_logprob
        """False if the log-probabilities are for the session only."""
        self.session: dict[str, Any] | None = None
        """In a session: `meta_info.session`."""
        self.call_seed = ""
        """In a session: determines the ids of tool calls."""
        self._triples: list[LogprobTriple] = []  # of the first `output_ids`; `output_triples` adds the missing ones
        self._framed = 0  # number of output tokens in the last frame
        self._sent_tokens = self._sent_text = 0  # output tokens and characters of text that `increment` returned
        self._interval = req.sampling.stream_interval or 1
        sampling = req.sampling
        stop = [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop or []
        self._text: OutputText | None = None
        if decode is not None and (stream or stop or stop_regexes is not None):
            self._text = OutputText(
                decode,
                stop,
                sampling.no_stop_trim,
                stop_regexes,
                goes_on=sampling.min_new_tokens if sampling.stop_after_min_new_tokens else 0,
            )

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids of the prompt."""
        return unpack(self._prompt)

    # -- what the scheduler sends ---------------------------------------------------------------------------

    def extend(self, out: BatchTokenIDOut, i: int) -> None:
        """Add entry `i` of a message. Afterwards, `finish_reason` or `error` is set if the sample is done."""
        tokens, reason = out.output_ids[i], out.finish_reasons[i]
        version = out.weight_version
        if tokens or not self._versions:  # a request that ends at a push has no token of the new version
            self.weight_version = version
        self.cached_tokens = out.cached_tokens[i]
        self.num_retractions = out.num_retractions[i]
        if out.prompt_logprobs:
            self.prompt_logprobs = out.prompt_logprobs.get(i, self.prompt_logprobs)
        kept, matched = len(tokens), None
        if self._text is not None:
            kept, matched = self._until_stop(self._text, tokens, last=reason is not None)
        if kept:
            if self.first_token is None:
                self.first_token = time.monotonic()
            if not self._versions or self._versions[-1][0] != version:
                self._versions.append((version, len(self.output_ids)))
            self.output_ids += tokens if kept == len(tokens) else tokens[:kept]
            if self.req.return_logprob:
                self.output_logprobs += out.output_logprobs[i][:kept]
                if i in out.policy_logprobs:
                    self.output_policy += out.policy_logprobs[i][:kept]
                if i in out.has_choice:
                    self.output_choices += out.has_choice[i][:kept]
                if i in out.top_logprobs:
                    self.output_top += out.top_logprobs[i][:kept]
                if i in out.token_ids_logprobs:
                    self.output_requested += out.token_ids_logprobs[i][:kept]
            if i in out.sampling_masks:
                self.output_masks += out.sampling_masks[i][:kept]
        if matched is not None:
            self.finish(FinishReason(type="stop", matched=matched))
        elif reason is not None:
            self.finish(reason)
        elif self.stream and len(self.output_ids) - self._framed >= self._interval:
            self._framed = len(self.output_ids)
            self.on_news(self)

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self._end()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._end()

    @property
    def done(self) -> bool:
        return self.finished is not None

    def _end(self) -> None:
        self.finished = time.monotonic()
        self.on_news(self)

    @staticmethod
    def _until_stop(text: OutputText, tokens: list[int], last: bool) -> tuple[int, str | None]:
        """Return (number of new tokens that belong to the output, stop string or pattern that ends it or None)."""
        for count, token in enumerate(tokens, start=1):
            if (matched := text.push(token)) is not None:
                return count, matched
        return len(tokens), text.finish() if last else None

    # -- what the caller gets -------------------------------------------------------------------------------

    def text(self) -> str:
        """Return the text of all output tokens so far. It is final once `done`. Needs a tokenizer."""
        assert self.decode is not None
        if self._text is not None and self._text.matched is not None:
            return self._text.text
        if not self.done:
            return self._text.safe_text if self._text is not None else ""
        return self.decode(self._shown_ids())

    @property
    def weight_version_start(self) -> str:
        """Weight version of the first output token; that of the end if there is no token."""
        return self._versions[0][0] if self._versions else self.weight_version

    @property
    def weight_versions(self) -> list[dict[str, Any]]:
        """Spans [start, end) of the output tokens. All tokens of a span were sampled under one weight version."""
        starts = [start for _, start in self._versions] + [len(self.output_ids)]
        return [{"version": v, "start": a, "end": b} for (v, a), b in zip(self._versions, starts[1:], strict=True)]

    def result(self) -> dict[str, Any]:
        """Return the result object of `/generate`: cumulative for a stream, complete once `done`.

        The object shares no list that may still grow. With `columnar`, token ids and log-probabilities are bytes in the
        layout of `columns`.
        """
        result: dict[str, Any] = {}
        if self.decode is not None:
            result["text"] = self.text()
        result["output_ids"] = pack_ids(self.output_ids) if self.columnar else self.output_ids.copy()
        result["meta_info"] = self.meta_info()
        if self.return_prompt_token_ids:
            result["prompt_token_ids"] = pack(self._prompt) if self.columnar else self.prompt_ids
        return result

    def increment(self) -> dict[str, Any]:
        """Return the result object with only what is new since the last call: a frame of an incremental stream.

        The concatenated texts, token ids and lists of output log-probabilities of all frames equal those of `result`.
        The counts in `meta_info` are cumulative. The first and the last frame contain the fields about the prompt.
        """
        start, at = self._sent_tokens, self._sent_text
        self._sent_tokens = len(self.output_ids)
        result: dict[str, Any] = {}
        if self.decode is not None:
            text = self.text()
            self._sent_text = max(at, len(text))  # a stop regex may cut text that was sent
            result["text"] = text[at:]
        ids = self.output_ids[start:]
        result["output_ids"] = pack_ids(ids) if self.columnar else ids
        result["meta_info"] = self.meta_info(start)
        if self.return_prompt_token_ids and self._has_prompt_part(start):
            result["prompt_token_ids"] = pack(self._prompt) if self.columnar else self.prompt_ids
        return result

    def written_result(self) -> Any:
        """Return `result()`, encoded if the state has a `Write`."""
        return self.result() if self._write is None else self._write(self.result())

    @property
    def has_candidates(self) -> bool:
        """True if the result has candidates at each position."""
        req = self.req
        return req.top_logprobs_num > 0 or req.token_ids_logprob is not None or req.sampling_mask_num > 0

    def meta_info(self, start: int = 0) -> dict[str, Any]:
        """Return the result's `meta_info`, with the log-probabilities of the output tokens from `start` on."""
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": finish_reason_dict(self.finish_reason),
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": len(self.output_ids),
            "cached_tokens": self.cached_tokens,
            "cached_tokens_details": {"device": self.cached_tokens, "host": 0},
            "reasoning_tokens": 0,
            "weight_version": self.weight_version,
            "weight_version_start": self.weight_version_start,
            "num_retractions": self.num_retractions,
            "dp_rank": 0,
            "e2e_latency": (self.finished or time.monotonic()) - self.created,
            "response_sent_to_client_ts": time.time(),
        }
        if self.done:
            meta["weight_versions"] = self.weight_versions
        if self.session is not None:
            meta["session"] = self.session
        if self.shows_logprobs:
            meta |= self._logprob_columns(start) if self.columnar else self._logprob_lists(start)
            meta["logprobs_mode"] = self.req.sampling.logprobs_mode
            meta |= self._policy(start)
        if self.req.sampling_mask_num:
            meta |= self._sampling_masks(start)
        return meta

    @property
    def policy_logprobs(self) -> PolicyLogprobs:
        """Source of the policy's log-probabilities: the reported ones ("same"), own values ("given"), or "unknown"."""
        if self.req.sampling.reports_policy and not self.req.grammar:
            return "same"
        return "given" if len(self.output_policy) == len(self.output_ids) else "unknown"

    def _policy(self, start: int) -> dict[str, Any]:
        """Return fields of `meta_info`: `policy_logprobs`, and columns `POLICY` (if "given") and `CHOICE` (if known).

        The columns begin with output token `start`. They are packed if the request is `columnar`, else lists.
        """
        known = self.policy_logprobs
        found: dict[str, Any] = {"policy_logprobs": known}
        if known == "given":
            values = self.output_policy[start:]
            found[columns.POLICY] = pack_logprobs(values) if self.columnar else values
        if self.output_choices:
            choices = list(map(int, self.output_choices[start:]))
            found[columns.CHOICE] = pack_ids(choices) if self.columnar else choices
        return found

    def _logprob_lists(self, start: int) -> dict[str, Any]:
        lists: dict[str, Any] = {
            "input_token_logprobs": self.prompt_triples() if self._has_prompt_part(start) else [],
            "output_token_logprobs": self.output_triples(start),
            "output_token_logprobs_length": len(self.output_logprobs),
        }
        for name, positions in self._candidates().items():
            lists[name] = self._converted(name, positions, self._triple_lists, self._first_position(name, start))
        return lists

    def _converted(self, name: str, positions: list[Any], convert: Convert, start: int) -> list[Any]:
        """Return the converted candidates from `start` on. `write_candidates` has encoded some of them before."""
        written = self._written.get(name, [])
        return written[start:] + convert(positions[max(start, len(written)) :])

    def _has_prompt_part(self, start: int) -> bool:
        """Return True if the frame that begins with output token `start` includes the prompt's log-probabilities."""
        return start == 0 or self.done

    def _first_position(self, name: str, start: int) -> int:
        """Return the first position of a list of candidates in a frame with the output tokens from `start` on."""
        if name.startswith("output"):
            return start
        return 0 if self._has_prompt_part(start) else self.num_prompt_tokens

    def _sampling_masks(self, start: int) -> dict[str, Any]:
        """Return the tokens that the output tokens from `start` on were drawn from, and their log-probabilities."""
        if self._support_logprobs:
            values = self._converted(_MASK_LOGPROBS, self.output_masks, _logprobs, start)
        else:
            values = [
                mask.logprobs[mask.token_ids.index(token)]
                for mask, token in zip(self.output_masks[start:], self.output_ids[start:], strict=True)
            ]
        return {
            _MASK: self._converted(_MASK, self.output_masks, _token_ids, start),
            _MASK_LOGPROBS: values,
            f"{_MASK}_length": len(self.output_masks),
        }

    def _candidates(self) -> dict[str, list[TokenLogprobs | None]]:
        """Return the requested candidates at each position, by their keys in the result."""
        prompt = self.prompt_logprobs
        found: dict[str, Any] = {}
        if self.req.top_logprobs_num > 0:
            found |= {"input_top_logprobs": (prompt and prompt.top) or [], "output_top_logprobs": self.output_top}
        if self.req.token_ids_logprob is not None:
            found["input_token_ids_logprobs"] = (prompt and prompt.requested) or []
            found["output_token_ids_logprobs"] = self.output_requested
        return found

    def _num_candidates(self) -> int:
        """Return an upper bound on the number of candidates at all positions of the output and the prompt."""
        req, prompt = self.req, self.prompt_logprobs
        positions = len(self.output_ids) + (0 if prompt is None else len(prompt.packed_ids) // ITEM)
        return positions * (req.top_logprobs_num + len(req.token_ids_logprob or ()) + req.sampling_mask_num)

    @property
    def _at_once(self) -> int:
        """Largest number of candidates that are encoded together with their result, without slices."""
        return _AT_ONCE if self._logprob_decode is None else _AT_ONCE_WITH_TEXT

    async def write_candidates(self) -> None:
        """Encode the new candidates in slices for the next call of `result`, unless there are few candidates.

        There may be hundreds of candidates at each position. They are kept in encoded form, because hundreds of
        thousands of objects would make every garbage collection long.
        """
        if self._write is None or self.columnar or (not self.stream and self._num_candidates() <= self._at_once):
            return
        slices = Slices()
        for name, positions in self._candidates().items():
            await self._write_new(name, positions, self._triple_lists, slices)
        if self.req.sampling_mask_num:
            await self._write_new(_MASK, self.output_masks, _token_ids, slices)
        if self._support_logprobs:
            await self._write_new(_MASK_LOGPROBS, self.output_masks, _logprobs, slices)

    async def _write_new(self, name: str, positions: list[Any], convert: Convert, slices: Slices) -> None:
        assert self._write is not None
        written = self._written.setdefault(name, [])
        most = max(self.req.top_logprobs_num, len(self.req.token_ids_logprob or ()), self.req.sampling_mask_num, 1)
        block = max(1, self._at_once // 4 // (most + 4))  # a position takes as long as some candidates more
        while len(written) < len(positions):
            written += map(self._write, convert(positions[len(written) : len(written) + block]))
            await slices.end()

    def _logprob_columns(self, start: int) -> dict[str, Any]:
        """Return the same fields as `_logprob_lists`, as arrays in the layout of `columns`."""
        prompt = self.prompt_logprobs if self._has_prompt_part(start) else None
        arrays: dict[str, Any] = {
            "input_token_logprobs": columns.prompt(prompt),
            "output_token_logprobs": pack_logprobs(self.output_logprobs[start:]),
            "output_token_logprobs_length": len(self.output_logprobs),
        }
        for name, positions in self._candidates().items():
            arrays[name] = columns.candidates(positions[self._first_position(name, start) :])
        return arrays

    def output_triples(self, start: int = 0) -> list[LogprobTriple]:
        """Return the triples of the output tokens from `start` on, or [] if log-probabilities were not requested."""
        known = len(self._triples)
        if self.output_logprobs:  # they were requested
            self._triples += self._as_triples(self.output_logprobs[known:], self.output_ids[known:])
        return self._triples[start:]

    def prompt_triples(self) -> list[LogprobTriple]:
        """Return the triples of the prompt tokens from `logprob_start_len` on."""
        prompt = self.prompt_logprobs
        return [] if prompt is None else self._as_triples(prompt.logprobs, prompt.token_ids)

    def _shown_ids(self) -> list[int]:
        """Return the output ids that belong to the text: all but a stop token, which `no_stop_trim` keeps."""
        reason = self.finish_reason
        # A request whose grammar is complete stops with its last token, which is no stop token.
        by_token = reason is not None and reason.type == "stop" and reason.matched in self.req.stop_ids
        if by_token and not self.req.sampling.no_stop_trim:
            return self.output_ids[:-1]
        return self.output_ids

    def _triple_lists(self, positions: list[TokenLogprobs | None]) -> list[list[LogprobTriple] | None]:
        """Return the triples of the candidates at each position, or None for a position without candidates."""
        return columns.candidate_lists(columns.candidates(positions), self._as_triples)

    def _as_triples(self, logprobs: Sequence[float | None], ids: Sequence[int]) -> list[LogprobTriple]:
        """Return the triples of tokens, with their texts if they are requested. Each distinct token is decoded once."""
        if self._logprob_decode is None:
            return columns.triples(logprobs, ids)
        texts = {token: self._logprob_decode([token]) for token in set(ids)}
        return columns.triples(logprobs, ids, map(texts.__getitem__, ids))


def _token_ids(masks: list[TokenLogprobs]) -> list[list[int]]:
    return [mask.token_ids for mask in masks]


def _logprobs(masks: list[TokenLogprobs]) -> list[list[float]]:
    return [mask.logprobs for mask in masks]


def _ignore(state: ReqState) -> None:
    """Do nothing: the default of `on_news`, before a `Generation` owns the sample."""


def finish_reason_dict(reason: FinishReason | None) -> dict[str, Any] | None:
    """Return a finish reason as SGLang's JSON object, which has different keys for each type."""
    if reason is None:
        return None
    if reason.type == "stop":
        return {"type": "stop", "matched": reason.matched}
    if reason.type == "length":
        return {"type": "length", "length": reason.length}
    return {
        "type": "abort",
        "message": reason.message or "Aborted",
        "status_code": reason.status_code,
        "err_type": None,
    }
