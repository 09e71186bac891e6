"""Errors of the page's server: a status, what is wrong, and what helps. `app` answers them as `ErrorAnswer`."""

from __future__ import annotations

from verl_server.errors import VerlServerError


class PageError(VerlServerError):
    """A request that cannot be answered."""

    def __init__(self, status: int, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.status_code = status
        self.remedy = remedy
