"""Measures what log-probabilities cost on the host, from the sampler's tensors to the caller's result. Needs no GPU.

    python -m benchmarks.candidates
    python -m benchmarks.candidates --steps 500 --counts 0 5 20 256

Random tensors pass through the functions that the scheduler and the TokenizerManager call in each step:

    read        the sampler's tensors on the host -> lists
    collect     lists -> message
    encode      message -> bytes
    decode      bytes -> message
    extend      message -> state of each request
    result      state -> result of an in-process engine
    json        state -> encoded result over HTTP
    columnar    state -> encoded result over HTTP with `columnar`

A figure is the time of a stage in microseconds per token, with the number of candidates at each position
(`candidates`). The `front` is the sum of decode, extend and result. The prompts have no output. The garbage collector
has Python's settings, and all results of a workload are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from benchmarks.options import report, report_run
from verl_server.messages.io_struct import BatchTokenIDOut, FinishReason, TokenizedGenerateReq
from verl_server.sampling.distribution import Distribution, SamplingOps
from verl_server.sampling.logprobs import PromptCandidates, TopCandidates
from verl_server.sampling.spec import ForwardOutput
from verl_server.sampling_params import SamplingParams
from verl_server.scheduler.schedule_batch import BatchOutput, PromptLogprobState, Req
from verl_server.server.http.responses import write_json
from verl_server.server.request_state import ReqState

VOCAB = 151_936
_CHUNK = 1024
"""Prompt positions of one launch."""
_FRONT = ("decode", "extend", "result")
"""Stages in the process of an in-process engine's caller."""


