"""Runs SGLang's load generator, `sglang.benchmark.serving`, with this process's arguments.

The generator comes from SGLang's wheel, unmodified. Two imports around it are placeholders: `torchvision`, whose wheels
need CUDA, and `sglang.srt.disaggregation.utils`, which imports SGLang's kernels and of which it reads one constant.
"""

import runpy

from placeholders import place

if __name__ == "__main__":
    place({"torchvision": "0.28.0"}, ("sglang.srt.disaggregation.utils",))
    runpy.run_module("sglang.benchmark.serving", run_name="__main__", alter_sys=True)
