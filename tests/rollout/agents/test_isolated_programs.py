"""Programs in bubblewrap: what they cannot see and reach, their own addresses, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.bubblewrap import needs_bubblewrap
from tests.rollout.agents.common import (
    FAST,
    Echo,
    is_alive,
    play_isolated,
    run_isolated,
    session_of,
    wait_for,
)
from tests.rollout.fake_sessions import OWNER_KEY, fake_server
from verl_server.rollout.agents.ends import End, own_end
from verl_server.rollout.agents.gateway import EnvironmentGateway, Referee
from verl_server.rollout.agents.program import (
    PlaceError,
    ProgramExit,
    check_program,
    probe_program,
    program_place,
    run_program,
)
from verl_server.rollout.agents.types import AgentSession, AgentTask
from verl_server.rollout.faults import FAULTS
from verl_server.rollout.trajectory import Fault, StopReason

pytestmark = needs_bubblewrap


_LOOK = """
import socket, glob
def reaches(family, address):
    with socket.socket(family) as sock:
        sock.settimeout(2)
        try:
            sock.connect(address)
            return True
        except OSError:
            return False
def reads(path):
    try:
        return open(path, "rb").read(1) is not None
    except OSError:
        return False
def writes(path):
    try:
        open(path, "w").close()
        return True
    except OSError:
        return False
seen = dict(
    internet=reaches(socket.AF_INET, ("1.1.1.1", 443)),
    runner=reaches(socket.AF_INET, ("127.0.0.1", PORT)),
    abstract=reaches(socket.AF_UNIX, ABSTRACT),
    files=[path for path in FILES if os.path.exists(path)],
    homes=[path for path in glob.glob("/root/*") + glob.glob("/home/*") if path != "/home/agent"],
    processes=[pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) > 20],
    marks=[pid for pid in os.listdir("/proc") if pid.isdigit() and any(
        mark in open(f"/proc/{pid}/cmdline", "rb").read() for mark in (b"verl" + b"-agent-", b"v" + b"s-"))],
    bridge=[reads(f"/proc/{os.getppid()}/{name}") for name in ("environ", "mem", "fd/200")],
    writes=[path for path in ("/x", "/usr/x", "/etc/passwd", "/dev/x", "/run/verl/x", "/home/x") if writes(path)],
    variables=sorted(set(os.environ) - {"PATH", "HOME", "TMPDIR", "LANG", "LC_CTYPE", "TZ", "PWD", "OPENAI_BASE_URL"}),
    ids=[os.getuid(), os.getgid()],
    host=socket.gethostname(),
    descriptors=sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1],
)
print(json.dumps(seen))
"""


def test_a_program_sees_and_reaches_nothing_of_the_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "secret")
    key_file, out = tmp_path / "key", tmp_path / "out"
    key_file.write_text(OWNER_KEY)
    out.mkdir()
    name = f"\0verl-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(name)
        abstract.listen()
        code = _LOOK.replace("PORT", str(listening.getsockname()[1])).replace("ABSTRACT", repr(name))
        code = code.replace("FILES", repr([str(key_file), str(out), str(Path.home() / ".bashrc"), __file__]))
        exit = play_isolated(code, tmp_path)
    seen = json.loads(exit.stdout)
    assert seen.pop("homes") in ([], [str(path) for path in [Path.home() / ".pyenv"] if path.exists()])
    assert seen == {
        "internet": False,
        "runner": False,
        "abstract": False,
        "files": [],
        "processes": [],
        "marks": [],
        "bridge": [False, False, False],
        "writes": [],
        "variables": [],
        "ids": [1000, 1000],
        "host": "sandbox",
        "descriptors": [0, 1, 2],
    }


def test_its_paths_and_addresses_are_the_same_in_each_episode(tmp_path: Path) -> None:
    code = "print(os.getcwd(), os.path.expanduser('~'), os.environ['OPENAI_BASE_URL'], os.environ['PATH'] != '')"
    first, second = (play_isolated(code, tmp_path).stdout for _ in range(2))
    assert first == second == "/workspace /home/agent http://127.0.0.1:30000/v1 True\n"


def test_programs_that_ask_for_their_user_get_one(tmp_path: Path) -> None:
    code = """
