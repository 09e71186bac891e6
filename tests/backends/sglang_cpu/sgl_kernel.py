"""Stands in for `sglang-kernel` on a machine without a GPU: every name can be imported, and a call raises.

The kernels' wheel is built for CUDA. Modules of SGLang import names of it while they load, even if they compute with
PyTorch alone (`attention_backend="torch_native"`, SGLang's native experts). Models that look for a CPU kernel while
they load, as Qwen3.5, cannot be loaded. A genuine `sgl_kernel` comes first on the path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs CUDA. This is a stand-in for machines without a GPU.")

    return kernel
