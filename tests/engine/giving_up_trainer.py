"""The trainer process of `test_give_up`, which pushes once for each line on its stdin.

Arguments: `URL registered|once PARAMETER SIZE`.
"""

from __future__ import annotations

import os
import sys

import torch

from verl_server import HttpServerEngineAdapter


def main(url: str, how: str, parameter: str, size: str) -> None:
    engine = HttpServerEngineAdapter.attach(url, admin_api_key=os.environ["VERL_SERVER_ADMIN_API_KEY"])
    named = [(parameter, torch.full((int(size),), 2.0))]
    if how == "registered":
        engine.register_weights(named)

    def push() -> tuple[bool, str]:
        if how == "registered":
            return engine.push_weights(partial=True)
        return engine.update_weights_from_tensor(named, partial=True)

    print("ready", flush=True)
    sys.stdin.readline()
    try:
        push()
    except KeyboardInterrupt as error:
        named[0][1].fill_(3.0)
        print(*error.__notes__, flush=True)
    sys.stdin.readline()
    print(push()[0], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
