"""Asynchronous PPO: the trainer of `ppo` in the loop of `async_grpo`.

    python -m verl_server.train.async_ppo --model-path MODEL --env-url http://HOST:PORT --max-staleness 2

Episodes play all the time. `ppo.PPOTrainer` gets those that have finished, and asks the critic for their values when it
trains on them: values and advantages are those of the newest critic, whatever weights sampled the tokens. The loss of
the policy corrects for their age, as in asynchronous GRPO (`losses`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager

from verl_server.train import run
from verl_server.train.async_grpo import AsyncGRPO, open_asynchronous
from verl_server.train.ppo import make_ppo_trainer
from verl_server.train.ppo_options import AsyncPPOTrainArgs
from verl_server.train.run import RunParts


def open_async_ppo(args: AsyncPPOTrainArgs, parts: RunParts) -> AbstractContextManager[AsyncGRPO]:
    """Return the algorithm of a run with the options `args`, to be opened."""
    return open_asynchronous(args, parts, make_ppo_trainer(args, parts))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    return run.main("python -m verl_server.train.async_ppo", AsyncPPOTrainArgs, open_async_ppo, argv)


if __name__ == "__main__":
    sys.exit(main())
