"""Sessions of a run that demands a version: what they state, and whose fault it is when the version goes away."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse

from tests.rollout.agents.common import FAST, program, says_number
from tests.rollout.agents.test_faults import two_turns
from tests.rollout.fake_sessions import OWNER_KEY, fake_server
from verl_server.errors import ServerDiedError, VersionBehindError
from verl_server.messages.session_types import CreateSession
from verl_server.rollout.agents.run import arun_agents
from verl_server.rollout.agents.servers import ServerPool
from verl_server.rollout.agents.sessions_client import SessionsClient
from verl_server.rollout.agents.types import AgentTask, Server
from verl_server.rollout.trajectory import StopReason


@pytest.mark.parametrize(
    ("version", "served", "demand"),
    [("7", "7", (None, "7")), (">=7@5f2c9a1e", "8@5f2c9a1e", ("7@5f2c9a1e", None)), (None, "7", (None, None))],
)
def test_the_version_of_a_run_is_the_demand_of_its_sessions(
    version: str | None, served: str, demand: tuple[str | None, str | None]
) -> None:
    async def main() -> None:
        async with fake_server(says_number) as fake:
            fake.model, fake.version = "m", served
            async with (
                ServerPool([Server(fake.url, OWNER_KEY)], version=version) as pool,
                pool.session(CreateSession(group="g"), 5) as (_, created),
            ):
                request = fake.sessions[created.id].request
            assert (request.group, request.min_weight_version, request.exact_weight_version) == ("g", *demand)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("agent", [two_turns, program("chat('say 1'); chat('say 2')")])
def test_an_agent_that_fails_because_its_version_was_replaced_is_no_failure_of_the_policy(agent: Any) -> None:
    async def main() -> None:
        def replace_version(messages: list[dict[str, Any]]) -> Any:
            if messages[-1]["content"] == "say 1":
                return "1"
            fake.version = "8"
            return JSONResponse({"error": {"message": "superseded", "code": "weight_version_superseded"}}, 409)

        async with fake_server(replace_version) as fake:
            fake.model = "m"
            servers = [Server(fake.url, OWNER_KEY)]
            limits, options = FAST, {"reward": lambda episode: 0.5, "retries": 0, "version": "7"}
            result = await arun_agents(agent, [AgentTask()], servers=servers, limits=limits, **options)
            (episode,) = result.episodes
            assert (episode.reason, episode.reward) == (StopReason.GENERATION_ERROR, None)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_router_that_holds_a_version_back_is_tried_again() -> None:
    async def main() -> None:
        def answer(request: httpx.Request) -> httpx.Response:
            error = {"message": "not yet", "code": "weight_version_behind"}
            return httpx.Response(409 if request.url.path == "/sessions" else 503, json={"error": error})

        client = SessionsClient("http://router:1", OWNER_KEY, httpx.MockTransport(answer))
        async with client:
            with pytest.raises(VersionBehindError, match="not yet"):
                await client.create(CreateSession())
            with pytest.raises(ServerDiedError):  # no healthy server says whether it generates for anybody
                await client.is_open()

    asyncio.run(main())
