"""The workload on which engines are compared, and the least time that it can take on a machine.

It is nano-vllm's: 256 prompts of 100 to 1,024 random ids, 256 output lengths of 100 to 1,024, `random.seed(0)`,
temperature 0.6, `ignore_eos`, and 133,966 output tokens. The `tiny` shape has 64 sequences of 128 + 128 tokens. `PEERS`
holds figures of other engines that were measured with the same workload.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class Workload:
    prompts: list[list[int]]
    output_lens: list[int]
    temperature: float
    samples: int = 1
    """Number of consecutive requests that have the same prompt."""

    @property
    def output_tokens(self) -> int:
        return sum(self.output_lens)

    @property
    def counted(self) -> tuple[int, str]:
        """(tokens, unit) of the rate: the prompts' tokens if each output has one token, else those of the outputs."""
        if max(self.output_lens) == 1:
            return sum(map(len, self.prompts)), "prompt tokens/s"
        return self.output_tokens, "tokens/s"

    def sampling_params(self) -> list[dict[str, Any]]:
        """The sampling parameters of each prompt, for `generate`."""
        return [{"temperature": self.temperature, "max_new_tokens": n, "ignore_eos": True} for n in self.output_lens]

    def first(self, count: int | None) -> Workload:
        """The first `count` requests of the workload, which is repeated if it has fewer. None: the workload itself."""
        if count is None:
            return self
        times = -(-count // len(self.prompts))
        return Workload((self.prompts * times)[:count], (self.output_lens * times)[:count], self.temperature)

    def in_groups(self, samples: int) -> Workload:
        """The same number of requests and output lengths, where `samples` consecutive requests share a prompt."""
        prompts = [self.prompts[i - i % samples] for i in range(len(self.prompts))]
        return Workload(prompts, self.output_lens, self.temperature, samples)


def make_workload(shape: str) -> Workload:
    """The workload of a named shape."""
    rng = random.Random(0)
    if shape == "tiny":
        return Workload([[rng.randrange(5, 320) for _ in range(128)] for _ in range(64)], [128] * 64, 1.0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    return Workload(prompts, [rng.randint(100, 1024) for _ in range(256)], 0.6)


def uniform_workload(count: int, prompt_len: int, output_len: int) -> Workload:
    """`count` random prompts of `prompt_len` tokens with `output_len` output tokens each."""
    rng = random.Random(0)
    prompts = [[rng.randrange(5, 320) for _ in range(prompt_len)] for _ in range(count)]
    return Workload(prompts, [output_len] * count, 1.0)


class NamedWork(NamedTuple):
    """A workload of the option --works."""

    name: str
    work: Workload
    runs: int | None = None
    """Number of runs, of which the last is the figure. None: that of the option --runs."""


WORK_SYNTAX = "NAME=COUNTxPROMPTxOUTPUT[xRUNS]"


def parse_work(text: str) -> NamedWork:
    """Parse `WORK_SYNTAX`, a uniform workload."""
    name, _, sizes = text.partition("=")
    try:
        count, prompt, output, *runs = (int(size) for size in sizes.split("x"))
    except ValueError:
        count = prompt = output = 0
        runs = []
    if not name or min(count, prompt, output, *runs) < 1 or len(runs) > 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not {WORK_SYNTAX} with whole numbers from 1 on, as in decode_8=8x128x512."
        )
    return NamedWork(name, uniform_workload(count, prompt, output), *runs)


def single_sequence(shape: str) -> Workload:
    """The first prompt alone with 512 output tokens (`tiny`: 128)."""
    work = make_workload(shape)
    return Workload(work.prompts[:1], [128 if shape == "tiny" else 512], work.temperature)


# -- figures of other engines -------------------------------------------------------------------------------

_VLLM, _SGLANG = "vLLM 0.26.0, one H200, bf16", "SGLang 0.5.16, one H200, bf16"
_VLLM_CPU = "vLLM CPU 0.32.0, log-probabilities on, 2 cores with AVX-512"
PEERS: dict[tuple[str, str], dict[str, tuple[str, float]]] = {
    ("cpu", "tiny"): {"output_tokens_per_s": (_VLLM_CPU, 762.0), "seconds_to_ready": (_VLLM_CPU, 116.0)},
    ("cuda", "0.6b"): {
        "output_tokens_per_s": (_VLLM, 22042.0),
        "single_sequence_tokens_per_s": (_SGLANG, 585.0),
        "seconds_to_ready": (_SGLANG, 144.0),
    },
    ("cuda", "8b"): {
        "output_tokens_per_s": (_VLLM, 9128.0),
        "single_sequence_tokens_per_s": (_SGLANG, 194.0),
        "seconds_to_ready": (_SGLANG, 49.0),
    },
}
"""(device, shape) -> figure -> (best peer, its value). The prefix cache was off, and log-probabilities were off unless
the peer's name includes them. If a peer was started twice, seconds_to_ready is that of the second start, with warm
caches."""


def peer_of(device: str, shape: str, figure: str, gpus: int = 1) -> dict[str, Any]:
    """The fields `peer` and `peer_value` of a figure, None if there is no peer: all peers were measured on one GPU."""
    peers = PEERS.get((device, shape), {}) if gpus == 1 else {}
    name, value = peers.get(figure, (None, None))
    return {"peer": name, "peer_value": value}


# -- limits of the machine ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ceilings:
    """Measured maximum rates of one GPU, or of the CPU: FLOP/s of a matrix product, and bytes/s (read + written) of a
    copy."""

    flop_per_s: float
    bytes_per_s: float


def measure_ceilings(device: str, threads: int | None, gpus: Sequence[int] | None = None) -> Ceilings:
    """Measure the ceilings in this process, and free the memory. `threads`: number of CPU threads; None: torch's.

    `gpus`: ordinals of the GPUs that are used (the current one). The result is that of the slowest, for which the
    others wait.
    """
    if device == "cpu":
        if threads is not None:
            torch.set_num_threads(threads)
        return _ceilings(device, 1024, torch.float32, 2**25)
    found = []
    for gpu in [torch.cuda.current_device()] if gpus is None else gpus:
        with torch.cuda.device(gpu):
            found.append(_ceilings("cuda", 8192, torch.bfloat16, 2**30))
            torch.cuda.empty_cache()
    return Ceilings(min(each.flop_per_s for each in found), min(each.bytes_per_s for each in found))


def _ceilings(device: str, size: int, dtype: torch.dtype, nbytes: int) -> Ceilings:
    return Ceilings(_flop_per_s(device, size, dtype), _bytes_per_s(device, nbytes // dtype.itemsize, dtype))


def _flop_per_s(device: str, size: int, dtype: torch.dtype) -> float:
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * size**3 / _best_seconds(lambda: torch.nn.functional.linear(a, b), device == "cuda")


def _bytes_per_s(device: str, count: int, dtype: torch.dtype) -> float:
    source = torch.zeros(count, dtype=dtype, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.nbytes / _best_seconds(lambda: target.copy_(source), device == "cuda")


def _best_seconds(run: Callable[[], object], on_gpu: bool) -> float:
    best = float("inf")
    for _ in range(12):
        start = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def rank_shape(shape: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The part of a shape that each of `ranks` tensor-parallel ranks computes. If there are fewer heads of keys and
    values than ranks, each rank has one."""
    cut = {name: shape[name] / ranks for name in ("num_attention_heads", "intermediate_size", "vocab_size")}
    return shape | cut | {"num_key_value_heads": max(1, shape["num_key_value_heads"] // ranks)}


def layer_weights(shape: dict[str, Any]) -> float:
    """Number of weights in the matrices of all layers."""
    heads = 2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]
    per_layer = shape["hidden_size"] * (heads * shape["head_dim"] + 3 * shape["intermediate_size"])
    return float(shape["num_hidden_layers"] * per_layer)


def training_flop(shape: dict[str, Any], sequences: list[tuple[int, int]], recompute: bool) -> float:
    """FLOP of one forward and backward pass, without padding. `sequences`: (tokens, tokens that have logits) of each.

    `recompute`: the backward pass computes the layers of the forward pass again (gradient checkpointing).
    """
    queries = shape["num_attention_heads"] * shape["head_dim"]
    passes = 4 if recompute else 3  # one forward, a backward of twice its FLOP, and perhaps a second forward
    flop = 0.0
    for length, sampled in sequences:
        # Causal: half of the scores and half of the weighted values, each 2 FLOP (the factor below).
        attention = shape["num_hidden_layers"] * 2 * queries * length * length / 2
        flop += 2.0 * passes * (layer_weights(shape) * length + attention)
        flop += 6.0 * shape["hidden_size"] * shape["vocab_size"] * sampled
    return flop


def least_seconds(shape: dict[str, Any], work: Workload, ceilings: Ceilings, itemsize: int, gpus: int = 1) -> float:
    """Seconds of the whole workload with all sequences at once, if only arithmetic and memory traffic take time.

    Prefill takes the time of its arithmetic. Decode takes the larger of the times of its arithmetic and of its memory
    traffic: weights once a step, keys and values once a token. The prompt of a group is computed once, and read once a
    step. `itemsize` is the number of bytes of a weight. The model is cut over `gpus` GPUs, each with these `ceilings`;
    what they exchange takes no time here.
    """
    shape = rank_shape(shape, gpus)
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    q_size = shape["num_attention_heads"] * shape["head_dim"]
    kv_size = shape["num_key_value_heads"] * shape["head_dim"]
    body, head = layer_weights(shape), hidden * shape["vocab_size"]
    group_prompts = work.prompts[:: work.samples]
    prompt_tokens = sum(map(len, group_prompts))
    # The prefill produces the first output token.
    decoded = work.output_tokens - len(work.prompts)
    own = sum(n * n / 2 for n in work.output_lens)
    context = own + sum(n * len(p) for p, n in zip(work.prompts, work.output_lens, strict=True))
    longest = [max(work.output_lens[i : i + work.samples]) for i in range(0, len(work.prompts), work.samples)]
    read = own + sum(n * len(p) for p, n in zip(group_prompts, longest, strict=True))
    pairs = sum(len(p) ** 2 / 2 for p in group_prompts)
    prefill = 2 * body * prompt_tokens + 2 * head * len(work.prompts) + 4 * q_size * layers * pairs
    arithmetic = 2 * (body + head) * decoded + 4 * q_size * layers * context
    steps = max(work.output_lens) - 1
    traffic = itemsize * (steps * (body + head) + 2 * kv_size * layers * read)
    decode = max(arithmetic / ceilings.flop_per_s, traffic / ceilings.bytes_per_s)
    return float(prefill / ceilings.flop_per_s + decode)


def seconds_with_capacity(
    shape: dict[str, Any], work: Workload, ceilings: Ceilings, itemsize: int, capacity: int
) -> float:
    """`least_seconds` of a uniform workload on a KV cache of `capacity` tokens.

    As many requests run at once as the cache holds at their mean length, the prompt and half of the output. Fewer
    requests at once read the weights in more steps.
    """
    count = len(work.prompts)
    mean = (sum(map(len, work.prompts)) + work.output_tokens / 2) / count
    at_once = max(1, min(count, int(capacity / mean)))
    return least_seconds(shape, work.first(at_once), ceilings, itemsize) * count / at_once