import getpass, subprocess
run = lambda *argv: subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
print(getpass.getuser(), run("id", "-un"))
"""
    assert play_isolated(code, tmp_path).stdout == "agent agent\n"


def test_it_writes_to_its_home_its_workspace_and_tmp_only(tmp_path: Path) -> None:
    code = """
for path in ("/home/agent/a", "/workspace/b", "/tmp/c", "/dev/shm/d"):
    open(path, "w").write("text")
"""
    read: list[Any] = []
    exit = play_isolated(code, tmp_path, inspect=lambda place: read.append(place.read("a")))
    assert exit.code == 0, exit
    assert read == ["text"] and (tmp_path / "workspace/b").read_text() == "text"


def test_a_command_reads_the_folder_of_the_runner_but_not_its_hidden_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    (folder / "runs").mkdir(parents=True)
    (folder / "runs/secret").write_text("x")
    (folder / "key").write_text("secret")
    (folder / "helper.py").write_text("NUMBER = 7\n")
    monkeypatch.chdir(folder)
    code = """
sys.path.insert(0, ".")
import helper
try:
    open("new", "w")
except OSError as error:
    print(helper.NUMBER, type(error).__name__, os.listdir("runs"), repr(open("key").read()))
"""
    hidden = [folder / "runs", folder / "key"]
    assert play_isolated(code, tmp_path, workspace=False, hidden=hidden).stdout == "7 OSError [] ''\n"


_STREAM = """
import http.client, threading
def ask(path, body, method="POST", connection=None):
    connection = connection or http.client.HTTPConnection("127.0.0.1", 30000)
    connection.request(method, path, body, {"Content-Type": "application/json", "Authorization": "Bearer other"})
    answer = connection.getresponse()
    return answer.status, answer.read()
def body(text):
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]})
"""


def test_it_reaches_its_session(tmp_path: Path) -> None:
    """A body of 1 MB, one connection for many requests, 32 connections at once, and what is not of the session."""
    code = (
        _STREAM
        + """
kept = http.client.HTTPConnection("127.0.0.1", 30000)
print([json.loads(ask("/v1/chat/completions", body(f"say {i}"), connection=kept)[1])["choices"][0]["message"]["content"]
       for i in range(3)])
