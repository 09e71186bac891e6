"""A process with vLLM: the entry of `ChildProcess` for `engine="vllm"`."""

from __future__ import annotations

from functools import partial

from verl_server.backends.process.run import run_backend
from verl_server.backends.vllm.driver import VllmDriver
from verl_server.ipc.child_process import child_main

if __name__ == "__main__":
    child_main(partial(run_backend, VllmDriver))
