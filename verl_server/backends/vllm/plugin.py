"""The plugin that vLLM loads in each of its processes (`vllm.general_plugins`). It ends a process with its parent.

Otherwise vLLM's engine process would continue without the process that started it, and keep the GPUs. The plugin acts
only in engines that `VllmDriver` started.
"""

from __future__ import annotations

import ctypes
import os
import signal

ENDS_WITH_PARENT = "VERL_SERVER_VLLM_ENDS_WITH_PARENT"
"""Environment variable that `VllmDriver` sets for the processes of its engine."""
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends. Does nothing in processes of other engines."""
    if ENDS_WITH_PARENT in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
