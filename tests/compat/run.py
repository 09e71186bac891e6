"""Runs unmodified clients against real servers of this project, and writes docs/compatibility.md: `make test-compat`.

Each client talks to a server, and to `verl-server router` in front of servers, in the same run (`--through`).

Each file of `environments` pins the packages of one environment, `.venv-compat-NAME`, which is made again when the file
changes. The tests in `clients` that belong to an environment run inside it, and start servers with the interpreter that
runs this module. The page has the last whole run of each environment.

SGLang's kits take longest, so they run through the router only, whose bytes are those of the server
(`tests/fleet/test_bytes.py`). `--only kits --through server` runs them without it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PAGE = ROOT / "docs" / "compatibility.md"
TESTS = {
    "clients": ("test_openai.py", "test_anthropic.py", "test_published_types.py"),
    "frameworks": (
        "test_sglang_adapter.py",
        "test_verl.py",
        "test_verl_attached.py",
        "test_slime.py",
        "test_trl.py",
        "test_router.py",
        "test_load_generator.py",
    ),
    "verifiers": ("test_verifiers.py",),
    "schemathesis": ("test_schemathesis.py",),
    "kits": ("test_sglang_kits.py",),
}
"""Environment -> its tests, in the order of the page."""
WAYS = ("server", "router")
"""Each test runs a client in these ways: directly with a server, and through the router."""
_MOST_SECONDS = 1500.0
"""The longest time for the tests of an environment. The kits take 5 to 8 minutes, and twice that beside other work."""
INTRODUCTION = """<!-- Written by `make test-compat`. -->

# Compatibility

Unmodified clients against a real server of this project, with a tiny random model on the CPU, and against
[the router](router.md) in front of two such servers. Each row is a test that checks the answers' contents, not only
their status codes. `make test-compat` ran it and wrote this page; packages are pinned in
[tests/compat/environments](../tests/compat/environments).
"""
NOT_ROUTED = """
Not run through the router:
"""
KITS = """
## SGLang's own tests

The tests that SGLang {version} ships for its server (`sglang/test/kits` of its wheel), unmodified, against {served}
with SmolLM2-135M-Instruct on the CPU: {passed} of {total} pass. The table names each of the others with the reason.
[The suite](../tests/compat/clients/test_sglang_kits.py) fails if one of them fails otherwise, or passes where the
outcome does not depend on what this small model samples. It took {minutes:.1f} minutes on two cores.
"""
SERVED = {"server": "a server", "router": "the router in front of a server"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("--only", choices=list(TESTS), action="append", help="run this environment only")
    parser.add_argument("--test", action="append", help="run this file of the environments only, such as test_trl.py")
    parser.add_argument("--requests", type=int, default=200, help="requests of each load generator run (default: 200)")
    parser.add_argument("--concurrency", type=int, default=64, help="concurrent requests (default: 64)")
    parser.add_argument(
        "--cases", type=int, default=4, help="schemathesis cases, valid and invalid each, for an operation (default: 4)"
    )
    parser.add_argument(
        "--through",
        choices=WAYS,
        action="append",
        help="what the clients talk to: a server, or the router in front of servers (default: both)",
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="where the page is written")
    parser.add_argument("pytest", nargs="*", help="options for pytest, after --")
    options = parser.parse_args()
    settings = {
        "requests": options.requests,
        "concurrency": options.concurrency,
        "cases": options.cases,
        "ways": options.through or WAYS,
    }
    results: dict[str, list[dict[str, Any]]] = {}
    codes = []
    for name in options.only or TESTS:
        tests = [test for test in TESTS[name] if options.test is None or test in options.test]
        if not tests:
            continue
        python = make_environment(name)
        began = time.monotonic()
        code, results[name] = run_tests(tests, python, settings, options.pytest, _MOST_SECONDS)
        print(f"{name}: {len(results[name])} tests in {time.monotonic() - began:.0f} s", flush=True)
        for line in not_routed(results[name]):
            print(f"not through the router: {line.removeprefix('- ')}", flush=True)
        codes.append(code)
        if not (options.test or options.pytest or options.through):
            results_file(name).write_text(json.dumps(results[name]), encoding="utf-8")
    written = {name: results_file(name) for name in TESTS}
    if all(file.exists() for file in written.values()):
        latest = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in written.items()}
        options.page.write_text(page(latest), encoding="utf-8")
    return max(codes)


def results_file(name: str) -> Path:
    """Return the file with the results of the last whole run of an environment."""
    return ROOT / f".venv-compat-{name}" / "results.json"


def make_environment(name: str) -> Path:
    """Return the interpreter of `.venv-compat-NAME`, which has exactly what the pin file lists."""
    pins = HERE / "environments" / f"{name}.txt"
    folder = ROOT / f".venv-compat-{name}"
    python, stamp = folder / "bin" / "python", folder / "pins"
    project = sysconfig.get_paths()["purelib"]
    digest = hashlib.sha256(pins.read_bytes() + f"{sys.version}{project}".encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return python
    print(f"Installing {folder.name} ...", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    if pins.read_text().startswith("# over: project"):
        packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        (packages / "project.pth").write_text(project + "\n")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "-r", pins]
    subprocess.run(install, check=True)
    stamp.write_text(digest)
    return python


def run_tests(
    tests: list[str], python: Path, settings: dict[str, Any], options: Iterable[str], most_seconds: float
) -> tuple[int, list[dict[str, Any]]]:
    """Run these files with the interpreter of their environment. Return (pytest's status, a record of each test)."""
    with tempfile.TemporaryDirectory(prefix="verl-server-compat-") as folder:
        report = Path(folder) / "results.json"
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "VERL_SERVER_COMPAT": json.dumps(
                settings | {"python": sys.executable, "root": str(ROOT), "report": str(report), "folder": folder}
            ),
        }
        clients = HERE / "clients"
        command = [python, "-m", "pytest", "-c", clients / "pytest.ini", *options, *tests]
        try:
            code = subprocess.run(command, cwd=clients, env=environment, timeout=most_seconds).returncode
        except subprocess.TimeoutExpired:
            print(f"{tests} did not end within {most_seconds:.0f} s.", file=sys.stderr)
            code = 1
        return code, json.loads(report.read_text()) if report.exists() else []


