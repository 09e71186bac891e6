"""Files, headings, modules, make targets and benchmarks that the pages name exist. README's AgentLoop example runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from verl_server import HttpServerEngineAdapter
from verl_server.models import rope_config
from verl_server.rollout.environments.env_server import EnvServer

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MODULES = (ROOT / "docs" / "modules.md").read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path) if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_and_benchmarks_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[0].split()
    for target in re.findall(r"(?:`|\$ )make (?:-C \S+ )?([a-z][a-z-]*)", text):
        assert target in targets, f"{page.name}: make {target}"
    for name in re.findall(r"benchmarks[./](\w+(?:\.\w+)?)", text):
        parts = name.removesuffix(".py").split(".")
        found = [ROOT / "benchmarks" / f"{'/'.join(parts[:n])}.py" for n in (1, 2)]
        folder = ROOT / "benchmarks" / parts[0]
        assert any(path.exists() for path in found) or folder.is_dir(), f"{page.name}: benchmarks.{name}"


def test_the_map_names_modules_that_exist() -> None:
    package = ROOT / "verl_server"
    stems = {path.stem for path in package.rglob("*.py")} | {path.name for path in package.rglob("*.cpp")}
    stems |= {path.name for path in package.rglob("*.h")}
    folders = {path.name for path in package.iterdir() if path.is_dir()}
    for path in re.findall(r"`(\w+(?:/\w+)+)`", ARCHITECTURE + MODULES):
        if path.split("/")[0] in folders:
            found = package / path
            assert found.is_dir() or found.with_suffix(".py").exists(), f"the map names {path}"
    tables = MODULES.split("| folder | modules in the order")[1:]
    assert len(tables) == 3
    for table in tables:
        rows = [line for line in table.partition("\n\n")[0].splitlines() if line.startswith("| `")]
        for name in (name for row in rows for name in re.findall(r"`([a-z_]+(?:\.cpp|\.h)?)`", row)):
            assert name in stems | folders, f"modules.md names {name}"


def test_the_map_states_the_import_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    section = ARCHITECTURE.split("## Which folder may import which")[1].split("\n## ")[0]
    order = []
    for layer in contracts[0]["layers"]:
        for name in layer.split(" | "):
            path = name.removeprefix("verl_server.").replace(".", "/")
            if path != "__main__":
                assert f"`{path}`" in section, f"architecture.md does not place {path}"
                order.append(section.index(f"`{path}`"))
    rows = [section[:position].count("\n") for position in order]
    assert rows == sorted(rows), "architecture.md places a folder above one that imports it"


def test_the_page_of_engines_lists_every_rope_type_with_its_keys() -> None:
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    section = page.split("## Long contexts")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section, re.MULTILINE)
    listed = {kind: tuple(re.findall(r"`(\w+)`", keys.partition(";")[0])) for kind, keys in rows}
    assert listed == rope_config._KEYS
    optional = {name for _, keys in rows for name in re.findall(r"`(\w+)`", keys)}
    assert set(rope_config._POSITIVE) <= optional | {"rope_theta"}


@pytest.mark.timeout(240)
def test_the_agent_loop_example_of_the_readme_runs(tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = [block for block in re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S) if "AgentLoop" in block]
    with (
        HttpServerEngineAdapter(model_path=str(tiny_qwen3), device="cpu", port=0, kv_cache_gib=0.05) as engine,
        EnvServer(f"{ROOT / 'examples' / 'my_environment.py'}:Countdown") as environment,
    ):
        assert engine.url is not None
        for written, real in (
            ("tiny-model", str(tiny_qwen3)),
            ("http://127.0.0.1:30000", engine.url),
            ("http://127.0.0.1:8000", environment.url),
        ):
            assert written in example
            example = example.replace(written, real)
        exec(compile(example, "README.md", "exec"), {})
    episodes = capsys.readouterr().out.splitlines()
    assert len(episodes) == 32 and all(line.startswith(("done", "max_turns")) for line in episodes)
