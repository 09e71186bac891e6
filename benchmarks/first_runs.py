"""The program that `benchmarks/first_minute.py` starts: one engine that runs a workload twice.

It reads JSON from stdin: `settings` of `Engine`, the `shape` whose workload runs, and `requests`, the number of its
requests (null: all). It prints one line: the seconds until the engine was ready, those of each run, the output tokens
of a run, and the engine's memory figures at the end.
"""

import time

entered = time.monotonic()

import json  # noqa: E402
import sys  # noqa: E402

from benchmarks.offline import run_once  # noqa: E402
from benchmarks.workload import make_workload  # noqa: E402
from verl_server import Engine  # noqa: E402


def main() -> None:
    given = json.load(sys.stdin)
    work = make_workload(given["shape"]).first(given["requests"])
    with Engine(**given["settings"]) as engine:
        ready = time.monotonic() - entered
        runs = [run_once(engine, work, logprobs=False) for _ in range(2)]
        memory = engine.get_internal_state()["memory"]
    print(json.dumps({"ready": ready, "runs": runs, "tokens": work.output_tokens, "memory": memory}), flush=True)


if __name__ == "__main__":
    main()
