"""A process with SGLang: the entry of `ChildProcess` for `engine="sglang"`."""

from __future__ import annotations

from functools import partial

from verl_server.backends.process.run import run_backend
from verl_server.backends.sglang.driver import SglangDriver
from verl_server.ipc.child_process import child_main

if __name__ == "__main__":
    child_main(partial(run_backend, SglangDriver))
