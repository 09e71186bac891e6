"""The plugin that vLLM loads in each of its processes (`vllm.general_plugins`). It ends a process with its parent.

Otherwise vLLM's engine process would continue without the process that started it, and keep the GPUs. The plugin acts
only in engines that `VllmDriver` started. vLLM forks its processes on a GPU, and a forked process does not load plugins
again, because its parent has loaded them. So the request is made again in each forked process.
"""

from __future__ import annotations

import ctypes
import os
import signal

ENDS_WITH_PARENT = "VERL_SERVER_VLLM_ENDS_WITH_PARENT"
"""Environment variable that `VllmDriver` sets for the processes of its engine."""
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Make this process, and each process that it forks, end with its parent. Does nothing in other engines."""
    if ENDS_WITH_PARENT in os.environ:
        _ask_kernel()
        os.register_at_fork(after_in_child=_ask_kernel)  # a forked process does not inherit the request


def _ask_kernel() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