print(len(ask("/v1/chat/completions", body("x" * 1_000_000 + " 5"))[1]) > 50)
found = []
threads = [threading.Thread(target=lambda i=i: found.append(ask("/v1/chat/completions", body(f"say {i}"))[0]))
           for i in range(32)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(found.count(200))
print([ask(path, "{}", method)[0] for method, path in (
    ("GET", "/health"), ("GET", "/metrics"), ("POST", "/generate"), ("POST", "/sessions"), ("GET", "/"), ("HEAD", "/"),
    ("POST", "/v1/../../sessions"), ("POST", "/v1/completions"))])
"""
    )
    exit = play_isolated(code, tmp_path)
    said = ["['0', '1', '2']", "True", "32", "[404, 404, 404, 404, 200, 200, 404, 404]"]
    assert exit.stdout.splitlines() == said, exit.output
    assert exit.traffic is not None
    assert (exit.traffic.requests, exit.traffic.generations, exit.traffic.refused) == (36, 36, 6)
    assert (exit.traffic.last_status, exit.traffic.last_error) == (200, "")


def test_it_reaches_its_environment(tmp_path: Path) -> None:
    code = """
url = os.environ["VERL_ENVIRONMENT_URL"]
print(url, json.load(urllib.request.urlopen(url + "/observation")), post(url + "/step", {"text": "3"}))
"""

    async def main() -> None:
        gateway = EnvironmentGateway().running()
        async with fake_server(lambda messages: "") as fake, session_of(fake) as session, gateway as running:
            referee = Referee(Echo(), 5.0)
            await referee.reset(3)
            with running.serving(referee) as url:
                exit = await run_isolated(code, session, tmp_path, environment_url=url)
            assert exit.stdout.split(" ", 1)[0] == "http://127.0.0.1:30001", exit.output
            assert "say 3" in exit.stdout and "over" in exit.stdout and referee.reward == 1.0

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sys.exit(7)", 7),
        ("os.kill(os.getpid(), 15)", -15),
        ("os.kill(os.getpid(), 9)", -9),
        ("os.kill(os.getppid(), 9); time.sleep(60)", -9),
        ("os.kill(-1, 9)", -9),
        ("sys.exit(137)", 137),
    ],
)
def test_its_exit_code_is_that_without_isolation(tmp_path: Path, code: str, expected: int) -> None:
    exit = play_isolated(code, tmp_path)
    assert (exit.code, exit.error, exit.isolation_failed) == (expected, None, False), exit


def _sandboxed() -> list[int]:
    """Return the processes of this user that have MARK in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if _MARK.encode() in (folder / "cmdline").read_bytes() and is_alive(int(folder.name)):
                found.append(int(folder.name))
    return found


def _ancestors(pid: int) -> list[int]:
    """Return the processes from the child of this one down to `pid`."""
    chain = [pid]
    while chain[0] not in (1, os.getpid()):
        chain.insert(0, int(Path(f"/proc/{chain[0]}/stat").read_text().rpartition(")")[2].split()[1]))
    return chain[1:]


_MARK = f"verl-mark-{os.getpid()}"
_CHILD = f"""
import subprocess, sys
child = [sys.executable, "-I", "-S", "-c", "import os, time; os.setsid(); print('up', flush=True); time.sleep(600)"]
subprocess.Popen([*child, "{_MARK}"], stdout=subprocess.PIPE).stdout.readline()
"""


def test_background_processes_end_with_the_program(tmp_path: Path) -> None:
    started = time.monotonic()
    assert play_isolated(_CHILD, tmp_path).code == 0
    assert _sandboxed() == [] and time.monotonic() - started < 30


@pytest.mark.parametrize("victim", ["launcher", "bwrap", "bridge"])
def test_nothing_is_left_when_a_process_around_the_program_is_killed(tmp_path: Path, victim: str) -> None:
    async def main() -> None:
        async with fake_server(lambda messages: "") as fake, session_of(fake) as session:
            code = _CHILD + "print('ready', flush=True); time.sleep(600)"
            running = asyncio.ensure_future(run_isolated(code, session, tmp_path))
            log = tmp_path / "log"
            ready = lambda: log.exists() and "ready" in log.read_text()  # noqa: E731
            assert await asyncio.to_thread(wait_for, ready, 30)
            chain = max(map(_ancestors, _sandboxed()), key=len)
            names = dict(zip(["launcher", "bwrap", "first", "bridge", "program"], chain, strict=False))
            os.kill(names[victim], signal.SIGKILL)
            exit = await asyncio.wait_for(running, 30)
            assert exit.code in (None, -9) and not exit.isolation_failed, exit

    asyncio.run(main())
    assert wait_for(lambda: _sandboxed() == [])


@pytest.mark.parametrize("is_deaf", [False, True])
def test_a_cancelled_program_gets_sigterm_and_its_grace(tmp_path: Path, is_deaf: bool) -> None:
    """The files that it writes at SIGTERM are there. A program that ignores SIGTERM is killed after the grace."""
    code = """
import signal
def end(*_):
    chat("say 1")  # its session is still there
    open("ended", "w").write("x")
    if not DEAF:
        sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True:
    time.sleep(0.05)
""".replace("DEAF", str(is_deaf))

    async def main() -> None:
        async with fake_server(lambda messages: "") as fake, session_of(fake) as session:
            limits = dataclasses.replace(FAST, kill_grace=1.0 if is_deaf else 10.0)
            running = asyncio.ensure_future(run_isolated(code, session, tmp_path, limits=limits))
            log = tmp_path / "log"
            ready = lambda: log.exists() and "ready" in log.read_text()  # noqa: E731
            assert await asyncio.to_thread(wait_for, ready, 30)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(running, 30)

    asyncio.run(main())
    assert (tmp_path / "workspace/ended").exists()


def test_programs_that_are_cancelled_at_once_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))

    async def main() -> None:
        async with fake_server(lambda messages: "") as fake, session_of(fake) as session:
            running = [
                asyncio.ensure_future(run_isolated(["/bin/sleep", "600", _MARK], session, tmp_path)) for _ in range(8)
            ]
            for number, one in enumerate(running):
                await asyncio.sleep(0.01 * number)  # at different places of the start
                one.cancel()
            await asyncio.wait(running, timeout=50)
            assert all(one.done() for one in running)

    asyncio.run(main())
    assert _sandboxed() == [] and list(temporary.iterdir()) == []