class Computed:
    """Stands in for a `Distribution` of n rows whose results are known."""

    def __init__(self, rows: int, candidates: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        shape = (rows, max(candidates, 1))
        self.logprobs = torch.from_numpy(-random.exponential(size=shape).astype(np.float32))
        self.ids = torch.from_numpy(random.integers(0, VOCAB, shape))

    def top(self, num: int) -> tuple[Tensor, Tensor]:
        return self.logprobs[:, :num], self.ids[:, :num]

    def of(self, ids: Tensor) -> Tensor:
        return self.logprobs[:, :1]

    def at(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.logprobs[rows, 0]

    def select(self, rows: Tensor) -> Distribution:
        selected = copy.copy(self)
        selected.logprobs, selected.ids = self.logprobs[rows], self.ids[rows]
        return selected


class ComputedOps(SamplingOps):
    """Scores prompts without computing anything."""

    candidates = 0

    def score(self, logits: Tensor, targets: Tensor) -> tuple[Distribution, Tensor, Tensor]:
        computed = Computed(len(logits), self.candidates, len(logits))
        return computed, computed.logprobs[:, 0], torch.ones(len(logits), dtype=torch.int64)


class Times:
    """Seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start

    def report(self, work: str, tokens: int, candidates: int) -> None:
        self.seconds["front"] = sum(self.seconds[name] for name in _FRONT)
        for name, seconds in self.seconds.items():
            report(f"{work}_{name}", 1e6 * seconds / tokens, "us/token", candidates=candidates, tokens=tokens)


def request(i: int, prompt: list[int], steps: int, candidates: int) -> TokenizedGenerateReq:
    return TokenizedGenerateReq(
        rid=f"{i}:request",
        input_ids=prompt,
        sampling=SamplingParams(max_new_tokens=steps),
        return_logprob=True,
        logprob_start_len=-1 if steps else 0,
        top_logprobs_num=candidates,
    )


def output_messages(times: Times, requests: list[TokenizedGenerateReq], steps: int, candidates: int) -> list[bytes]:
    """Return the messages of all steps, which generate one token for each request."""
    reqs = [Req(each, i, steps, seed=i) for i, each in enumerate(requests)]
    encoder, output, messages = msgspec.msgpack.Encoder(), BatchOutput(), []
    computed = Computed(len(reqs), candidates, seed=0)
    for step in range(steps):
        more = TopCandidates(computed, [candidates] * len(reqs), VOCAB) if candidates else None
        with times.stage("read"):
            ids, logprobs = computed.ids[:, 0].tolist(), computed.logprobs[:, 0].tolist()
            found = ForwardOutput(ids, logprobs, [None] * len(ids), [None] * len(ids))
            if more is not None:
                found.top_logprobs = [*more.read()]
        reason = FinishReason(type="length", length=steps) if step == steps - 1 else None
        with times.stage("collect"):
            for i, req in enumerate(reqs):
                index = output.add(req, reason, [found.next_ids[i]], [found.logprobs[i]])
                if req.wants_candidates:
                    output.add_candidates(index, req, found, i)
            message = output.take("1")
        with times.stage("encode"):
            messages.append(encoder.encode(message))
    return messages


def prompt_messages(times: Times, requests: list[TokenizedGenerateReq], candidates: int) -> list[bytes]:
    """Return the messages with the log-probabilities of prompts, one message for each prompt."""
    encoder, output, messages, ops = msgspec.msgpack.Encoder(), BatchOutput(), [], ComputedOps()
    ops.candidates = candidates
    logits = torch.empty(_CHUNK, 1).expand(_CHUNK, VOCAB)
    for i, each in enumerate(requests):
        req = Req(each, i, 0, seed=i)
        req.prompt_logprobs = PromptLogprobState(0, candidates, None)
        targets = req.prompt_ids[1:]
        for start in range(0, len(targets), _CHUNK):
            chunk = targets[start : start + _CHUNK]
            computed = PromptCandidates(ops, {0: np.array(chunk)}, candidates, None, logits.device)
            computed.launch(logits[: len(chunk)])
            with times.stage("read"):
                part = computed.read()[0]
            with times.stage("collect"):
                req.prompt_logprobs.add(part)
        with times.stage("collect"):
            index = output.add(req, FinishReason(type="length", length=0), [], [])
            output.add_prompt_logprobs(index, req)
            message = output.take("1")
        with times.stage("encode"):
            messages.append(encoder.encode(message))
    return messages


async def results(times: Times, name: str, requests: list[TokenizedGenerateReq], messages: list[bytes]) -> list[Any]:
    """Return what the callers receive after `messages`. `name` is the stage that converts it."""
    write = None if name == "result" else write_json
    states = {each.rid: ReqState(each.rid, each, None, columnar=name == "columnar", write=write) for each in requests}
    decoder = msgspec.msgpack.Decoder(BatchTokenIDOut)
    front = times if name == "result" else Times()  # the stages before the last are the same
    for data in messages:
        with front.stage("decode"):
            out = decoder.decode(data)
        with front.stage("extend"):
            for i, rid in enumerate(out.rids):
                states[rid].extend(out, i)
    found = []
    for state in states.values():
        with times.stage(name):
            await state.write_candidates()
            found.append(state.written_result())
    return found


def run(work: str, requests: list[TokenizedGenerateReq], steps: int, candidates: int) -> None:
    """Report the stages of a workload: `steps` tokens of each request, or its prompt."""
    tokens = len(requests) * steps or sum(len(each.input_ids) for each in requests)
    times = Times()
    gc.collect()
    messages = (
        output_messages(times, requests, steps, candidates) if steps else prompt_messages(times, requests, candidates)
    )
    for name in ("result", "json", "columnar"):
        gc.collect()
        asyncio.run(results(times, name, requests, messages))
    times.report(work, tokens, candidates)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.candidates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--counts", type=int, nargs="+", default=[0, 5, 20], help="numbers of candidates (0 5 20)")
    parser.add_argument("--requests", type=int, default=256, help="requests that run at once (256)")
    parser.add_argument("--steps", type=int, default=200, help="output tokens of each request (200)")
    parser.add_argument("--prompts", type=int, default=64, help="prompts without output (64)")
    parser.add_argument("--prompt-len", type=int, default=2048, help="tokens of each prompt (2048)")
    parser.set_defaults(device="cpu")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    report_run("benchmarks.candidates", args, argv)
    prompt = np.random.default_rng(0).integers(0, VOCAB, args.prompt_len).tolist()
    for count in args.counts:
        run("output", [request(i, [1, 2, 3], args.steps, count) for i in range(args.requests)], args.steps, count)
    for count in args.counts[:2]:
        run("prompt", [request(i, list(prompt), 0, count) for i in range(args.prompts)], 0, count)


if __name__ == "__main__":
    main()
