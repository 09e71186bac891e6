"""`RouterArgs`: the options of `verl-server router`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tyro.conf import UseAppendAction

from verl_server.engine.server_address import server_address
from verl_server.errors import BadRequestError
from verl_server.web.addresses import is_loopback

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_MOST_SECONDS = 1e6


@dataclass(frozen=True)
class RouterArgs:
    """Serve several rollout servers of one model behind one address, until SIGTERM or Ctrl-C.

    Every route of the servers exists at the router. Bodies, streams and answers pass as they are. A session stays with
    its server; a new prompt goes where its beginning is cached, else to the server with the least work. Weights are
    pushed to the servers themselves, and the router serves a version when all servers have it. Nothing is stored: a
    router that is started again learns everything from the servers. docs/router.md has the rules.

    Exit status: 0 after SIGTERM or Ctrl-C, 1 if the router cannot start, 2 for wrong options.
    """

    server: UseAppendAction[tuple[str, ...]]
    """URL of a server, such as http://127.0.0.1:30000. Repeat the option for each server."""
    host: str = "127.0.0.1"
    """Address to listen on. An address that is not loopback needs --api-key-file or --allow-unauthenticated."""
    port: int = 30080
    """TCP port. 0 selects a free one."""
    name: str = "fleet"
    """Name of the fleet. Clients see it as the instance of a server: keep it when the router is started again."""
    api_key_file: Path | None = None
    """File with the key that callers send to the router. Without it, the servers check the keys of callers."""
    admin_api_key_file: Path | None = None
    """File with the router's own key for control routes. It is replaced by the servers' admin key."""
    server_api_key_file: Path | None = None
    """File with the `api_key` of the servers. The router sends it for callers whose key is the router's api key."""
    server_admin_api_key_file: Path | None = None
    """File with the `admin_api_key` of the servers. It stays with the router."""
    allow_unauthenticated: bool = False
    """Permit an address that is not loopback without a key."""
    serve_loaded_weights: bool = False
    """Serve the weights that servers loaded before every server has answered. One of them may have pushed weights."""
    hold_seconds: float = 60.0
    """Most seconds that a request waits for a server, or for a version that it demands."""
    stale_after: float = 30.0
    """Seconds after which a server that lacks the newest version is left out, if no trainer says so before."""
    probe_interval: float = 1.0
    """Seconds between two looks at a server."""
    probe_timeout: float = 5.0
    """Seconds that a server may take to answer a look. It needs milliseconds, also while it generates or is updated."""
    dead_after: int = 3
    """Failed looks in a row after which a server counts as dead. Its connections are closed then."""
    healthy_after: int = 2
    """Successful looks in a row after which a dead server counts again. A suspect one needs one."""
    spill_margin: float = 0.2
    """Share of a cache. A request leaves its cache if more tokens than that, and 1.5 times the least, are in flight.
    A conversation leaves it at twice the share."""
    max_request_bytes: int = 64 * 2**20
    """Most bytes of a request. The router holds a request until a server has answered it, to repeat it elsewhere."""
    max_held_bytes: int = 4 * 2**30
    """Most bytes of all requests together. Further ones are answered 503."""
    log_level: str = "warning"
    """Level of the router's log: debug, info, warning or error."""

    def __post_init__(self) -> None:
        if not self.server:
            raise BadRequestError("RouterArgs.server is empty: name at least one server, --server http://HOST:PORT.")
        urls = [server_address(url) for url in self.server]
        if any("@" in urlsplit(url).netloc for url in urls):
            raise BadRequestError("RouterArgs.server has a user or a password, which every answer would show.")
        twice = sorted({url for url in urls if urls.count(url) > 1})
        if twice:
            raise BadRequestError(f"RouterArgs.server names {', '.join(twice)} more than once.")
        object.__setattr__(self, "server", tuple(urls))
        if not 0 <= self.port <= 65535:
            raise BadRequestError(f"RouterArgs.port={self.port} must be from 0 to 65535.")
        for field in ("hold_seconds", "stale_after", "probe_interval", "probe_timeout", "spill_margin"):
            if not 0 < getattr(self, field) < _MOST_SECONDS:
                raise BadRequestError(
                    f"RouterArgs.{field}={getattr(self, field):g} must be above 0 and below {_MOST_SECONDS:g}."
                )
        for field in ("dead_after", "healthy_after", "max_request_bytes", "max_held_bytes"):
            if getattr(self, field) < 1:
                raise BadRequestError(f"RouterArgs.{field}={getattr(self, field)} must be at least 1.")
        if self.log_level.upper() not in _LEVELS:
            raise BadRequestError(
                f"RouterArgs.log_level={self.log_level!r} must be one of {', '.join(_LEVELS).lower()}."
            )
        if not self.name or not self.name.isascii() or not self.name.isprintable() or " " in self.name:
            raise BadRequestError("RouterArgs.name must be one or more printable ASCII characters without spaces.")
        if not (is_loopback(self.host) or self.api_key_file or self.allow_unauthenticated):
            raise BadRequestError(
                f"RouterArgs.host={self.host} can be reached from other machines, and the router has no key. Set "
                "RouterArgs.api_key_file, or RouterArgs.allow_unauthenticated if you trust the network."
            )