def test_a_program_that_closes_its_output_early_runs_on(tmp_path: Path) -> None:
    code = "os.close(1); os.close(2); open('done', 'w').write(chat('say 4'))"
    assert play_isolated(code, tmp_path).code == 0
    assert (tmp_path / "workspace/done").read_text() == "4"


def test_output_apart_keeps_its_end_and_the_log_both(tmp_path: Path) -> None:
    code = """
print("warning", file=sys.stderr, flush=True)
for _ in range(300):
    sys.stdout.write("x" * 1_000_000)
print("the answer")
"""
    exit = play_isolated(code, tmp_path)
    assert exit.code == 0 and exit.stdout.endswith("xthe answer\n") and len(exit.stdout) == 10_000
    assert (tmp_path / "log").read_text().startswith("warning\nx")
    assert (tmp_path / "log").stat().st_size < FAST.log_bytes + 100


def test_standard_input_is_a_text_and_ends(tmp_path: Path) -> None:
    text = "-x äöü\n" * 50_000
    exit = play_isolated("print(len(sys.stdin.read()))", tmp_path, stdin=text)
    assert exit.stdout == f"{len(text)}\n"
    assert play_isolated("print(repr(sys.stdin.read()))", tmp_path).stdout == "''\n"


def test_a_fork_bomb_is_bounded(tmp_path: Path) -> None:
    limits = dataclasses.replace(FAST, processes=40)
    code = """
import subprocess
try:
    while True:
        subprocess.Popen(["/bin/sleep", "600"])
except OSError as error:
    print("refused", error)
"""
    exit = play_isolated(code, tmp_path, limits=limits)
    if os.geteuid() != 0:  # the kernel refuses the next process, and the program says so
        assert "refused" in exit.output, exit
        return
    assert exit.code == -9 and "AgentLimits.processes" in exit.exceeded, exit

    async def ended() -> End:
        agent: asyncio.Future[ProgramExit] = asyncio.get_running_loop().create_future()
        agent.set_result(exit)
        return own_end(agent, "http://server")

    end = asyncio.run(ended())
    assert (end.reason, FAULTS[end.reason]) == (StopReason.AGENT_ERROR, Fault.POLICY)
    assert end.error is not None and end.error.startswith("The program had more than 40 processes")


def test_limits_hold_for_the_program(tmp_path: Path) -> None:
    limits = dataclasses.replace(FAST, memory_bytes=2**28, open_files=50, file_bytes=1000)
    code = "import resource as r; print([r.getrlimit(x)[0] for x in (r.RLIMIT_AS, r.RLIMIT_NOFILE, r.RLIMIT_FSIZE)])"
    assert play_isolated(code, tmp_path, limits=limits).stdout == f"{[2**28, 50, 1000]}\n"


# -- faults of the isolation ------------------------------------------------------------------------------------


