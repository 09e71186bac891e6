"""`Control`: requests that concern the servers themselves, such as a pause.

A closed table says for each control route of the servers what happens at the router: it reaches all servers, or it is
refused with what to do instead. A route that is not in the table is refused, too.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from verl_server.errors import ServerDiedError, UpdateConflictError
from verl_server.fleet.answers import NotThroughRouterError
from verl_server.fleet.members import Fleet, Member, State
from verl_server.fleet.requests import RoutedRequest, decoded
from verl_server.fleet.upstream import Headers

TO_ALL = frozenset(
    {
        "/abort_request",
        "/abort_requests",
        "/accept_restart",
        "/configure_logging",
        "/continue_generation",
        "/flush_cache",
        "/freeze_gc",
        "/pause",
        "/pause_generation",
        "/release_memory_occupation",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/resume",
        "/resume_memory_occupation",
        "/set_internal_state",
        "/sleep",
        "/update_weights_from_disk",
        "/wake_up",
    }
)
"""Routes that reach every server that answers."""
_PUSHES = "Weights are pushed to the servers themselves, not through the router"
_EACH = "The answer differs from server to server, so ask each of them"
_REFUSED = {
    "/get_weights_by_name": _EACH,
    "/weights_checker": _EACH,
    "/start_profile": "A profile is written by one server: call it there",
    "/stop_profile": "A profile is written by one server: call it there",
    "/update_weight_version": "A new label for the same weights is given to one server after another: call it there",
    "/collective_rpc": "It calls a method of one server's workers: call it there",
    "/slow_down": "It concerns one server: call it there",
    "/post_process_weights": _PUSHES,
} | dict.fromkeys(
    [
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/register_weights",
        "/unregister_weights",
        "/begin_weight_update",
        "/end_weight_update",
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/pull_weights",
        "/init_weight_transfer_engine",
        "/shutdown_weight_transfer_engine",
        "/start_weight_update",
        "/start_draft_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reload_weights",
        "/init_broadcaster",
    ],
    _PUSHES,
)
"""Route -> why the router does not carry it out."""
_ADAPTERS = "Adapters are not served"
_CONTROL_SECONDS = 900.0
"""Seconds that a server may take. An update from disk takes minutes."""
_MOST_ANSWER = 16 * 2**20


def aborts_all(path: str, body: bytes) -> bool:
    """Return True if a request may abort the requests of others, which is a control call by what its body says."""
    if path == "/abort_request":
        given = decoded(body, Any)
        return isinstance(given, dict) and given.get("abort_all") not in (None, False)
    if path == "/abort_requests":
        given = decoded(body, Any)
        return not (isinstance(given, dict) and given.get("request_ids"))
    return False


@dataclass
class Reached:
    """The answers of the servers that a request has reached."""

    member: Member
    status: int
    headers: Headers
    body: bytes


class Control:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def check(self, request: RoutedRequest) -> None:
        """Raise NotThroughRouterError for a route that does not reach all servers, with what to do instead."""
        name = request.operation.name
        urls = ", ".join(member.url for member in self._fleet.members)
        if name not in TO_ALL:
            why = _REFUSED.get(name, _ADAPTERS if "lora" in name else "It concerns one server: call it there")
            raise NotThroughRouterError(f"{request.method} {name} does not go through the router. {why}: {urls}.")
        if name == "/accept_restart" and self._fleet.versions.committed is not None:
            raise NotThroughRouterError(
                f"{name} does not go through the router while servers have weights that a trainer pushed, because the "
                "others would serve what they loaded. Push to the server that was started again, or call it there: "
                f"{urls}."
            )
        if name == "/update_weights_from_disk" and not _label(request.body):
            raise NotThroughRouterError(
                f"{name} through the router needs `weight_version`: without it each server would make a label of its "
                "own, and the servers would count as having different weights."
            )

    async def send_to_all(self, request: RoutedRequest, headers: Headers) -> Reached:
        """Send the request to all servers that answer. Return the answer of the first one if all have carried it out.

        Raise UpdateConflictError, which names each server, if some have not.
        """
        members = [each for each in self._fleet.members if each.state not in (State.DEAD, State.STARTING)]
        if not members:
            raise ServerDiedError("No server answers, so nothing was done.")
        results = await asyncio.gather(*(self._send(member, request, headers) for member in members))
        failed = [one for one in results if isinstance(one, str) or one.status >= 300]
        reached = [one for one in results if isinstance(one, Reached)]
        if not failed:
            return reached[0]
        if len(reached) == len(results) and len({one.status for one in reached}) == 1:
            return reached[0]  # all have refused it alike
        told = [
            f"{member.url}: {one if isinstance(one, str) else f'{one.status} {_text(one.body)}'}"
            for member, one in zip(members, results, strict=True)
        ]
        raise UpdateConflictError(f"{request.operation.name} did not succeed on all servers. {'; '.join(told)}")

    async def _send(self, member: Member, request: RoutedRequest, headers: Headers) -> Reached | str:
        """Return the answer of a server, or why there is none."""
        exchange = None
        try:
            async with asyncio.timeout(_CONTROL_SECONDS):
                exchange = await member.upstream.send(request.method, request.target, headers, request.body)
                await exchange.started()
                body = await exchange.whole(_MOST_ANSWER)
                return Reached(member, exchange.status, exchange.headers, body)
        except TimeoutError:
            return f"no answer within {_CONTROL_SECONDS:g} s"
        except ServerDiedError as error:
            return str(error)
        finally:
            if exchange is not None:
                exchange.close()


class _Labelled(msgspec.Struct):
    weight_version: str | int | None = None


def _label(body: bytes) -> str | int | None:
    found = decoded(body, _Labelled)
    return None if found is None else found.weight_version


def _text(body: bytes) -> str:
    return body[:300].decode("utf-8", "replace")
