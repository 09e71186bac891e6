"""The physical limits of a GPU or CPU: a large matrix product, a copy, and the flat copy of `copy_limit`.

    python -m benchmarks.ceilings --device cuda

`gemm_ceiling` and `copy_ceiling` are those of `benchmarks.offline`. `memory_bandwidth` is the median of the flat copies
that limit a weight push (`benchmarks.copy_limit`), read and written bytes together.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks import copy_limit
from benchmarks.options import report, report_run
from benchmarks.workload import measure_ceilings

_ELEMENTS = {"cuda": 2**31, "cpu": 2**25}
"""Elements of the flat copy, which take 4 GiB on a GPU and 128 MiB on a CPU."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ceilings", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what is measured (cpu)")
    args = parser.parse_args(argv)
    report_run("benchmarks.ceilings", args, argv)
    ceilings = measure_ceilings(args.device, None)
    report("gemm_ceiling", ceilings.flop_per_s / 1e9, "GFLOP/s")
    report("copy_ceiling", ceilings.bytes_per_s / 1e9, "GB/s")
    elements, dtype = _ELEMENTS[args.device], torch.bfloat16 if args.device == "cuda" else torch.float32
    limit = copy_limit.measure(args.device, {(0, 0): elements}, dtype, dtype)
    report("memory_bandwidth", 2 * elements * dtype.itemsize / 1e6 / limit["all_ms"], "GB/s")


if __name__ == "__main__":
    main()
