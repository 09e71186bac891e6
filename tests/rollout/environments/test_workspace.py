"""`WorkspaceEnvironment`: what a task may say, what a policy may leave behind, and how a check judges it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bubblewrap import needs_bubblewrap
from verl_server.errors import BadRequestError
from verl_server.files.trees import TreeBounds, remove_tree
from verl_server.rollout.environment import EnvError
from verl_server.rollout.environments.named import environment_named, has_reward
from verl_server.rollout.environments.workspace import WorkspaceEnvironment
from verl_server.rollout.environments.workspace_task import read_workspace

TASKS = Path(__file__).parents[3] / "examples" / "workspace_tasks.jsonl"
PASSES: dict[str, Any] = {"command": ["true"]}


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Assert that each folder of a test is removed. Their paths are short, because sockets lie in some."""
    root = Path(tempfile.mkdtemp(prefix="ws-"))
    made = "verl_server.rollout.environments.workspace.private_folder"
    monkeypatch.setattr(made, lambda name: Path(tempfile.mkdtemp(prefix=name, dir=root)))
    yield
    left = os.listdir(root)
    remove_tree(root)
    assert left == []


def played(
    options: dict[str, Any],
    work: Callable[[Path], Any] = lambda folder: None,
    answer: str = "",
    isolation: Any = "none",
    bounds: TreeBounds | None = None,
) -> tuple[float | None, str]:
    """Play an episode in which the policy does `work` in the workspace. Return (reward, report)."""

    async def play() -> tuple[float | None, str]:
        environment = WorkspaceEnvironment(options, isolation=isolation, bounds=bounds)
        try:
            assert await environment.reset(0) == ""
            work(environment.folder)
            report, reward, done = await environment.step(answer)
            assert done
            return reward, report
        finally:
            await environment.close()
            await environment.close()

    return asyncio.run(asyncio.wait_for(play(), 60))


def shell(text: str, **files: Any) -> dict[str, Any]:
    """Return options with a check that is a shell script."""
    return {"check": {"command": ["sh", "check.sh"], "files": {"check.sh": text, **files}}}


# -- the task ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "environment.check is missing"),
        ({"check": None}, "environment.check is missing"),
        ({"check": PASSES, "file": {}}, "unknown field `file`"),
        ({"check": {"command": "true"}}, r"Expected `array`, got `str` - at `\$.check.command`"),
        ({"check": {"command": []}}, "environment.check.command is empty"),
        ({"check": {"command": [""]}}, "environment.check.command is empty"),
        ({"check": {"command": ["true", "a\0b"]}}, "NUL"),
        ({"check": {"command": ["no-such-program"]}}, "no program 'no-such-program'"),
        ({"check": {"command": ["/no/such"]}}, "no program '/no/such'"),
        ({"check": {"command": ["./a"], "files": {"a": ""}}}, 'not the mode "755"'),
        ({"check": PASSES | {"seconds": 0}}, "seconds must be a number above 0"),
        ({"check": PASSES | {"seconds": float("inf")}}, "seconds must be a number above 0"),
        ({"check": PASSES | {"memory_bytes": 1}}, "memory_bytes must be at least"),
        ({"check": PASSES, "files": {"/etc/passwd": ""}}, r"environment.files\['/etc/passwd'\] is an absolute path"),
        ({"check": PASSES, "files": {"a/../../b": ""}}, "leaves the workspace"),
        ({"check": PASSES, "files": {"": ""}}, "names no file"),
        ({"check": PASSES, "files": {"a/": ""}}, "names no file"),
        ({"check": PASSES, "files": {"a\0": ""}}, "NUL"),
        ({"check": PASSES, "files": {"é" * 128: ""}}, "too long"),
        ({"check": PASSES, "files": {"a/" * 2100 + "b": ""}}, "too long"),
        ({"check": PASSES, "files": {"a": "", "./a": ""}}, "names a file twice"),
        ({"check": PASSES, "files": {"a": "", "a/b": ""}}, r"\['a'\] is a file and a folder"),
        ({"check": PASSES, "files": {"a": {}}}, r"\['a'\] needs either"),
        ({"check": PASSES, "files": {"a": {"text": "", "base64": ""}}}, r"\['a'\] needs either"),
        ({"check": PASSES, "files": {"a": {"text": "", "mode": "4755"}}}, "octal"),
        ({"check": PASSES, "files": {"a": {"text": "", "mode": "rwx"}}}, "octal"),
        ({"check": PASSES, "files": {"a": {"base64": "?"}}}, "is not base64"),
        ({"check": {"command": ["true"], "files": {"../a": ""}}}, r"environment.check.files\['../a'\] leaves"),
        ({"check": PASSES, "copy": "no/such"}, "environment.copy: there is no folder 'no/such'"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequestError, match=says):
        read_workspace(options)


