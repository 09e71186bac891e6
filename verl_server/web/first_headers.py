"""`first_headers`: the headers of a request as a dict, for the checks that run before each route.

Starlette's `Headers` compares a name with all headers at each look-up, and raises and catches an error if there is
none. Half a dozen look-ups for each request took 0.1 ms when the caches were cold, as they are at a weight push.
"""

from __future__ import annotations

from starlette.types import Scope


def first_headers(scope: Scope) -> dict[bytes, bytes]:
    """Return lower-case name -> value. If a header is repeated, its first value is returned."""
    return dict(reversed(scope["headers"]))
