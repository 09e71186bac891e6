"""The limit of open files (RLIMIT_NOFILE), which shells set low: every connection needs a file descriptor.

Each process that holds many connections calls `raise_descriptor_limit` once: the HTTP server, the HTTP client and the
environment server.
"""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

_WANTED = 65_536
"""The new limit, unless more is needed. It is the number of ports; a much larger limit would slow down
programs that check every descriptor up to the limit."""
DESCRIPTOR_SLACK = 128
"""Number of descriptors for libraries, pipes, model files and logs, in addition to connections."""


def raise_descriptor_limit(connections: int | None = None, reason: str = "") -> int:
    """Raise this process's soft limit of open files, at most to its hard limit. Return the new soft limit.

    Logs a warning if the limit is too low for `connections` connections; `reason` names the source of that number.
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
        except (OSError, ValueError) as error:  # a sandbox may forbid the call, and macOS refuses large numbers
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