def test_files_and_a_copied_folder(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.txt").write_text("copied")
    (tmp_path / "b.txt").write_text("copied")
    os.symlink("lib/a.txt", tmp_path / "link")
    data = bytes(range(256))
    options = {
        "copy": str(tmp_path),
        "files": {
            "b.txt": "written",
            "bin/./run": {"text": "#!/bin/sh\n", "mode": "755"},
            "data": {"base64": base64.b64encode(data).decode()},
        },
        "check": PASSES,
    }

    def look(folder: Path) -> None:
        assert (folder / "lib" / "a.txt").read_text() == "copied" and (folder / "b.txt").read_text() == "written"
        assert os.readlink(folder / "link") == "lib/a.txt"
        assert (folder / "bin" / "run").stat().st_mode & 0o777 == 0o755 and (folder / "data").read_bytes() == data

    assert played(options, look)[0] == 1.0
    assert (tmp_path / "b.txt").read_text() == "copied"


def test_a_copied_folder_that_is_too_large_is_an_error_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * 11)
    with pytest.raises(EnvError, match=r"environment.copy: .* more than 10 bytes"):
        played({"copy": str(tmp_path), "check": PASSES}, bounds=TreeBounds(bytes=10))


# -- the reward -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "reward", "says"),
    [
        ("echo fine", 1.0, "The check passed, so the reward is 1. Its output:\nfine"),
        ("exit 3", 0.0, "exit code 3. It wrote nothing."),
        ("echo wrong >&2; exit 1", 0.0, "exit code 1. Its output:\nwrong"),
        ("no-such-command", 0.0, "exit code 127. Its output:\ncheck.sh: 1: no-such-command: not found"),
        ("kill -9 $$", 0.0, "exit code -9"),
        ("sleep 60", 0.0, "ran longer than 2 s and was ended"),
        ("(setsid sleep 60 &); echo fine", 1.0, "passed"),
        ('echo 0.25 > "$VERL_REWARD_FILE"', 0.25, "with the reward 0.25"),
        ('echo 0 > "$VERL_REWARD_FILE"', 0.0, "with the reward 0"),
        ('echo 1 > "$VERL_REWARD_FILE"; exit 1', 0.0, "exit code 1"),
        ('echo 2 > "$VERL_REWARD_FILE"', 0.0, "no number from 0 to 1, but b'2"),
        ('echo nan > "$VERL_REWARD_FILE"', 0.0, "no number from 0 to 1"),
        ('echo much > "$VERL_REWARD_FILE"', 0.0, "no number from 0 to 1"),
        (': > "$VERL_REWARD_FILE"', 0.0, "no number from 0 to 1"),
        ('mkfifo "$VERL_REWARD_FILE"', 0.0, "no number from 0 to 1"),
        ('echo 1 > one; ln -s "$PWD/one" "$VERL_REWARD_FILE"', 0.0, "no number from 0 to 1"),
        ('head -c 3000000 /dev/zero > "$VERL_REWARD_FILE"', 0.0, "no number from 0 to 1"),
        ("head -c 3000000 /dev/zero | tr '\\0' x", 1.0, "The end of its output"),
        ('grep -q "^42$" "$VERL_ANSWER_FILE"', 1.0, "passed"),
    ],
)
def test_the_end_of_a_check_is_the_reward(script: str, reward: float, says: str) -> None:
    options = shell(script)
    options["check"]["seconds"] = 2
    found, report = played(options, answer="42\n")
    assert found == reward and says in report, report
    assert len(report) < 9_000


