"""Writes docs/reference/ and web/operations.json from the code: `make docs`. With `--check` it writes nothing and fails
if one of them is stale.

The routes are the operations that the HTTP application mounts. Everything else is read from declarations: fields,
defaults, signatures and docstrings. A route, field, option or setting that is added therefore needs no edit here.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args
from unittest.mock import MagicMock

from declarations import Class, ClassName, Field, Function, Package

from verl_server.server.app import operations
from verl_server.server.auth import AccessRules
from verl_server.server.http.operation import AnswerError, Operation
from verl_server.server.openapi import SAMPLING, error_shape
from verl_server.watch.run_records import AnyEvent

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
OPERATIONS = ROOT / "verl_server" / "web" / "operations.json"

INTERNAL_METHODS = {"send_update", "send_registration", "send_unregistration", "send_healing"}
"""Public for other modules of `verl_server.engine` only."""
COMMANDS = {
    "verl-server warm-up": ("verl_server.cli.main", "WarmUpArgs"),
    "verl-server router": ("verl_server.fleet.options", "RouterArgs"),
    "verl-server rollout": ("verl_server.cli.rollout", "RolloutArgs"),
    "verl-server rollout --agent": ("verl_server.cli.agents", "AgentRolloutArgs"),
    "verl-server watch": ("verl_server.cli.watch", "WatchArgs"),
    "verl-server trajectories ls": ("verl_server.cli.trajectories", "Ls"),
    "verl-server trajectories show": ("verl_server.cli.trajectories", "Show"),
    "verl-server trajectories stats": ("verl_server.cli.trajectories", "Stats"),
    "verl-server trajectories index": ("verl_server.cli.trajectory_files", "Index"),
    "verl-server trajectories export": ("verl_server.cli.trajectory_files", "Export"),
    "verl-server trajectories repair": ("verl_server.server.sessions.journal_repair", "RepairArgs"),
    "verl-server env serve": ("verl_server.rollout.environments.env_process", "EnvServerArgs"),
    "verl-server demo": ("verl_server.train.demo", "DemoArgs"),
    "python -m verl_server.train.grpo": ("verl_server.train.grpo", "TrainArgs"),
    "python -m verl_server.train.async_grpo": ("verl_server.train.options", "AsyncTrainArgs"),
    "python -m verl_server.train.ppo": ("verl_server.train.ppo_options", "PPOTrainArgs"),
    "python -m verl_server.train.async_ppo": ("verl_server.train.ppo_options", "AsyncPPOTrainArgs"),
}
"""Command -> the class of its options. A test compares them with the commands of `verl_server.cli.main`."""
PAGES = {
    "settings.md": "Every setting of a server.",
    "commands.md": "Every command line with its options and exit statuses.",
    "http.md": "Every route with its request and its answer, sampling parameters, errors.",
    "fields.md": "Every field of every body: implemented, refused or without effect, and why.",
    "engines.md": "`VerlEngine`, `HttpServerEngineAdapter` and `Engine`, with their options and results.",
    "rollouts.md": "`AgentLoop`, its limits, trajectories, renderers and environments.",
    "agents.md": "`run_agents`, its limits and servers, and what an agent and a reward function are given.",
    "run-folder.md": "Every file of a training run and the fields of its lines: steps, events, trajectories.",
    "extras.md": "The optional packages of an installation: what each brings, and who needs it.",
}
RUN_FILES = (
    ("`metrics.jsonl`", "a step: [Label](#label) and [StepMetrics](#stepmetrics)", "rank 0"),
    ("`errors.jsonl`", "an episode that failed: [Label](#label) and [Failure](#failure)", "rank 0"),
    ("`events.jsonl`", "an event: `kind`, and the fields of [its class](#runevent)", "rank 0"),
    (
        "`trajectories-rankN.jsonl`",
        "a trajectory: [Label](#label) and [Trajectory](rollouts.md#trajectory)",
        "rank N",
    ),
    ("`trained-rankN.jsonl`", "a trajectory that was trained: [TrainedTrajectory](#trainedtrajectory)", "rank N"),
    ("`untrained-rankN.jsonl`", "a trajectory that ended in a step which the run did not complete", "rank N"),
    ("`evaluations.jsonl`", "an evaluation on held-out tasks: [Evaluation](#evaluation)", "rank 0"),
    ("`held-out-rankN.jsonl`", "a trajectory of an evaluation: [Label](#label) and Trajectory", "rank N"),
    ("`journal-rankN.msgpack`", "a [group that had finished](../checkpoints.md#groups-that-had-finished)", "rank N"),
    (
        "`turns-rankN.msgpack`",
        "a turn of a [group that goes on](../checkpoints.md#groups-that-had-not-finished)",
        "rank N",
    ),
    (
        "`events-rankN.jsonl`",
        "an event of rank N > 0: [SegmentRemoved](#segmentremoved) or [JournalFailed](#journalfailed)",
        "rank N",
    ),
    ("`trackers.json`", "no record: the ids of the run in the [trackers](../trackers.md) of `--logger`", "rank 0"),
    ("`index-rankN.sqlite`", "no record: the [index](../runs.md#the-files-of-a-training-run) of these files", "rank N"),
)
SECTIONS = {
    "verl_server.server.dialects.sglang.routes": "Generation",
    "verl_server.server.dialects.sglang.health_routes": "Health",
    "verl_server.server.dialects.sglang.info_routes": "Information and load",
    "verl_server.server.dialects.sglang.admin_routes": "Control routes",
    "verl_server.server.dialects.sglang.ops_routes": "SGLang's routes for operators",
    "verl_server.server.dialects.models": "Models",
    "verl_server.server.dialects.openai.routes": "OpenAI's routes",
    "verl_server.server.dialects.anthropic.routes": "Anthropic's routes",
    "verl_server.server.dialects.vllm.routes": "vLLM's routes",
    "verl_server.server.dialects.vllm.control_routes": "vLLM's control routes",
    "verl_server.server.dialects.sessions.routes": "Sessions",
    "verl_server.server.dialects.sglang.session_routes": "SGLang's sessions",
    "verl_server.server.openapi": "The description of all routes",
}
"""Titles of the modules that mount routes."""


class Page:
    """One page under construction."""

    def __init__(self, site: Site, name: str, title: str, introduction: str) -> None:
        self._site, self.name = site, name
        self.used: list[ClassName] = []
        """Classes in the signatures of this page."""
        self._parts = ["<!-- Written by `make docs`. Edit the docstrings instead. -->", f"# {title}", introduction]

    @property
    def text(self) -> str:
        return "\n\n".join(part for part in self._parts if part) + "\n"

    def add(self, *parts: str) -> None:
        self._parts += parts

    def add_class(self, cls: Class, *, level: str = "##", inherited: bool = False, constructor: bool = True) -> None:
        """A class: if it is data its fields and properties, else its public methods, and the constructor if wanted."""
        self._site.homes[cls.name] = self.name
        self.add(f"{level} {cls.name}", prose(cls.doc))
        methods = [method for method in cls.methods(inherited=inherited) if method.name not in INTERNAL_METHODS]
        if cls.is_data:
            self.add_fields(cls.fields(), has_defaults=not cls.is_typed_dict)
            methods = [method for method in methods if method.signature.startswith("@property")]
        for method in methods:
            if method.name == "__init__" and not constructor:
                continue
            self.add_function(
                method, cls.name if method.name == "__init__" else f"{cls.name}.{method.name}", level + "#"
            )

    def add_function(self, function: Function, title: str, level: str = "##") -> None:
        self.used += function.classes
        signature = function.signature.replace("def __init__", title).removesuffix(" -> None")
        self.add(f"{level} `{title}`", f"```python\n{signature}\n```", prose(function.doc), _see(function.classes))

    def add_fields(self, fields: list[Field], *, has_defaults: bool = True) -> None:
        if not fields:
            return
        if not any(f.type for f in fields):
            members = [(f"`{f.name}`", default_of(f), cell(f.doc)) for f in fields]
            self.add(table(("member", "value", "meaning"), members))
        elif has_defaults:
            rows = [(f"`{f.name}`", code(f.type), default_of(f), cell(f.doc)) for f in fields]
            self.add(table(("field", "type", "default", "meaning"), rows))
        else:
            keys = [(f"`{f.name}`", code(f.type), cell(f.doc)) for f in fields]
            self.add(table(("field", "type", "meaning"), keys))
        self.add(_see(name for f in fields for name in f.classes))


class Site:
    """The pages of the reference, and the page that describes each class."""

    def __init__(self, package: Package) -> None:
        self.package = package
        self.homes: dict[str, str] = {}
        self.pages: dict[str, Page] = {}

    def page(self, name: str, title: str) -> Page:
        self.pages[name] = Page(self, name, title, PAGES[name])
        return self.pages[name]

    def add_data(self, page: Page, classes: Iterable[ClassName]) -> None:
        """Describe data classes, and those that their fields refer to, unless a page has them already."""
        queue = list(classes)
        while queue:
            cls = self.package.class_of(queue[0].module, queue.pop(0).name)
            if cls.name in self.homes or not cls.is_data:
                continue
            page.add_class(cls)
            queue += [name for field in cls.fields() for name in field.classes]

    def texts(self) -> dict[str, str]:
        """Page name -> text with links."""
        return {page.name: self._linked(page) for page in self.pages.values()}

    def _linked(self, page: Page) -> str:
        def anchor(name: str) -> str:
            return f"{'' if self.homes[name] == page.name else self.homes[name]}#{name.lower()}"

        def see(match: re.Match[str]) -> str:
            links = [f"[{name}]({anchor(name)})" for name in match[1].split() if name in self.homes]
            return f"\n\nSee {', '.join(links)}." if links else ""

        def mention(match: re.Match[str]) -> str:
            return f"[{match[0]}]({anchor(match[1])})" if match[1] in self.homes else match[0]

        parts = re.split(r"(^```.*?^```$|^#.*$)", re.sub(r"\n*\0(.*?)\0", see, page.text), flags=re.M | re.S)
        return "".join(p if i % 2 else re.sub(r"`([A-Z]\w+)(\.\w+)?`", mention, p) for i, p in enumerate(parts))


def _see(classes: Iterable[ClassName]) -> str:
    """A place for links to classes, which are known when all pages are."""
    return f"\0{' '.join(dict.fromkeys(cls.name for cls in classes))}\0"


# -- the pages ----------------------------------------------------------------------------------------------


def settings_page(site: Site) -> None:
    page = site.page("settings.md", "Settings")
    settings = site.package.class_of("verl_server.server_args", "ServerArgs")
    site.homes[settings.name] = page.name
    page.add("## ServerArgs", settings.doc.partition("\n")[0])
    page.add(
        "Each is a keyword argument of the engines and of `ServerArgs`, and a flag of `verl-server serve`. A boolean "
        "also has a `--no-` form."
    )
    page.add(table(("setting", "flag", "type", "default", "meaning"), [setting_row(f) for f in settings.fields()]))


def commands_page(site: Site) -> None:
    page = site.page("commands.md", "Commands")
    cli = importlib.import_module("verl_server.cli.main")
    trajectories = importlib.import_module("verl_server.cli.trajectories")
    page.add(
        "The package installs one program, `verl-server`, which is also `python -m verl_server`. The trainers are "
        "`python -m verl_server.train.grpo` and `async_grpo`, also under torchrun. Other modules that run with "
        "`python -m` are processes that these programs start. A boolean option also has a `--no-` form. `--help` lists "
        "the same."
    )
    page.add(f"```\n{cli.USAGE.strip()}\n```")
    page.add("## verl-server serve", cli.SERVE_HELP, "Its options are the [settings](settings.md#serverargs).")
    for command, (module, name) in COMMANDS.items():
        if command == "verl-server trajectories ls":
            page.add("## verl-server trajectories", trajectories.HELP)
        cls = site.package.class_of(module, name)
        site.homes[name] = page.name
        level = "###" if command.startswith("verl-server trajectories ") else "##"
        rows = options(site, cls)
        page.add(f"{level} {command}", prose(cls.doc), table(("option", "type", "default", "meaning"), rows))
    page.add("## verl-server bench", prose(inspect.getdoc(cli.bench) or ""))


def options(site: Site, cls: Class, prefix: str = "", given: Mapping[str, str] | None = None) -> list[tuple[str, ...]]:
    """Rows of a command's options; those of nested classes follow with their prefix.

    `given`: defaults that the command sets in place of those of the class.
    """
    rows: list[tuple[str, ...]] = []
    for field in cls.fields():
        if given and field.name in given:
            field = replace(field, default=given[field.name])
        name = field.name if field.option_name is None else field.option_name
        flag = f"--{prefix}{name.replace('_', '-')}"
        nested = [inner for c in field.classes if (inner := site.package.class_of(c.module, c.name)).is_data]
        if field.type.endswith(" | None"):
            nested = []  # one option names a file with the values
        if nested and nested[0].name == "ServerArgs":
            rows.append((f"`{flag}.SETTING`", "`ServerArgs`", "", cell(field.doc)))
        elif nested:
            below = f"{prefix}{name.replace('_', '-')}." if name else prefix
            rows += options(site, nested[0], below, keywords_of(field.default))
        elif field.type.startswith("Positional"):
            rows.append((f"`{field.name.upper()}`", code(field.type[11:-1]), default_of(field), cell(field.doc)))
        else:
            rows.append((f"`{flag}`", code(field.type), default_of(field), cell(field.doc)))
    return rows


def keywords_of(default: str | None) -> dict[str, str]:
    """Return the keyword arguments in the source of a default such as `Limits(max_turns=8)`."""
    call = None if default is None else ast.parse(default, mode="eval").body
    if not isinstance(call, ast.Call):
        return {}
    return {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is not None}


def setting_row(field: Field) -> tuple[str, ...]:
    return (
        f"`{field.name}`",
        f"`--{field.name.replace('_', '-')}`",
        code(field.type),
        default_of(field),
        cell(field.doc),
    )


def http_page(site: Site) -> None:
    page = site.page("http.md", "HTTP")
    page.add(
        "Bodies are JSON objects. A field that is null has its default. An unknown field that is a slip away from "
        "a known one is answered 400 with that one, and so is every unknown field of `sampling_params`. Others "
        "are accepted, counted by name in `/metrics`, and named in the header `X-Verl-Unknown-Fields` of the "
        "answer; `--unknown-fields refuse` answers 400. Query parameters are treated alike. Answers are JSON "
        "where nothing else is said."
    )
    headers = importlib.import_module("verl_server.server.http.routing_headers").__doc__ or ""
    page.add(
        "Headers: " + prose(headers.partition("\n\n")[2]) + " `X-Verl-Prompt-Bytes` announces "
        "[binary prompts](#binary-prompts). Each answer has `X-Verl-Instance`."
    )
    groups: dict[str, list[Operation]] = {}
    for operation in mounted_operations():
        groups.setdefault(operation.handler.__module__, []).append(operation)
    used: list[ClassName] = []
    for module, group in groups.items():
        page.add(f"## {SECTIONS[module]}", prose(site.package.module(module).doc.partition("\n\n")[0]))
        for operation in group:
            used += add_operation(site, page, operation)
    for params, *_ in SAMPLING:
        page.add_class(site.package.class_of(params.__module__, params.__name__))
    page.add("## Refused fields", "Known fields that are refused, or have no effect: [fields](fields.md).")
    page.add("## Errors", prose(site.package.module("verl_server.errors").doc))
    page.add(prose(site.package.module("verl_server.server.http.responses").doc.partition("\n\n")[2]))
    packed = site.package.module("verl_server.server.packed_prompts").doc
    page.add("## Binary prompts", prose(packed.partition("\n\n")[2]))
    columns = site.package.module("verl_server.messages.columns").doc
    page.add(
        "## Replies in columns",
        "The field `columnar` replaces lists by arrays. The header `Accept: application/msgpack` makes the whole reply "
        "msgpack. Event streams stay JSON; their frames may be columnar. Columns hold no text, so "
        "`return_text_in_logprobs` with `columnar` is refused.",
        prose(columns),
    )
    site.add_data(page, used)


def add_operation(site: Site, page: Page, operation: Operation) -> list[ClassName]:
    """Describe an operation under all of its paths. Return the classes that its request refers to."""
    methods = " or ".join(operation.methods)
    page.add(f"### {methods} " + ", ".join(f"`{path}`" for path in operation.paths))
    page.add(prose(inspect.getdoc(operation.handler) or ""))
    if operation.query:
        page.add(table(("query", "meaning"), [(f"`{name}`", cell(what)) for name, what in operation.query.items()]))
    if operation.body is None:
        return []
    request = site.package.class_of(operation.body.__module__, operation.body.__name__)
    fields = [f for f in request.fields() if f.name in operation.fields]
    page.add(prose(request.doc))
    page.add_fields(fields)
    return [name for field in fields for name in field.classes]


def mounted_operations() -> list[Operation]:
    """The operations of the real application, made without a server behind it."""
    arguments = importlib.import_module("verl_server.server_args").ServerArgs(model_path="model")
    return operations(MagicMock(), arguments, AccessRules(arguments), MagicMock())


def fields_page(site: Site) -> None:
    page = site.page("fields.md", "Fields")
    page.add(
        "A known field of a body is implemented, refused, or without effect. A *refused* field is answered 400 with "
        "its name if it is set; null, false, 0 and empty values count as unset. A field *without effect* is accepted. "
        "Other fields: see [http](http.md), which describes the implemented fields."
    )
    for operation in mounted_operations():
        if operation.body is None and not operation.refused and not operation.without_effect:
            continue
        page.add("## " + ", ".join(f"`{path}`" for path in operation.paths))
        add_treatments(page, operation.fields, operation.refused, operation.without_effect)
    for params, _, refused, without_effect in SAMPLING:
        page.add(f"## {params.__name__}")
        add_treatments(page, params.__struct_fields__, refused, without_effect)


def add_treatments(
    page: Page, implemented: Iterable[str], refused: Mapping[str, str], without_effect: Mapping[str, str]
) -> None:
    """Add the fields of one body: the implemented ones as a list, the others with their reasons."""
    if names := ", ".join(f"`{name}`" for name in implemented):
        page.add(f"Implemented: {names}.")
    for title, fields in (("refused", refused), ("without effect", without_effect)):
        if fields:
            page.add(table((title, "why, or what to do"), [(f"`{name}`", cell(why)) for name, why in fields.items()]))


def engines_page(site: Site) -> None:
    page = site.page("engines.md", "Engines")
    page.add(
        "`Engine` runs in your process, `HttpServerEngineAdapter` launches a server or attaches to one: both have the "
        "methods of `EngineBase`. Every rank of a trainer holds a `VerlEngine`."
    )
    for name in ("VerlEngine", "HttpServerEngineAdapter"):
        page.add_class(site.package.class_of("verl_server", name))
    page.add("After a restart of its server, an `HttpServerEngineAdapter` has these methods, too:")
    page.add_class(site.package.class_of("verl_server.engine.restarts", "RestartableServer"))
    for name in ("Engine", "EngineBase"):
        page.add_class(site.package.class_of("verl_server", name), inherited=name == "EngineBase")
    for name in ("launch_server", "launch_server_from_verl_engine"):
        page.add_function(site.package.function("verl_server", name), name)
    site.add_data(page, page.used)


def rollouts_page(site: Site) -> None:
    page = site.page("rollouts.md", "Rollouts")
    home = "verl_server.rollout"
    page.add_class(site.package.class_of(f"{home}.agent_loop", "AgentLoop"))
    site.add_data(page, page.used)
    for name in ("summarize", "append_jsonl", "read_jsonl"):
        page.add_function(site.package.function(f"{home}.trajectory", name), name)
    for name in ("TextRenderer", "ChatRenderer"):
        page.add_class(site.package.class_of(f"{home}.renderer", name))
    for name in ("Environment", "RemoteEnvironment"):
        page.add_class(site.package.class_of(f"{home}.environment", name))
    site.add_data(page, page.used)


def agents_page(site: Site) -> None:
    page = site.page("agents.md", "Agents")
    home = "verl_server.rollout.agents"
    page.add(
        "How agents, programs, tools and environments are written: [agents](../agents.md). The command is "
        "[verl-server rollout --agent](commands.md#verl-server-rollout---agent).",
        "```python\nfrom verl_server.rollout.agents.run import arun_agents, run_agents\n"
        "from verl_server.rollout.agents.types import AgentLimits, AgentTask, Server\n```",
    )
    for name in ("run_agents", "arun_agents"):
        page.add_function(site.package.function(f"{home}.run", name), name)
    for name in ("AgentTask", "Server", "AgentLimits", "AgentRun", "AgentEpisode"):
        page.add_class(site.package.class_of(f"{home}.types", name))
    session = site.package.class_of(f"{home}.types", "AgentSession")
    page.add_class(session)
    for method in session.methods():
        if not method.signature.startswith("@property"):
            page.add_function(method, f"AgentSession.{method.name}", "###")
    page.add_class(site.package.class_of(f"{home}.gateway", "GuardedEnvironment"), constructor=False)
    page.add_class(site.package.class_of("verl_server.rollout.environments.text", "TextEnvironment"))
    page.add_class(site.package.class_of(f"{home}.tool_loop", "ToolLoop"))
    page.add_class(site.package.class_of(f"{home}.installed", "InstalledAgent"))
    for name in ("Recipe", "Place", "Start"):
        page.add_class(site.package.class_of(f"{home}.recipes.recipe", name))
    site.add_data(page, page.used)


def run_folder_page(site: Site) -> None:
    page = site.page("run-folder.md", "The files of a training run")
    page.add(
        "The folder of `python -m verl_server.train.grpo --out`. "
        "[The output of a run](../runs.md#the-files-of-a-training-run) "
        "says what lines of several starts mean, how files are rotated and bounded, and what writing costs.",
        table(("file", "one line is", "written by"), RUN_FILES),
        "`verl_server.watch` reads them, also while the run grows, and in folders of earlier versions:",
        "```python\nfrom verl_server.watch.recorded import read_recorded\n"
        "from verl_server.watch.run_files import read_evaluations, read_events, read_metrics, read_trained\n```",
    )
    page.add_function(site.package.function("verl_server.watch.recorded", "read_recorded"), "read_recorded")
    for name in ("read_metrics", "read_evaluations", "read_events", "read_trained"):
        page.add_function(site.package.function("verl_server.watch.run_files", name), name)
    page.add_class(site.package.class_of("verl_server.watch.recorded", "Recorded"))
    home = "verl_server.watch.run_records"
    for name in ("Label", "Evaluation", "HeldOutFigures", "TrainedTrajectory"):
        page.add_class(site.package.class_of(home, name))
    page.add_class(site.package.class_of("verl_server.train.metrics", "StepMetrics"))
    page.add_class(site.package.class_of("verl_server.train.environment_figures", "EnvironmentFigures"))
    page.add_class(site.package.class_of("verl_server.train.rollout_report", "Failure"))
    page.add_class(site.package.class_of(home, "RunEvent"))
    for event in get_args(AnyEvent):
        page.add_class(site.package.class_of(home, event.__name__), level="###")
        page.add(f'`kind` is `"{event.__struct_config__.tag}"`.')


def extras_page(site: Site) -> None:
    page = site.page("extras.md", "Extras")
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    page.add(
        "`pip install 'verl-server[NAME]'` installs the packages of an extra beside those that every installation has. "
        "Without an extra, whatever needs it names it in an error."
    )
    rows = [
        (f"`{name}`", cell(" ".join(comment_above(text, name))), ", ".join(map(code, packages)))
        for name, packages in extras.items()
    ]
    page.add(table(("extra", "who needs it", "packages"), rows))


def comment_above(text: str, name: str) -> list[str]:
    """Return the lines of the comment above `name = [` in pyproject.toml. Raise LookupError if there is none."""
    lines = text.split("[project.optional-dependencies]")[1].splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"{name} = ["))
    found: list[str] = []
    while at and lines[at - 1].startswith("#"):
        at -= 1
        found.insert(0, lines[at].removeprefix("#").strip())
    if not found:
        raise LookupError(f"The extra {name} of pyproject.toml has no comment above it that says who needs it.")
    return found


# -- Markdown -----------------------------------------------------------------------------------------------


def prose(docstring: str) -> str:
    """A docstring as Markdown: paragraphs are kept, an indented block becomes a code block."""
    return re.sub(r"((?:^(?: {4}.*)?\n)+(?: {4}.*)$)", _block, docstring, flags=re.MULTILINE).strip()


def _block(match: re.Match[str]) -> str:
    lines = [line.removeprefix("    ") for line in match[1].strip("\n").split("\n")]
    language = "python" if lines[0].startswith("import ") else ""
    return f"\n```{language}\n" + "\n".join(lines) + "\n```"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def code(source: str) -> str:
    """Source in a table's cell."""
    return f"`{source.replace('|', chr(92) + '|')}`".replace("'", '"') if source else ""


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def default_of(field: Field) -> str:
    return "required" if field.default is None else code(field.default)


