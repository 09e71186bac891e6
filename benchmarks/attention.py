"""The attention kernels against the GPU's limits: memory bandwidth for decode, TFLOP/s for prefill.

    python -m benchmarks.attention [--shape 0.6b 8b] [--tp 2] [--only groups]
    python -m benchmarks.attention --only decode --page-size 64 --configs 64 4 3 2 128 8 2 1

Prints one JSON line per figure (`name, value, unit, limit`). Decode is timed in replays of a CUDA graph over several
layers, whose keys exceed the L2 cache. Its limit is the time of a kernel that only reads the same number of bytes. In
the `groups` cases, samples share the pages of a prompt; their limit reads these pages once, and `alone` is the time
without cascade attention, where each sample reads them. Prefill is compared with torch's own attention, which needs
equal lengths and contiguous keys.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
import tyro
from torch import Tensor

from benchmarks.shapes import SHAPES
from verl_server.kernels.attention_tiles import DecodeConfig, SharedConfig
from verl_server.kernels.paged_attention import PagedAttention, SharedKeys
from verl_server.kernels.shared_keys import find_runs

_REPEATS = 20
_MIN_BYTES = 400 * 2**20
"""Minimum size of the keys and values of all layers together, which is several times the L2 cache."""


@dataclasses.dataclass
class Args:
    """Measure the speed of paged attention on one GPU."""

    shape: tuple[Literal["0.6b", "8b"], ...] = ("0.6b", "8b")
    """Model shapes whose head layouts are measured."""
    page_size: int = 16
    """Tokens in a KV page."""
    tp: int = 1
    """Number of tensor-parallel ranks. One rank is measured, with the heads of the model divided by this number."""
    only: tuple[Literal["decode", "groups", "extend"], ...] = ("decode", "groups", "extend")
    """Cases to measure."""
    configs: tuple[tuple[int, int, int, int], ...] = ()
    """Further launch parameters of decode to measure: keys per unit, warps, stages, programs per multiprocessor."""


DECODE: dict[str, list[int]] = {
    "256_mixed": np.random.default_rng(0).integers(100, 2048, 256).tolist(),
    "256_of_1024": [1024] * 256,
    "64_mixed": np.random.default_rng(1).integers(100, 2048, 64).tolist(),
    "16_of_1024": [1024] * 16,
    "1_of_512": [512],
    "1_of_4096": [4096],
    "1_of_32768": [32768],
    "straggler": [*np.random.default_rng(2).integers(100, 600, 255).tolist(), 30000],
}
"""Case -> lengths of the sequences of a decode step."""

GROUPS: dict[str, tuple[int, int, int, int]] = {
    "16_of_16_1024_and_512": (16, 16, 1024, 512),
    "32_of_8_512_and_512": (32, 8, 512, 512),
    "4_of_64_4096_and_256": (4, 64, 4096, 256),
    "1_of_256_2048_and_128": (1, 256, 2048, 128),
    "1_of_16_32768_and_512": (1, 16, 32768, 512),
    "2_of_16_1024_and_512": (2, 16, 1024, 512),
    "1_of_16_1024_and_512": (1, 16, 1024, 512),
    "1_of_8_1024_and_512": (1, 8, 1024, 512),
}
"""Case -> (groups, samples of each group, tokens of the shared prompt, further tokens of each sample)."""

EXTEND: dict[str, tuple[list[int], list[int]]] = {
    "16_of_512": ([0] * 16, [512] * 16),
    "1_of_8192": ([0], [8192]),
    "mixed": ([0] * 14, np.random.default_rng(3).integers(100, 1024, 14).tolist()),
    "chunk_2048_after_8192": ([8192], [2048]),
    "64_turns_of_64_after_1024": ([1024] * 64, [64] * 64),
}
"""Case -> (cached tokens of each entry, new tokens of each entry) of a prefill step."""


class Case:
    """Random queries, and several KV layers for entries of the given lengths, with pages in random order."""

    def __init__(self, heads: dict[str, Any], cached: list[int], extend: list[int], page_size: int) -> None:
        device, dtype = torch.device("cuda"), torch.bfloat16
        self.heads: int = heads["num_attention_heads"]
        self.kv_heads: int = heads["num_key_value_heads"]
        self.head_dim: int = heads["head_dim"]
        self.page_size = page_size
        self.cached, self.extend = np.array(cached, dtype=np.int64), np.array(extend, dtype=np.int64)
        self.lens = self.cached + self.extend
        pages = -(-self.lens // page_size)
        total = int(pages.sum())
        self.token_bytes: int = 2 * self.kv_heads * self.head_dim * dtype.itemsize
        num_layers = min(32, max(2, -(-_MIN_BYTES // (total * page_size * self.token_bytes))))
        pool_shape = (num_layers, total + 1, 2, self.kv_heads, page_size, self.head_dim)
        self.layers = torch.randn(pool_shape, device=device, dtype=dtype).permute(0, 1, 4, 2, 3, 5).unbind(0)
        order = torch.randperm(total, device=device, dtype=torch.int32)
        self.table = torch.full((len(cached) + 1, int(pages.max())), total, device=device, dtype=torch.int32)
        for row, part in enumerate(torch.split(order, pages.tolist())):
            self.table[row, : len(part)] = part
        self.rows = torch.arange(len(cached), device=device, dtype=torch.int32)
        tokens = int(self.extend.sum())
        self.q = torch.randn(tokens, self.heads, self.head_dim, device=device, dtype=dtype)

    def share(self, entries: int, tokens: int) -> None:
        """Assign the same pages to the first `tokens` tokens of each `entries` consecutive entries."""
        pages = tokens // self.page_size
        for first in range(0, len(self.lens), entries):
            self.table[first : first + entries, :pages] = self.table[first, :pages]

    def attention(
        self, decode_config: DecodeConfig | None = None, shared_config: SharedConfig | None = None
    ) -> PagedAttention:
        return PagedAttention(
            num_heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            dtype=self.q.dtype,
            device=self.q.device,
            decode_config=decode_config,
            shared_config=shared_config,
            max_shared_entries=len(self.lens),
        )

    def decode_us(self, attention: PagedAttention, *, cascade: bool = False) -> float:
        """Microseconds of decode attention in one layer. With `cascade`, shared keys are read once for all entries."""
        lens, own, shared = _device_ints(self.lens), self.lens, None
        if cascade:
            table, rows = self.table.long().cpu().numpy(), np.arange(len(self.lens))
            keys = attention.shared_keys(find_runs(table, rows, self.lens, self.page_size, min_keys=64))
            own, shared = self.lens - keys.starts, SharedKeys(*(_device_ints(part) for part in keys))
        meta = torch.from_numpy(attention.host_metadata(own)).cuda()

        def run() -> None:
            for layer in self.layers:
                attention.decode(self.q, layer, self.table, self.rows, lens, meta, shared=shared)

        return graph_us(run) / len(self.layers)

    def extend_us(self, attention: PagedAttention) -> float:
        cached = _device_ints(self.cached)
        starts = _device_ints(np.concatenate([[0], np.cumsum(self.extend)]))
        longest = int(self.extend.max())

        def run() -> None:
            for layer in self.layers:
                attention.extend(self.q, layer, self.table, self.rows, cached, starts, longest)

        return graph_us(run) / len(self.layers)

    @property
    def decode_bytes(self) -> int:
        """Bytes of keys and values that one layer reads."""
        return int(self.lens.sum()) * self.token_bytes

    @property
    def extend_flops(self) -> float:
        seen = self.extend * (self.cached + (self.extend + 1) / 2)
        return float(seen.sum()) * 4 * self.heads * self.head_dim


def _device_ints(values: Any) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)).cuda()


def graph_us(run: Callable[[], object]) -> float:
    """Capture `run` in a CUDA graph. Returns the median of the replays in microseconds."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = []
    for _ in range(_REPEATS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times[3:])


