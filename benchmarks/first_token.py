"""The program that `benchmarks/startup.py` times: it starts one engine and generates the first tokens.

It reads the engine's settings as JSON from stdin, and prints one line: the time at which each phase ended, in seconds
of `time.monotonic`, which is the same clock in all processes of a host. Keys that begin with `scheduler_` are phases of
rank 0's scheduler process.
"""

import time

entered = time.monotonic()

import json  # noqa: E402
import sys  # noqa: E402

from verl_server import Engine  # noqa: E402

imported = time.monotonic()


def main() -> None:
    settings = json.load(sys.stdin)
    with Engine(**settings) as engine:
        ready = time.monotonic()
        params = {"ignore_eos": True, "temperature": 0.0}
        engine.generate(input_ids=[5], sampling_params=params | {"max_new_tokens": 1})
        first_token = time.monotonic()
        engine.generate(input_ids=[5], sampling_params=params | {"max_new_tokens": 16})
        moments = {"entered": entered, "imported": imported, "ready": ready, "first_token": first_token}
        moments |= {f"scheduler_{phase}": moment for phase, moment in engine.scheduler_info["start"].items()}
        print(json.dumps(moments | {"first_16_tokens": time.monotonic()}), flush=True)


if __name__ == "__main__":
    main()
