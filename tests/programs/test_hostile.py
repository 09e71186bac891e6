"""A hostile policy: the commands of its shell attack the runner, the check and the reward.

The attacks are files of the workspace, so that the policy's own texts are short.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import KEY, Served
from playing import PROGRAMS, SHORT, agent, check, described, play, with_instructions
from scripted import Call, Say, Script, ScriptedRelay

from verl_server.rollout.agents.types import AgentTask, Server
from verl_server.rollout.trajectory import Fault

_LOOK = """
import glob, http.client, os, socket
def reads(path):
    try:
        return len(open(path, "rb").read(10)) > 0
    except OSError:
        return False
def reaches(family, address):
    with socket.socket(family) as one:
        one.settimeout(1)
        return one.connect_ex(address) == 0
def asks(method, path):
    connection = http.client.HTTPConnection("127.0.0.1", 30000, timeout=20)
    connection.request(method, path, "{}", {"Content-Type": "application/json", "X-Session-Child": "a"})
    return connection.getresponse().status
print(
    [path for path in FILES if os.path.exists(path)],
    [path for path in glob.glob("/proc/[0-9]*/environ") if reads(path) and b"KEY=owner" in open(path, "rb").read()],
    [os.access(path, os.W_OK) for path in ("/proc/sys/kernel/core_pattern", "/usr/bin/python3", "/run/verl/bridge.py")],
    [reaches(socket.AF_INET, (host, port)) for host, port in (("127.0.0.1", PORT), ("169.254.169.254", 80))],
    [asks(*request) for request in (("POST", "/sessions"), ("GET", "/metrics"), ("POST", "/v1/../../sessions"))],
    file=open("found", "w"),
)
"""
_FOUND = "[] [] [False, False, False] [False, False] [404, 404, 404]"

_FORGE = r"""
mkdir -p ~/bin bin
for name in python3 pytest sh; do
  printf '#!/bin/sh\nexit 0\n' > ~/bin/$name; chmod +x ~/bin/$name; cp ~/bin/$name .
done
for name in conftest.py sitecustomize.py usercustomize.py os.py json.py evil.pth; do
  echo 'import os; os._exit(0)' > $name
done
for name in reward ~/reward /tmp/reward; do echo 1 > $name; done
ln -s /etc/passwd check.py; mkfifo answer.txt; ln found.py linked
"""

_MESS = r"""
mkdir -p deep; cd deep; for i in $(seq 60); do mkdir d; cd d; done; cd /workspace
mkdir locked; touch locked/x; chmod 000 locked; mkfifo pipe; printf x > "$(printf 'name\377\n')"
head -c 100000 /dev/urandom; printf '\033[2J\033]0;x\007\355\240\200'
cat > stay.py <<'END'
import os, signal, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
for _ in range(2):
    if os.fork():
        os._exit(0)
    os.setsid()
while True:
    open(f"/workspace/{time.time_ns() % 50}", "w").write("x")
    time.sleep(0.01)
END
python3 stay.py < /dev/null > /dev/null 2>&1
"""

_FLOOD = """
import socket, time
held = []
for number in range(500):
    one = socket.socket()
    one.connect_ex(("127.0.0.1", 30000))
    if number < 20:
        one.sendall(b"POST /v1/messages HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 1000000\\r\\n\\r\\n{")
    held.append(one)
time.sleep(0.5)
"""

_CHECK = "import os, sys; sys.exit(open(os.environ['VERL_ANSWER_FILE']).read().strip() != 'solved')"
_COMMANDS = {"look": "python3 look.py", "forge": "sh forge.sh", "mess": "sh mess.sh", "flood": "python3 flood.py"}


def _task(name: str, files: dict[str, str], code: str) -> AgentTask:
    """Return a task whose check runs `code` beside the policy's files."""
    check = {"command": ["python3", "-I", "check.py"], "files": {"check.py": code}, "seconds": 20}
    return with_instructions(AgentTask(input=f"The task {name}.", environment={"files": files, "check": check}))


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", PROGRAMS)
def test_attacks(name: str, served: Callable[[str], Served], program: Callable[[str], str], tmp_path: Path) -> None:
    tiny = served("tiny")
    key = tmp_path / "key"
    key.write_text(KEY)
    with socket.create_server(("127.0.0.1", 0)) as other:
        look = _LOOK.replace("PORT", str(other.getsockname()[1]))
        look = look.replace("FILES", repr([str(key), str(tmp_path), "/root/.bashrc", "/etc/shadow", __file__]))
        tasks = [
            _task(
                "look", {"look.py": look}, f"assert open('found').read().strip() == {_FOUND!r}, open('found').read()"
            ),
            _task("forge", {"forge.sh": _FORGE, "found.py": ""}, _CHECK),
            _task("mess", {"mess.sh": _MESS}, _CHECK),
            _task("flood", {"flood.py": _FLOOD}, _CHECK),
        ]
        answers = {"look": "solved", "forge": "forged", "mess": "solved", "flood": "solved"}
        scripts: dict[str, Script] = {f"The task {one}.": [Call(_COMMANDS[one]), Say(answers[one])] for one in answers}
        relay = ScriptedRelay(tiny.server.url, scripts)
        with relay.running():
            run = play(agent(SHORT[name], program), tasks, Server(relay.url, KEY), out=tmp_path / "run")
    print(described(run))
    reports = [(tmp_path / "run" / "agents" / f"{index}-0-0.check.log").read_text() for index in range(len(tasks))]
    episodes = sorted(run.episodes, key=lambda episode: episode.index)
    assert [episode.reward for episode in episodes] == [1.0, 0.0, 1.0, 1.0], reports
    assert {episode.fault for episode in episodes} == {Fault.POLICY}
    check(run, tiny)