def test_an_answer_may_be_any_text() -> None:
    assert played(shell('test "$(wc -c < "$VERL_ANSWER_FILE")" = 6'), answer="a\ud800\0é\n")[0] == 1.0


def test_a_check_that_does_not_start_is_no_fault_of_the_policy() -> None:
    options = {"check": {"command": ["./check"], "files": {"check": {"text": "#!/no/such\n", "mode": "755"}}}}
    with pytest.raises(EnvError, match=r"The check did not run: \./check does not start"):
        played(options)


def test_a_program_that_the_policy_should_have_made() -> None:
    options = {"check": {"command": ["./solution"]}}

    def solve(folder: Path) -> None:
        (folder / "solution").write_text("#!/bin/sh\necho made\n")
        (folder / "solution").chmod(0o755)

    assert played(options, solve)[0] == 1.0
    reward, report = played(options)
    assert reward == 0.0 and "not found" in report


# -- what a policy leaves ---------------------------------------------------------------------------------------


def test_the_policy_cannot_keep_a_check_file_from_its_place(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("safe")

    def links(folder: Path) -> None:
        os.symlink(tmp_path / "key", folder / "check.sh")
        os.symlink(tmp_path, folder / "tests")

    def folders(folder: Path) -> None:
        (folder / "check.sh" / "inner").mkdir(parents=True)
        (folder / "tests").write_text("a file")

    for work in (links, folders):
        assert played(shell("cat tests/key", **{"tests/key": "check"}), work)[0] == 1.0
        assert (tmp_path / "key").read_text() == "safe" and os.listdir(tmp_path) == ["key"]


def test_the_check_sees_neither_what_links_point_to_nor_special_files(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")

    def work(folder: Path) -> None:
        os.symlink(tmp_path / "key", folder / "link")
        os.mkfifo(folder / "fifo")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(folder / "socket"))

    reward, report = played(shell('test -L link && test "$(ls)" = "check.sh\nlink"'), work)
    assert reward == 1.0 and "no files: 2, such as" in report


@pytest.mark.parametrize(
    ("work", "says"),
    [
        (lambda folder: os.truncate(os.open(folder / "hole", os.O_CREAT | os.O_RDWR), 2**40), "more than"),
        (lambda folder: os.makedirs(folder / "/".join("d" * 100)), "folders inside each other"),
        (lambda folder: [(folder / str(i)).touch() for i in range(1001)], "more than 1,000 files"),
        (lambda folder: folder.rmdir(), "no folder"),
    ],
)
def test_a_workspace_that_cannot_be_judged_is_a_reward_of_0(work: Callable[[Path], Any], says: str) -> None:
    reward, report = played({"check": PASSES}, work, bounds=TreeBounds(entries=1000))
    assert reward == 0.0 and says in report


def test_the_check_changes_its_copy_only() -> None:
    async def play() -> None:
        environment = WorkspaceEnvironment(shell("rm -r * && echo x > new"), isolation="none")
        await environment.reset(0)
        (environment.folder / "work").write_text("policy")
        assert (await environment.step(""))[1] == 1.0
        assert os.listdir(environment.folder) == ["work"]
        await environment.close()

    asyncio.run(play())


def test_a_cancelled_step_leaves_nothing() -> None:
    async def play() -> None:
        environment = WorkspaceEnvironment(shell("touch started; sleep 600"), isolation="none")
        await environment.reset(0)
        started = environment.folder.parent / "check" / "workspace" / "started"
        step = asyncio.ensure_future(environment.step(""))
        while not started.exists():
            await asyncio.sleep(0.01)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await environment.close()

    asyncio.run(asyncio.wait_for(play(), 60))


def test_outside_of_an_episode() -> None:
    environment = WorkspaceEnvironment({"check": PASSES}, isolation="none")
    with pytest.raises(BadRequestError, match=r"after reset\(\) and before close\(\)"):
        asyncio.run(environment.step(""))


# -- isolation --------------------------------------------------------------------------------------------------


def test_the_environment_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *args, **options: None)
    with pytest.raises(BadRequestError, match=r"bubblewrap.*--isolation none"):
        environment_named("workspace")
    assert has_reward("workspace")


