"""The settings of a training run in its run.json, and which of them may differ when the run is resumed."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl_server.files.json_files import read_bytes
from verl_server.files.run_output import location, settings_of, without_host
from verl_server.rollout.environments.named import is_named
from verl_server.server_args import ServerArgs
from verl_server.train.options import GRPOConfig, TrainArgs
from verl_server.train.ppo_options import PPOConfig

_TIME = "a bound of time ends an episode or the run, and changes no other one"
_MEMORY = "it changes memory and speed only"
_END = "it says when the run saves or ends"
_FORK = "a run that goes on has checkpoints of its own"
_MEASURED = "it changes what is measured only"
_SERVER = "the weights are pushed to whichever server samples, and its dtype is checked by itself"
_COMPARED_OF_SERVER = (
    "tokenizer_path",
    "skip_tokenizer_init",
    "chat_template",
    "allowed_chat_templates",
    "tool_call_parser",
    "reasoning_parser",
    "context_length",
    "max_session_turn_tokens",
    "revision",
)
"""Settings of the launched server that change prompts or episodes."""
_KEYS = ("api_key", "api_key_file", "admin_api_key", "admin_api_key_file")
MAY_DIFFER = {
    "steps": "a run may be longer; the learning rate falls over the new number of steps",
    "save_every": _END,
    "save_in_background": _MEMORY,
    "fork": _FORK,
    "fork_step": _FORK,
    "keep_checkpoints": "it changes which checkpoints are kept only",
    "eval_every": _MEASURED,
    "eval_tasks": _MEASURED,
    "eval_samples": _MEASURED,
    "eval_timeout": _MEASURED,
    "eval_success": _MEASURED,
    "eval_file": _MEASURED,
    "replay_actions": "the tokens of an episode that goes on are those that it had",
    "keep_trajectories": "it changes what is recorded only",
    "logger": "it changes what is recorded only",
    "max_skipped_steps": _END,
    "retry_pause": _END,
    "rank_timeout": _END,
    "save_timeout": _END,
    "stop_on": _END,
    "device": "the weights are fp32 on each device",
    "compute_dtype": "another one is the remedy for values that are not finite",
    "allow_dtype_mismatch": "it permits what is refused otherwise",
    "gradient_checkpointing": _MEMORY,
    "logprob_chunk": _MEMORY,
    "max_concurrency": _MEMORY,
    "grpo.micro_batch_tokens": _MEMORY,
    "grpo.track_entropy": "it changes a report only",
    "limits.generate_timeout": _TIME,
    "limits.trajectory_timeout": _TIME,
    "limits.restart_timeout": _TIME,
    "limits.straggler_timeout": _TIME,
    "limits.straggler_fraction": _TIME,
    "limits.env.*": _TIME,
    "max_relaunches": _END,
    "replacements": "it bounds how often the infrastructure may fail",
    "server_url": "the server may be another one",
    "server_urls": "the servers may be others",
    "router": "the router may be another one",
    "program": "the same program may be at another place",
} | {
    f"server.{field.name}": _SERVER
    for field in dataclasses.fields(ServerArgs)
    if field.name not in (*_COMPARED_OF_SERVER, *_KEYS)
}
"""Settings that may differ, and why (docs/runs.md). The hosts of `env_url` and of a mixture's environments, and the
number of ranks, may differ, too."""

NOTED = {"program_version": "a program may be updated"}
"""The facts that run.json has beside the settings. They are not compared."""

REMOVED = {"gap_alarm": "stop_on is in its place"}
"""Settings that runs of earlier versions stored, and that are not compared."""


def typed_names(settings: Mapping[str, Any]) -> Callable[[str], str]:
    """Return a function from the name of a setting to the name on the command line of `settings`.

    PPO stores its settings as grpo.NAME, too, so that readers of run.json find those of each algorithm in one place.
    """
    option = PPOConfig.option if str(settings.get("command")).endswith("ppo") else GRPOConfig.option
    return lambda name: f"{option}.{rest}" if (rest := name.removeprefix("grpo.")) != name else name


def run_settings(args: TrainArgs) -> dict[str, Any]:
    """Return the settings that a run stores: without keys, with absolute paths, and with a digest of the tasks' file.

    Raise BadRequestError if the file of the tasks cannot be read.
    """
    settings = settings_of(args.command, args, without=("out", "resume", *(f"server.{key}" for key in _KEYS)))
    settings["fork"] = None if args.fork is None else str(args.fork.resolve())
    for name in ("model_path", "reference_path", "agent", "reward", "server.tokenizer_path", "server.chat_template"):
        settings[name] = None if settings[name] is None else location(settings[name])
    settings |= {name: settings.pop(f"program.{name}") for name in ("program", "isolation", "readable")}
    settings["env_url"] = None if args.env_url is None else without_host(args.env_url)
    settings.pop("mixture.environments", None)
    settings["mixture"] = None if args.mixture is None else args.mixture.compared(without_host)
    settings["router"] = None if args.router is None else without_host(args.router)
    settings["server_urls"] = [without_host(url) for url in args.server_urls]
    is_file = args.tasks is not None and not is_named(args.tasks)
    digest = hashlib.blake2b(read_bytes(Path(args.tasks or "")), digest_size=16).hexdigest() if is_file else None
    tasks = Path(args.tasks or "").name if is_file else args.tasks
    return settings | {"tasks": tasks, "tasks_digest": digest}
