"""The operations that servers have, as the router sees them: read from the table `web/operations.json`.

`docs/generate.py` writes the table from the dialects' own declarations, so the router knows every path that a server
has without importing one. `router` resolves each request with it.
"""

from __future__ import annotations

from importlib.resources import files

import msgspec


class RoutedOperation(msgspec.Struct, frozen=True):
    """One operation of a server."""

    paths: tuple[str, ...]
    methods: tuple[str, ...]
    dialect: str
    """Name of the dialect, in whose shape errors are answered."""
    access: str
    """open, key, control, owner or local_owner (`server.http.operation.Access`)."""
    in_session: bool = False
    """True if a session key permits the operation."""
    generates: bool = False
    """True if the operation samples tokens."""

    @property
    def name(self) -> str:
        return self.paths[0]


def server_operations() -> list[RoutedOperation]:
    """Return the operations of all dialects."""
    table = files("verl_server.web").joinpath("operations.json").read_bytes()
    return msgspec.json.decode(table, type=list[RoutedOperation])
