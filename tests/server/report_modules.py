"""A server process that reports which modules are imported when it is ready. `test_start` starts it."""

from __future__ import annotations

import sys
from typing import Any

from verl_server.ipc.child_process import child_main
from verl_server.server import launch


def serve_reporting(argument: dict[str, Any], ready: Any) -> None:
    launch._serve_child(argument, lambda info: ready(info | {"modules": sorted(sys.modules)}))


if __name__ == "__main__":
    child_main(serve_reporting)