def test_a_program_that_the_sandbox_does_not_have_is_a_fault_of_the_isolation(tmp_path: Path) -> None:
    script = tmp_path / "agent"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)

    exit = play_isolated([str(script)], tmp_path)
    assert exit.code == 0
    script.write_text("#!/no/such/interpreter\n")
    exit = play_isolated([str(script)], tmp_path)
    assert exit.isolation_failed and "There is no file or folder /no/such/interpreter" in (exit.error or "")


def test_a_bubblewrap_that_fails_is_a_fault_of_the_isolation(tmp_path: Path) -> None:
    async def main() -> None:
        session = AgentSession("id", "http://127.0.0.1:1/s/k/v1", "http://127.0.0.1:1/s/k", "k")
        async with program_place(session, isolation="bubblewrap", workspace=tmp_path) as place:
            (place.folder / "sockets" / "session").unlink()
            exit = await place.run(["/bin/true"], {}, limits=FAST, log=tmp_path / "log")
        assert exit.isolation_failed and "before it started the program" in (exit.error or "")
        assert "--isolation none" in (exit.error or "") and "bwrap: " in exit.output

    asyncio.run(main())


def test_a_policy_cannot_feign_a_fault_of_the_isolation(tmp_path: Path) -> None:
    """It tries to write the bridge's status, and what bubblewrap would say."""
    code = """
import glob
print("bwrap: Can't mount proc", file=sys.stderr)
status = b'{"failed": "x"}'
for path in [*glob.glob("/proc/[0-9]*/fd/*"), "/dev/fd/200"]:
    try:
        if os.path.realpath(path).startswith("/proc/") and "pipe" in os.readlink(path):
            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            os.write(fd, status + bytes([10]))
    except OSError:
        pass
os.kill(os.getppid(), 9)
"""
    exit = play_isolated(code, tmp_path)
    assert not exit.isolation_failed and exit.code == -9, exit


def test_a_full_disk_is_no_fault_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.mkdtemp", lambda **_: (_ for _ in ()).throw(OSError(28, "No space left on device")))

    async def main() -> None:
        session = AgentSession("id", "http://127.0.0.1:1/s/k/v1", "http://127.0.0.1:1/s/k", "k")
        with pytest.raises(PlaceError, match="No space left"):
            async with program_place(session):
                pass

    asyncio.run(main())


def test_a_server_that_is_away_is_waited_for_and_then_counted(tmp_path: Path) -> None:
    code = """
try:
    chat("say 1")
except Exception as error:
    print(error)
"""

    async def main() -> None:
        session = AgentSession("id", "http://127.0.0.1:1/s/k/v1", "http://127.0.0.1:1/s/k", "k")
        exit = await run_isolated(code, session, tmp_path)
        assert exit.code == 0 and "503" in exit.stdout, exit
        assert exit.traffic is not None and exit.traffic.last_status == 0 and exit.traffic.failed_connects > 1

    asyncio.run(asyncio.wait_for(main(), 60))


# -- around ---------------------------------------------------------------------------------------------------


def test_a_probe_runs_the_program_once() -> None:
    assert probe_program(sys.executable, isolation="bubblewrap").startswith("Python 3.")
    code = "import sys; print('a warning', file=sys.stderr, flush=True); print('1.2.3\\nmore')"
    assert probe_program(sys.executable, isolation="bubblewrap", arguments=["-c", code]) == "1.2.3"
    with pytest.raises(ValueError, match="exit code"):
        probe_program("/bin/false", isolation="bubblewrap")


def test_a_command_plays_isolated(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(lambda messages: "ok") as fake, session_of(fake) as session:
            code = "import json, os; print(json.load(open(os.environ['VERL_TASK_FILE'])), os.environ['OPENAI_API_KEY'])"
            exit = await run_program(
                check_program([sys.executable, "-c", code], isolation="bubblewrap"),
                session,
                AgentTask(input="x", seed=3),
                limits=FAST,
                log=tmp_path / "log",
                environment_url=None,
                isolation="bubblewrap",
            )
        assert exit.output == "{'input': 'x', 'seed': 3, 'tools': []} session\n", exit

    asyncio.run(asyncio.wait_for(main(), 60))
