"""A scheduler process that says which modules are imported when it is ready: the child of `test_start`."""

from __future__ import annotations

import sys
from typing import Any

from verl_server.ipc.child_process import child_main
from verl_server.scheduler.process import run_scheduler


def run_reporting(argument: dict[str, Any], ready: Any) -> None:
    run_scheduler(argument, lambda info: ready(info | {"modules": sorted(sys.modules)}))


if __name__ == "__main__":
    child_main(run_reporting)