def test_checks_without_isolation_are_said_aloud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nothing")  # no bubblewrap
    make = environment_named("workspace", "none")
    assert "without isolation" in caplog.text
    environment = make(shell("true"))
    assert isinstance(environment, WorkspaceEnvironment)

    async def play() -> Any:
        await environment.reset(0)
        try:
            return await environment.step("")
        finally:
            await environment.close()

    assert asyncio.run(play())[1] == 1.0


@needs_bubblewrap
def test_an_isolated_check_sees_its_copy_only(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    script = f"""
set -e
test ! -e {tmp_path} && test ! -e {Path(__file__).parent}
test "$(id -u)" != 0 && test -z "$(grep -v ^lo: /sys/class/net/* 2>/dev/null)"
! python3 -c 'import socket; socket.create_connection(("127.0.0.1", 22), 1)' 2>/dev/null
! touch /usr/x 2>/dev/null && ! echo > "$VERL_ANSWER_FILE" 2>/dev/null
test "$(cat "$VERL_ANSWER_FILE")" = right && touch made && rm made
test -z "$(env | grep -i secret)"
echo 0.5 > "$VERL_REWARD_FILE"
"""
    reward, report = played(shell(script), answer="right", isolation="bubblewrap")
    assert reward == 0.5, report


@needs_bubblewrap
def test_an_isolated_check_has_bounds() -> None:
    script = "exec python3 -c \"b = b'x' * (1 << 30)\""
    options = shell(script)
    options["check"]["memory_bytes"] = 2**28
    reward, report = played(options, isolation="bubblewrap")
    assert reward == 0.0 and "MemoryError" in report
    options = shell("sleep 600")
    options["check"]["seconds"] = 1
    assert "ran longer than 1 s" in played(options, isolation="bubblewrap")[1]


def test_a_check_that_fills_the_disk_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check may run the agent's code."""
    monkeypatch.setattr("verl_server.rollout.disk_bound._PERIOD", 0.05)
    monkeypatch.setattr("verl_server.rollout.environments.workspace._DISK_BYTES", 2_000_000)
    reward, report = played(shell("head -c 3000000 /dev/zero > big; exec sleep 600"))
    assert reward == 0.0 and "The check failed: The files of the program take more than 2,000,000 bytes" in report


@needs_bubblewrap
def test_an_isolation_that_fails_is_no_fault_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = lambda argv, **options: [shutil.which("bwrap"), "--no-such-option", "--", *argv]  # noqa: E731
    monkeypatch.setattr("verl_server.rollout.environments.workspace.isolated_program", broken)
    with pytest.raises(EnvError, match=r"(?s)The check did not run: .*no-such-option"):
        played({"check": PASSES}, isolation="bubblewrap")


# -- the examples -----------------------------------------------------------------------------------------------

_SOLUTIONS: list[tuple[str, str]] = [
    ('sed -i \'s/"aeio"/"aeiouAEIOU"/\' counting.py', "I corrected it."),
    ("python3 puzzle.py", ""),
    (
        "sort -t, -k2 -n temperatures.csv > sorted.csv; "
        'echo "$(wc -l < sorted.csv) $(tail -n 1 sorted.csv | cut -d, -f1)" > summary.txt',
        "Done.",
    ),
]


@needs_bubblewrap
@pytest.mark.parametrize("number", range(3))
def test_the_examples_can_be_solved(number: int) -> None:
    task = json.loads(TASKS.read_text().splitlines()[number])
    command, answer = _SOLUTIONS[number]

    def solve(folder: Path) -> str:
        return os.popen(f"cd {folder} && {command}").read()

    async def play(is_solved: bool) -> tuple[float | None, str]:
        environment = environment_named("workspace")(task["environment"])
        assert isinstance(environment, WorkspaceEnvironment)
        try:
            await environment.reset(0)
            printed = solve(environment.folder) if is_solved else ""
            report, reward, _ = await environment.step(answer or printed)
            return reward, report
        finally:
            await environment.close()

    assert asyncio.run(play(True))[0] == 1.0
    assert asyncio.run(play(False))[0] == 0.0
