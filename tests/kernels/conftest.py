"""Kernel tests without a GPU run in Triton's interpreter, which must be chosen before a kernel is defined."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
