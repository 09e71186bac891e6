"""The child process of `test_start`: a scheduler process that reports the imported modules when it is ready."""

from __future__ import annotations

import sys
from typing import Any

from verl_server.ipc.child_process import child_main
from verl_server.scheduler.process import run_scheduler


def run_reporting(argument: dict[str, Any], ready: Any) -> None:
    run_scheduler(argument, lambda info: ready(info | {"modules": sorted(sys.modules)}))


if __name__ == "__main__":
    child_main(run_reporting)
