"""Environments of other packages by name, the code tool, and errors that name what is missing."""

from __future__ import annotations

import ast
import asyncio
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bubblewrap import needs_bubblewrap
from tests.rollout.fakes import env_server
from verl_server.errors import BadRequestError
from verl_server.rollout.environment import EnvError, EnvTimeoutError
from verl_server.rollout.environments.code_tool import CodeTool
from verl_server.rollout.environments.games import GuessNumber
from verl_server.rollout.environments.isolation import isolated
from verl_server.rollout.environments.mcp_tools import McpTools
from verl_server.rollout.environments.named import environment_named


def _run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def test_reasoning_gym_scores_an_answer() -> None:
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym (extra `games`)")
    make = environment_named("reasoning-gym:chain_sum")

    async def play(answer: str) -> tuple[str, float | None]:
        environment = make({"min_digits": 1, "max_digits": 1, "min_terms": 2, "max_terms": 2})
        question = await environment.reset(3)
        _, reward, done = await environment.step(answer)
        assert done
        return question, reward

    question, wrong = _run(play("no number"))
    again, right = _run(play(str(eval(question.split(":")[-1].split("=")[0]))))
    assert question == again and right == 1.0 and wrong is not None and wrong < 1.0


def test_textarena_plays_a_game_with_a_generator_of_its_own() -> None:
    pytest.importorskip("textarena", reason="needs textarena (extra `games`)")
    make = environment_named("textarena:GuessTheNumber-v0")

    async def play(disturb: bool) -> list[Any]:
        environment = make({})
        seen: list[Any] = [await environment.reset(3)]
        for number in range(1, 21):
            if disturb:
                random.seed(number)
                await make({}).reset(number)
            seen.append(await environment.step(f"[{number}]"))
            if seen[-1][2]:
                return seen
        return seen

    random.seed(5)
    before = random.getstate()
    alone = _run(play(False))
    assert random.getstate() == before
    assert alone == _run(play(True))
    assert alone[-1][2] and isinstance(alone[-1][1], float)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("textarena:NoSuchGame", "has no game 'NoSuchGame'"),
        ("textarena:Wordle-v0", "needs data of nltk"),
        ("textarena:TicTacToe-v0", "does not start with one player"),
    ],
)
def test_games_that_cannot_be_played_are_refused(name: str, says: str) -> None:
    pytest.importorskip("textarena", reason="needs textarena (extra `games`)")
    with pytest.raises(BadRequestError, match=says):
        environment_named(name)


def test_an_openenv_server_is_an_environment() -> None:
    async def main() -> None:
        async with env_server(GuessNumber) as url:
            environment = environment_named(url)({})
            assert await environment.reset(1) == "guess 1 to 12"
            number = GuessNumber.hidden(1, 12)
            assert await environment.step(str(number)) == ("correct", 1.0, True)
            await environment.close()

    _run(main())


@pytest.mark.parametrize(
    ("package", "make", "says"),
    [
        ("textarena", lambda: environment_named("textarena:X-v0"), r"verl-server\[games\]"),
        ("reasoning_gym", lambda: environment_named("reasoning-gym:chain_sum"), r"verl-server\[games\]"),
        ("mcp", lambda: McpTools("http://127.0.0.1:1/mcp"), r"verl-server\[mcp\]"),
    ],
)
def test_a_missing_package_is_named(package: str, make: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BadRequestError, match=says):
        make()


@pytest.mark.parametrize("name", ["reasoning-gym:", "no-such:thing", "plain"])
def test_a_name_that_names_nothing_is_refused(name: str) -> None:
    with pytest.raises(BadRequestError, match=r"name behind the colon|is no environment"):
        environment_named(name)


def test_code_does_not_run_without_isolation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadRequestError, match=r"apt install bubblewrap.*isolation=\"none\""):
        CodeTool()
    with pytest.raises(BadRequestError, match="must be"):
        CodeTool(isolation="perhaps")  # type: ignore[arg-type]


def test_bubblewrap_shows_the_code_nothing_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\n")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    command = isolated(["python", "-c", "1"], "bubblewrap")
    assert command[0] == str(bwrap) and command[-4:] == ["--", "python", "-c", "1"]
    assert {"--unshare-all", "--clearenv", "--die-with-parent", "--new-session"} <= set(command)
    shown = [command[i + 1] for i, word in enumerate(command) if word.endswith("bind")]
    assert "--bind" not in command and not {"/", "/home", "/root", "/tmp", "/etc"} & set(shown)


def test_the_code_tool_runs_programs_with_bounds() -> None:
    async def main() -> None:
        tool = CodeTool("compute", isolation="none", seconds=5.0, memory_bytes=2**28)
        assert await tool.reset(None) == "compute"
        assert await tool.call("run_python", {"code": "print(6 * 7)"}) == "42\n"
        assert "ZeroDivisionError" in await tool.call("run_python", {"code": "1 / 0"})
        assert "MemoryError" in await tool.call("run_python", {"code": "'x' * 2**30"})
        with pytest.raises(BadRequestError):
            await tool.call("run_python", {"text": "1"})
        quick = CodeTool(isolation="none", seconds=0.5)
        assert "longer than 0.5 s" in await quick.call("run_python", {"code": "while True: pass"})

    _run(main())


