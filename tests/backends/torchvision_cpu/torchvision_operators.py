"""Declares torchvision's operators `nms` and `qnms` if torchvision could not load its library.

torchvision's wheel is built for CUDA, so its library does not load beside a CPU build of torch. SGLang, transformers
and vLLM's Qwen3.5 import torchvision, which then fails to register the shapes of the two operators. Declared operators
suffice for the import, and a call of one raises. Nothing of a text model calls them.

A .pth file imports this module in every process of `.venv-sglang` and `.venv-backends`, so it imports nothing itself.
"""

import sys

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _Operators:
    """A finder that finds nothing. It runs when torchvision has tried its library and before it registers shapes."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torchvision._meta_registrations":
            import torch

            if not hasattr(torch.ops.torchvision, "nms"):
                cls.library = torch.library.Library("torchvision", "DEF")  # its operators live as long as it does
                cls.library.define(f"nms{_SCHEMA}")
                cls.library.define(f"qnms{_SCHEMA}")


sys.meta_path.insert(0, _Operators)
