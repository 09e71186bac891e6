"""`warm_up`: compiles everything that a server compiles at its first start on a machine. For `verl-server warm-up`."""

from __future__ import annotations

import importlib.util
from collections import Counter

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.kernels.compilation import cache_folder
from verl_server.kernels.cpu.library import load_library
from verl_server.server_args import ServerArgs
from verl_server.worker.cuda_context import GpuKind, find_gpu
from verl_server.worker.startup.compile_ahead import compile_request, launches_triton


def warm_up(server_args: ServerArgs, capability: float | None = None, multiprocessors: int | None = None) -> str:
    """Fill the cache for a GPU, or for this processor with `device="cpu"`.

    Return a text that names the compiled kernels and the cache's folder.

    The GPU is this machine's GPU, or a GPU with the compute capability `capability` (for example 9.0) and
    `multiprocessors` multiprocessors. Raise VerlServerError if something cannot be compiled.
    """
    if server_args.engine != "embedded":
        raise BadRequestError(f"warm-up compiles kernels of the embedded engine, not of engine={server_args.engine!r}.")
    if server_args.device == "cpu":
        library = load_library()
        return f"The compiled kernels for this processor are {library.name} in {library.folder or 'no cache folder'}."
    if (capability is None) != (multiprocessors is None):
        raise BadRequestError("Set both --gpu-capability and --gpu-multiprocessors, or neither.")
    gpu = find_gpu(server_args)
    if capability is not None and multiprocessors is not None:
        gpu = GpuKind.of(round(10 * capability), multiprocessors)
    if gpu is None:
        raise BadRequestError(
            "There is no GPU on this machine. Name the GPU on which the server will run: --gpu-capability 9.0 "
            "--gpu-multiprocessors 132 for H100 SXM and H200. Or set device='cpu'."
        )
    if not launches_triton(server_args):
        raise BadRequestError(f"attention_backend={server_args.attention_backend!r} has no kernels to compile ahead.")
    if importlib.util.find_spec("triton") is None:
        raise VerlServerError("Triton is not installed, so there is nothing to compile. Run pip install triton.")
    from verl_server.worker.startup.compile_process import compile_all

    done = compile_all(compile_request(server_args, gpu))
    if done.failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in done.failed.items())
        raise VerlServerError(f"{len(done.failed)} kernels could not be compiled: {reasons}")
    names = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in Counter(done.compiled).items())
    return (
        f"Compiled {len(done.compiled)} kernels in {done.seconds:.1f} s for compute capability {gpu.capability / 10} "
        f"with {gpu.multiprocessors} multiprocessors; {done.cached} were there. The Triton cache is {cache_folder()} "
        f"(TRITON_CACHE_DIR).{f' Compiled: {names}.' if names else ''}"
    )
