"""`is_loopback`: checks if only programs of this machine reach a listening address."""

from __future__ import annotations

import functools
import ipaddress


@functools.lru_cache(maxsize=64)
def is_loopback(host: str) -> bool:
    """Return True if only programs of this machine can connect to a server that listens on `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