def build() -> dict[str, str]:
    """Path below docs/reference -> text, of all pages."""
    site = Site(Package(ROOT))
    writers: list[Callable[[Site], None]] = [
        settings_page,
        commands_page,
        http_page,
        fields_page,
        engines_page,
        rollouts_page,
        agents_page,
        run_folder_page,
        extras_page,
    ]
    for write in writers:
        write(site)
    index = ["<!-- Written by `make docs`. -->", "# Reference", "Generated from the code by `make docs`."]
    index.append("\n".join(f"- [{name.removesuffix('.md')}]({name}): {what}" for name, what in PAGES.items()))
    return site.texts() | {"README.md": "\n\n".join(index) + "\n"}


def operations_table() -> str:
    """The operations as `verl_server.fleet` reads them: a router knows the routes of servers without their code."""
    rows = [
        {
            "paths": operation.paths,
            "methods": operation.methods,
            "dialect": operation.dialect,
            "access": operation.access,
            "in_session": operation.in_session,
            "generates": operation.generates,
            "says_success": error_shape(operation) == "RefusedUpdate",
            "shared_with": {header: dialect_of(shape) for header, shape in operation.shared_with.items()},
        }
        for operation in mounted_operations()
    ]
    return "[\n" + ",\n".join(f" {json.dumps(row)}" for row in rows) + "\n]\n"


def dialect_of(shape: AnswerError) -> str:
    """The dialect whose module defines a shape of errors."""
    parts = shape.__module__.split(".")
    return parts[parts.index("dialects") + 1]


def main() -> int:
    files = {FOLDER / name: text for name, text in build().items()} | {OPERATIONS: operations_table()}
    if "--check" in sys.argv[1:]:
        stale = [str(path.relative_to(ROOT)) for path, text in files.items() if not _is_written(path, text)]
        if stale:
            print(f"Stale: {', '.join(stale)}. Run `make docs` and commit the result.", file=sys.stderr)
        return 1 if stale else 0
    FOLDER.mkdir(exist_ok=True)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return 0


def _is_written(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
