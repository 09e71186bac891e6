"""An installed agent with its real prompts: tokens of its prompts, hits of the prefix cache, and seconds of a turn.

    python -m benchmarks.installed_agents --device cuda --shape 0.6b --tokenizer FOLDER --program /usr/bin/claude
    python -m benchmarks.installed_agents --shape tiny --tokenizer FOLDER --episodes 4 --turns 3

Starts one server with random weights. `--episodes` episodes of `--agent` play at once through sessions, each in
bubblewrap. A relay (`tests/programs/scripted.py`) forces the texts of the policy: `--turns` - 1 calls of the shell,
then an answer. A command prints `--output-bytes` random bytes, so no two episodes have one history. The runs are played
with the prefix cache and without it, `--rounds` times after one that warms up. The figures:

first_prompt     Tokens of the first prompt of an episode, in the tokenizer of the server.
new_tokens       Median of the tokens that a later turn adds to its prompt.
hits             Prompt tokens that came from the prefix cache, as a share of all. `hits_possible` is the share that a
                 cache without a limit could have: the earlier turns of the same episode, and the beginning that all
                 first prompts have in common.
first_token      Median seconds from a request's arrival to its first token, of the first turns and of the later ones.
turn             Median seconds from a request's arrival to its end.
program          Median seconds from the end of a turn to the arrival of the next request: the program and its command.
episode          Median seconds of an episode.
run              Seconds of all episodes.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.options import engine_settings, make_parser, report, report_run
from benchmarks.shapes import SHAPES
from tests.programs.scripted import Call, Say, Script, ScriptedRelay
from verl_server import HttpServerEngineAdapter
from verl_server.messages.session_types import Branch
from verl_server.models.tiny import CHAT_TEMPLATE, make_model_folder
from verl_server.rollout.agents.installed import InstalledAgent, ProgramOptions
from verl_server.rollout.agents.loading import load_agent
from verl_server.rollout.agents.run import run_agents
from verl_server.rollout.agents.types import AgentLimits, AgentRun, AgentTask, Server

KEY = "owner"
CONTEXT = 131_072
_EPISODE_SECONDS = 500.0


@dataclass
class Measured:
    """The figures of one run of all episodes."""

    run: AgentRun
    prompt_tokens: float
    cached_tokens: float

    @property
    def branches(self) -> list[Branch]:
        """The branches of the episodes. Raise RuntimeError if an episode is not one branch of all its turns."""
        branches = []
        for episode in self.run.episodes:
            if episode.trajectory is None or len(episode.trajectory.branches) != 1:
                raise RuntimeError(f"Episode {episode.name} is not one branch: {episode.reason}, {episode.error}")
            branches += episode.trajectory.branches
        return branches

    @property
    def hits(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def hits_possible(self) -> float:
        """Share of the prompt tokens that a cache without a limit has."""
        firsts = [branch.ids[: branch.turns[0].prompt_end] for branch in self.branches]
        common = len(list(itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*firsts, strict=False))))
        total = sum(turn.prompt_end for branch in self.branches for turn in branch.turns)
        again = sum(turn.start for branch in self.branches for turn in branch.turns[1:])
        return (again + common * (len(firsts) - 1)) / total

    def seconds(self, part: str) -> dict[str, float]:
        """Return the median seconds of a part of the first turns and of the later ones."""
        first: list[float] = []
        later: list[float] = []
        for branch in self.branches:
            ended = None
            for turn in branch.turns:
                assert turn.times is not None
                arrived, token, end = turn.times
                value = {"first_token": token - arrived, "turn": end - arrived}.get(part)
                if part == "program":
                    value = None if ended is None else arrived - ended
                if value is not None:
                    (later if turn.start else first).append(value)
                ended = end
        return {
            name: round(statistics.median(values), 4) for name, values in (("first", first), ("later", later)) if values
        }


def script(args: argparse.Namespace) -> tuple[AgentTask, Script]:
    """Return the task, and what the policy does."""
    command = f"head -c {args.output_bytes * 3 // 4} /dev/urandom | base64"
    calls = [Call(command) for _ in range(args.turns - 1)]
    return AgentTask(input="Print some random bytes, several times."), [*calls, Say("I printed them.")]


def play(agent: InstalledAgent, url: str, args: argparse.Namespace) -> Measured:
    """Play all episodes once."""
    task, steps = script(args)
    before = token_counts(url)
    relay = ScriptedRelay(url, {task.input: steps})
    with relay.running():
        run = run_agents(
            agent,
            [task],
            servers=[Server(relay.url, KEY)],
            reward=lambda episode: 1.0,
            group_size=args.episodes,
            max_concurrency=args.episodes,
            limits=AgentLimits(seconds=_EPISODE_SECONDS),
            retries=0,
        )
    if relay.unscripted:
        raise RuntimeError(f"{len(relay.unscripted)} requests without a script: {relay.unscripted[0][:2000]}")
    ends = {(episode.reason, episode.turns) for episode in run.episodes}
    if {turns for _, turns in ends} != {args.turns}:
        raise RuntimeError(f"The episodes ended as {ends}: {run.episodes[0].error}")
    after = token_counts(url)
    return Measured(run, *(b - a for a, b in zip(before, after, strict=True)))


def token_counts(url: str) -> tuple[float, float]:
    """Return (prompt tokens, those from the prefix cache) of the server so far."""
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = answer.read().decode()
    found = [re.search(rf"^sglang:{name}_tokens_total{{[^}}]*}} (\S+)", text, re.M) for name in ("prompt", "cached")]
    return tuple(0.0 if match is None else float(match[1]) for match in found)  # type: ignore[return-value]


def model_folder(args: argparse.Namespace, parent: Path) -> Path:
    """Write a model of the shape with the tokenizer, a template with tools, and a long context."""
    tokenizer: Any = AutoTokenizer.from_pretrained(args.tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE
    shape: dict[str, Any] = SHAPES[args.shape] | {"max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6}
    shape["vocab_size"] = max(shape["vocab_size"], len(tokenizer))
    return make_model_folder(parent / "model", "qwen3", tokenizer=tokenizer, weights=False, **shape)


def print_figures(name: str, rounds: Sequence[Measured], seconds: Sequence[float]) -> None:
    """Print the figures of some rounds with the same settings: each is the median over the rounds."""
    last = rounds[-1]
    report(f"{name}.hits", statistics.median(each.hits for each in rounds), "share", possible=last.hits_possible)
    for part in ("first_token", "turn", "program"):
        found = [each.seconds(part) for each in rounds]
        for turns in found[0]:
            values = [each[turns] for each in found]
            report(f"{name}.{part}.{turns}", statistics.median(values), "s", rounds=values)
    episodes = [statistics.median(episode.seconds for episode in each.run.episodes) for each in rounds]
    report(f"{name}.episode", statistics.median(episodes), "s", rounds=episodes)
    report(f"{name}.run", statistics.median(seconds), "s", rounds=list(seconds))


def benchmark(args: argparse.Namespace, parent: Path) -> None:
    agent = load_agent(args.agent, program=ProgramOptions(program=args.program, isolation=args.isolation))
    assert isinstance(agent, InstalledAgent)
    folder = model_folder(args, parent)
    rounds: dict[str, list[Measured]] = {"cache": [], "no_cache": []}
    for name in rounds:
        settings = engine_settings(
            args,
            folder,
            skip_tokenizer_init=False,
            served_model_name="policy",
            disable_radix_cache=name == "no_cache",
            port=0,
            api_key=KEY,
        )
        if name == "no_cache" and args.no_comparison:
            break
        server = HttpServerEngineAdapter(**settings)
        try:
            assert server.url is not None
            play(agent, server.url, args)
            if name == "cache":
                server.flush_cache()
            rounds[name] = [play(agent, server.url, args) for _ in range(args.rounds)]
        finally:
            server.shutdown()
        first = rounds[name][0]
        if name == "cache":
            report("first_prompt", first.branches[0].turns[0].prompt_end, "tokens", agent=str(agent))
            later = [turn.prompt_end - turn.start for branch in first.branches for turn in branch.turns[1:]]
            report("new_tokens", statistics.median(later), "tokens")
        print_figures(name, rounds[name], [each.run.seconds for each in rounds[name]])


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("benchmarks.installed_agents", __doc__)
    parser.add_argument(
        "--agent", default="claude-code", help="recipe, with further words of its command (claude-code)"
    )
    parser.add_argument("--program", help="path of the program; default: the one on PATH")
    parser.add_argument("--isolation", choices=["bubblewrap", "none"], default="bubblewrap")
    parser.add_argument("--tokenizer", required=True, help="folder with a tokenizer of a released model")
    parser.add_argument("--episodes", type=int, default=16, help="episodes at once (16)")
    parser.add_argument("--turns", type=int, default=6, help="turns of an episode (6)")
    parser.add_argument("--output-bytes", type=int, default=2000, help="bytes that a command prints (2000)")
    parser.add_argument("--rounds", type=int, default=2, help="runs with each setting, after one that warms up (2)")
    parser.add_argument("--no-comparison", action="store_true", help="only with the prefix cache")
    args = parser.parse_args(argv)
    report_run("benchmarks.installed_agents", args, argv)
    with tempfile.TemporaryDirectory() as temporary:
        benchmark(args, Path(temporary))


if __name__ == "__main__":
    main()
