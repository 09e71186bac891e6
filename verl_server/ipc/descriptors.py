"""The limit of open files (RLIMIT_NOFILE): every connection takes a descriptor, and shells start programs with few.

Called once by each process that holds many connections: the HTTP server, the HTTP client and the environment server.
"""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

_WANTED = 65_536
"""Raise no further than a port has numbers for: some programs look at every descriptor up to the limit."""
DESCRIPTOR_SLACK = 128
"""Descriptors that a process needs besides its connections: libraries, pipes, model files, logs."""


def raise_descriptor_limit(connections: int | None = None, reason: str = "") -> int:
    """Raise this process's soft limit of open files toward its hard limit; returns the soft limit that holds now.

    Logs a warning if the limit stays below what `connections` need; `reason` says where that number comes from.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = (connections or 0) + DESCRIPTOR_SLACK
    wanted = max(_WANTED, needed)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError) as error:  # a sandbox may forbid it, macOS refuses large numbers
            logger.debug("The limit of open files stays at %d: %s", soft, error)
    if soft != resource.RLIM_INFINITY and soft < needed:
        logger.warning(
            "This process may open %d files, but %d connections (%s) need %d. Beyond the limit, connections wait or "
            "fail. Raise the hard limit: `ulimit -Hn` in the shell of root, LimitNOFILE= of systemd, or "
            "`--ulimit nofile=` of docker.",
            soft,
            connections,
            reason,
            needed,
        )
    return soft