_ESCAPE = """
import os, socket, sys
found = {}
found["home"] = os.path.exists(FILE)
found["variables"] = sorted(set(os.environ) - {"PATH", "HOME", "LANG", "PWD", "LC_CTYPE"})
try:
    open("/usr/escape", "w")
    found["writes"] = True
except OSError:
    found["writes"] = False
try:
    socket.create_connection(("127.0.0.1", PORT), 2)
    found["network"] = True
except OSError:
    found["network"] = False
found["processes"] = [p for p in os.listdir("/proc") if p.isdigit() and int(p) > 20]
print(found)
"""


_SIZES = """
import os
def writes(folder):
    try:
        open(folder + "/x", "w").close()
        return True
    except OSError:
        return False
folders = ["/tmp", "/dev/shm"]
states = [os.statvfs(folder) for folder in folders]
sizes = [state.f_blocks * state.f_frsize for state in states]
print({"sizes": sizes, "writes": [f for f in [*folders, "/", "/dev", "/usr", "/proc"] if writes(f)]})
"""


@needs_bubblewrap
def test_bubblewrap_isolates_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program looks for a file of the user, the runner's variables, other processes, and a port that listens."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    monkeypatch.setenv("SOME_SECRET", "secret")

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            code = _ESCAPE.replace("FILE", repr(str(secret))).replace("PORT", str(listening.getsockname()[1]))
            tool = CodeTool(seconds=20.0)
            found = await tool.call("run_python", {"code": code})
        nothing = {"home": False, "variables": [], "writes": False, "network": False, "processes": []}
        assert ast.literal_eval(found) == nothing, found
        sizes = await tool.call("run_python", {"code": _SIZES})
        assert ast.literal_eval(sizes) == {"sizes": [2**30, 2**30], "writes": ["/tmp", "/dev/shm"]}, sizes
        assert "longer than 1 s" in await CodeTool(seconds=1.0).call("run_python", {"code": "while True: pass"})

    _run(main())


_MCP_SERVER = """
import os, time
from mcp.server.mcpserver import MCPServer
server = MCPServer("test")
@server.tool()
def add(a: int, b: int) -> str:
    "Add two numbers."
    return str(a + b)
@server.tool()
def fail() -> str:
    raise ValueError("no")
@server.tool()
def secret() -> str:
    return os.environ.get("SOME_SECRET", "none")
@server.tool()
def hang() -> str:
    time.sleep(600)
@server.tool()
def die() -> str:
    os._exit(1)
server.run("stdio")
"""


def test_mcp_tools_on_stdio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp", reason="needs mcp (extra `mcp`)")
    monkeypatch.setenv("SOME_SECRET", "secret")
    script = tmp_path / "server.py"
    script.write_text(_MCP_SERVER)
    env = {"PYTHONPATH": ":".join(sys.path)}

    async def main() -> None:
        tools = McpTools([sys.executable, str(script)], "use the tools", env=env)
        assert await tools.reset(1) == "use the tools"
        assert tools.tools[0]["function"]["name"] == "add"
        assert await tools.call("add", {"a": 2, "b": 3}) == "5"
        assert (await tools.call("fail", {})).startswith("Error")
        assert await tools.call("secret", {}) == "none"
        with pytest.raises(EnvError):
            await tools.call("die", {})
        await tools.close()
        slow = McpTools([sys.executable, str(script)], env=env, seconds=8.0)
        await slow.reset(1)
        slow._seconds = 0.5
        with pytest.raises(EnvTimeoutError, match="hang within"):
            await slow.call("hang", {})
        with pytest.raises(EnvError, match="has ended"):
            await slow.call("add", {"a": 1, "b": 1})

    _run(main())


def test_mcp_tools_over_streamable_http(tmp_path: Path) -> None:
    """A server of the package in a process of its own; a call that its caller cancels leaves the connection usable."""
    pytest.importorskip("mcp", reason="needs mcp (extra `mcp`)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = tmp_path / "server.py"
    script.write_text(_MCP_SERVER.replace('run("stdio")', f'run("streamable-http", port={port})'))
    env = os.environ | {"PYTHONPATH": ":".join(sys.path)}

    async def main() -> None:
        tools = McpTools(f"http://127.0.0.1:{port}/mcp", "use the tools")
        assert await tools.reset(1) == "use the tools"  # the server begins to listen meanwhile
        assert [tool["function"]["name"] for tool in tools.tools] == ["add", "fail", "secret", "hang", "die"]
        assert await asyncio.gather(*(tools.call("add", {"a": i, "b": 1}) for i in range(4))) == ["1", "2", "3", "4"]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await tools.call("hang", {})
        assert await tools.call("add", {"a": 2, "b": 2}) == "4"
        assert await tools.step("the answer") == ("", None, True)
        await tools.close()
        await tools.close()

    server = subprocess.Popen([sys.executable, str(script)], env=env, stderr=subprocess.DEVNULL)
    try:
        _run(main())
    finally:
        server.kill()
        server.wait(10)


def test_an_mcp_server_that_does_not_start_is_an_error() -> None:
    pytest.importorskip("mcp", reason="needs mcp (extra `mcp`)")

    async def main() -> None:
        tools = McpTools([sys.executable, "-c", "raise SystemExit(3)"])
        with pytest.raises(EnvError, match="did not start"):
            await tools.reset(1)
        await tools.close()

    _run(main())