@triton.jit  # type: ignore[untyped-decorator]
def _read_kernel(source: tl.tensor, out: tl.tensor, steps: tl.tensor, BLOCK: tl.constexpr) -> None:
    total = tl.zeros([BLOCK], tl.int32)
    start = source + tl.program_id(0).to(tl.int64) * steps * BLOCK + tl.arange(0, BLOCK)
    for i in range(0, steps, 4):
        for j in tl.static_range(4):
            total += tl.load(start + (i + j) * BLOCK)
    tl.store(out + tl.program_id(0), tl.sum(total))


def read_limit() -> float:
    """Bytes per second of a kernel that reads 2 GiB and computes almost nothing."""
    words = torch.randint(-(2**31), 2**31, (2**29,), device="cuda", dtype=torch.int64).int()
    out = torch.empty(2**16, device="cuda", dtype=torch.int32)

    def microseconds(steps: int) -> float:
        return graph_us(lambda: _read_kernel[(2**29 // 2048 // steps,)](words, out, steps, 2048, num_warps=8))

    return words.nbytes / min(microseconds(steps) for steps in (16, 64, 256)) * 1e6


def report(name: str, value: float, unit: str, limit: float | None = None, **more: float) -> None:
    line = {"name": name, "value": round(value, 3), "unit": unit, "limit": limit and round(limit, 3)}
    print(json.dumps(line | {key: round(figure, 3) for key, figure in more.items()}), flush=True)


def measure_decode(
    label: str, heads: dict[str, Any], page_size: int, limit: float, configs: Sequence[tuple[int, int, int, int]]
) -> None:
    """Report each case with the parameters of the engine, and by turns with each of `configs`."""
    for name, lens in DECODE.items():
        case = Case(heads, [n - 1 for n in lens], [1] * len(lens), page_size)
        for config in (None, *configs):
            us = case.decode_us(case.attention(None if config is None else DecodeConfig(*config)))
            rate = case.decode_bytes / us / 1e6
            suffix = "" if config is None else "_config_" + "_".join(map(str, config))
            report(f"decode_{label}_{name}{suffix}", us, "us", case.decode_bytes / limit * 1e6, tb_per_s=rate)


def measure_groups(label: str, heads: dict[str, Any], page_size: int, limit: float) -> None:
    for name, (groups, samples, shared, own) in GROUPS.items():
        entries = groups * samples
        case = Case(heads, [shared + own - 1] * entries, [1] * entries, page_size)
        case.share(samples, shared)
        once = (groups * shared + entries * own) * case.token_bytes
        attention = case.attention()
        alone, us = case.decode_us(attention), case.decode_us(attention, cascade=True)
        report(f"groups_{label}_{name}", us, "us", once / limit * 1e6, alone=alone)


def measure_extend(label: str, heads: dict[str, Any], page_size: int) -> None:
    for name, (cached, extend) in EXTEND.items():
        case = Case(heads, cached, extend, page_size)
        us = case.extend_us(case.attention())
        report(f"extend_{label}_{name}", us, "us", tflops=case.extend_flops / us / 1e6)
        if not any(cached) and len(set(extend)) == 1:
            peer = torch_prefill_us(case, len(extend), extend[0])
            report(f"torch_sdpa_{label}_{name}", peer, "us", tflops=case.extend_flops / peer / 1e6)


def torch_prefill_us(case: Case, entries: int, length: int) -> float:
    """Microseconds of torch's attention over contiguous prompts of equal lengths without a cached prefix."""
    q = case.q.view(entries, length, case.heads, case.head_dim).transpose(1, 2)
    k, v = (q[:, :: case.heads // case.kv_heads].contiguous() for _ in range(2))
    return graph_us(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


def main() -> None:
    args = tyro.cli(Args)
    if not torch.cuda.is_available():
        sys.exit("benchmarks.attention needs an NVIDIA GPU.")
    device = torch.cuda.get_device_name()
    print(json.dumps({"torch": torch.__version__, "triton": triton.__version__, "device": device, "argv": sys.argv}))
    limit = read_limit()
    report("read_limit", limit / 1e12, "TB/s")
    for shape in args.shape:
        label = shape if args.tp == 1 else f"{shape}_tp{args.tp}"
        heads = SHAPES[shape] | {
            name: SHAPES[shape][name] // args.tp for name in ("num_attention_heads", "num_key_value_heads")
        }
        if "decode" in args.only:
            measure_decode(label, heads, args.page_size, limit, args.configs)
        if "groups" in args.only:
            measure_groups(label, heads, args.page_size, limit)
        if "extend" in args.only:
            measure_extend(label, heads, args.page_size)


if __name__ == "__main__":
    main()
