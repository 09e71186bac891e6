"""The client of `benchmarks/hostile_callers.py` that sends the same request repeatedly for some seconds.

    python -m benchmarks.hammer HOST:PORT PATH SECONDS FILE

FILE contains the body of the request. Prints one line of JSON: the number of answers with each status, the slowest
answer and the largest reply. The process has the lowest priority, since real callers use processors of their own.
"""

import collections
import http.client
import json
import os
import sys
import time
from pathlib import Path

_REQUEST_SECONDS = 120.0


def main(address: str, path: str, seconds: str, body_path: str) -> None:
    os.nice(19)
    body = Path(body_path).read_bytes()
    statuses: collections.Counter[str] = collections.Counter()
    slowest, largest = 0.0, 0
    deadline = time.monotonic() + float(seconds)
    while not statuses or time.monotonic() < deadline:
        connection = http.client.HTTPConnection(address, timeout=_REQUEST_SECONDS)
        began = time.monotonic()
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            largest = max(largest, len(answer.read()))
            statuses[str(answer.status)] += 1
        except (OSError, http.client.HTTPException) as error:
            statuses[type(error).__name__] += 1
        finally:
            connection.close()
        slowest = max(slowest, time.monotonic() - began)
    figures = {"statuses": dict(statuses), "slowest_answer_s": round(slowest, 3), "largest_reply_bytes": largest}
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
