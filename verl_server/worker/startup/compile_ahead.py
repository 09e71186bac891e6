"""`compile_ahead`: compiles an engine's Triton kernels in other processes, while the engine starts.

A scheduler process calls it as soon as the driver has named the GPU. If the Triton cache has no stamp for this model,
these settings and this GPU, it starts `compile_process`, which fills the cache and writes the stamp. Nothing waits for
that process, and its failure is only a warning. If the engine needs a kernel that is not compiled, the engine compiles
the kernel itself. If the kernel is being compiled, the engine waits for it (`kernels.compilation`). With a stamp the
call takes milliseconds.

This module imports neither torch nor Triton, because it runs while the scheduler process imports them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import logging
import os
from pathlib import Path

import msgspec

from verl_server.files.model_folder import local_folder
from verl_server.ipc.child_process import ChildProcess
from verl_server.kernels.compilation import cache_folder
from verl_server.server_args import ServerArgs
from verl_server.worker.cuda_context import GpuKind

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parents[2]
_SOURCES = ("kernels", "models", "sampling", "weight_sync/copying", "worker")
"""Folders whose modules decide which kernels are launched."""
_SETTINGS = (
    "dtype",
    "context_length",
    "tp_size",
    "max_running_requests",
    "chunked_prefill_size",
    "page_size",
    "disable_radix_cache",
    "attention_backend",
    "disable_cascade_attention",
    "fused_kernels",
    "disable_pdl",
    "disable_cuda_graph",
    "cuda_graph_max_bs",
    "fused_weight_copy",
)
"""Settings on which kernels depend.

If a setting is missing here, kernels for its changed value are compiled when they are needed.
"""


class CompileRequest(msgspec.Struct, frozen=True):
    """The request for `compile_process`."""

    server_args: str
    """`ServerArgs.to_json()`."""
    gpu: GpuKind
    stamp: str
    """Path of the file that is written when all kernels are in the cache."""


def compile_ahead(server_args: ServerArgs, gpu: GpuKind) -> ChildProcess | None:
    """Start to compile kernels that the Triton cache lacks.

    Return the process, or None if there is nothing to compile.
    """
    try:
        if importlib.util.find_spec("triton") is None or not launches_triton(server_args):
            return None
        request = compile_request(server_args, gpu)
        if Path(request.stamp).exists():
            return None
        argument = msgspec.to_builtins(request)
        return ChildProcess("compile-ahead", "verl_server.worker.startup.compile_process", argument)
    except Exception as error:  # the engine compiles what it needs
        logger.warning("Kernels cannot be compiled ahead, so first steps wait for them: %r", error)
        return None


def compile_request(server_args: ServerArgs, gpu: GpuKind) -> CompileRequest:
    """Return the request. The name of its stamp differs if the kernels may differ.

    The name does not depend on the driver's version, because Triton compiles for the GPU with a compiler of its own.
    """
    versions = [importlib.metadata.version(name) for name in ("triton", "torch")]
    folder = local_folder(server_args.model_path)
    model = (folder / "config.json").read_bytes() if folder else repr((server_args.model_path, server_args.revision))
    settings = [getattr(server_args, name) for name in _SETTINGS]
    digest = hashlib.sha256(repr((versions, tuple(gpu), model, settings)).encode())
    for source in sorted(path for name in _SOURCES for path in (_PACKAGE / name).glob("*.py")):
        digest.update(source.read_bytes())
    stamp = cache_folder() / f"verl-server-{digest.hexdigest()[:32]}"
    return CompileRequest(server_args.to_json(), gpu, str(stamp))


def num_processes(server_args: ServerArgs) -> int:
    """Return the number of compile processes: 1 to 8, one for each core that no process of the engine needs."""
    return max(1, min(8, len(os.sched_getaffinity(0)) - server_args.ranks_per_node - 1))


def launches_triton(server_args: ServerArgs) -> bool:
    """Return True if Triton computes attention on a GPU. With PyTorch's attention nothing is compiled ahead."""
    return server_args.attention_backend in ("auto", "triton")