def page(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return the text of docs/compatibility.md."""
    records = [record for name, of_name in results.items() if name != "kits" for record in of_name]
    routed = {(record["client"], record["exercised"]): record for record in records if record["way"] == "router"}
    head = ("client", "version", "exercised", "with a server", "through the router")
    lines = [INTRODUCTION, row(*head), "|" + "---|" * len(head)]
    for record in records:
        if record["way"] != "router":
            through = routed.get((record["client"], record["exercised"]), {"result": "-"})
            cells = [record[name] for name in ("client", "version", "exercised", "result")]
            lines.append(row(*cells, through["result"]))
    lines += [NOT_ROUTED, *not_routed(records)]
    return "\n".join([*lines, *kits_table(results["kits"])]) + "\n"


def not_routed(records: list[dict[str, Any]]) -> list[str]:
    """Return a line for each client that cannot talk to the router, with the reason."""
    reasons = {record["client"]: record["not_routed"] for record in records if record["not_routed"]}
    return [f"- {client}: {reason}." for client, reason in reasons.items()]


def kits_table(records: list[dict[str, Any]]) -> list[str]:
    """Return the section about SGLang's kits, with a row for each kit; nothing if none of them ended."""
    if not records:
        return []
    kits: dict[str, list[tuple[str, str]]] = {}
    for record in records:
        kit, _, test = record["exercised"].partition(".")
        kits.setdefault(kit, []).append((test, record["result"]))
    passed = sum(record["result"] == "passed" for record in records)
    lines = [
        KITS.format(
            version=records[0]["version"],
            served=SERVED[records[0]["way"]],
            passed=passed,
            total=len(records),
            minutes=sum(record["seconds"] for record in records) / 60,
        ),
        "| kit | passed | the others |",
        "|---|---|---|",
    ]
    for kit, tests in kits.items():
        others = [f"`{test}`: {result}" if test else result for test, result in tests if result != "passed"]
        lines.append(row(f"`{kit}`", f"{len(tests) - len(others)} of {len(tests)}", "; ".join(others)))
    return lines


def row(*cells: str) -> str:
    """Return a row of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
