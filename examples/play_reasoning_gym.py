"""Play a task of reasoning-gym, a third-party package of tasks, over HTTP and collect the episodes as trajectories.

    pip install 'verl-server[games]'
    python examples/play_reasoning_gym.py --model-path MODEL

Without --model-path, a tiny model with random weights plays, which shows the calls but solves nothing. The example runs
from any folder.
"""

from __future__ import annotations

import argparse
import tempfile

from transformers import AutoTokenizer

from verl_server import Engine
from verl_server.models.tiny import make_model_folder
from verl_server.rollout.agent_loop import AgentLoop
from verl_server.rollout.environment import EnvTimeouts
from verl_server.rollout.environments.env_server import EnvServer
from verl_server.rollout.episode import Limits
from verl_server.rollout.renderer import ChatRenderer
from verl_server.rollout.trajectory import Task, summarize


def main() -> None:
    parser = argparse.ArgumentParser(description="Play a reasoning-gym task.")
    parser.add_argument("--model-path", default=None, help="model folder or hub id (a tiny random model)")
    parser.add_argument("--task", default="chain_sum", help="name of a reasoning-gym task (chain_sum)")
    parser.add_argument("--episodes", type=int, default=32, help="number of episodes (32)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="most tokens of one answer (64)")
    parser.add_argument("--step-timeout", type=float, default=10.0, help="seconds for a step of the environment (10)")
    parser.add_argument("--straggler-timeout", type=float, default=30.0, help="seconds for the last tenth (30)")
    args = parser.parse_args()
    model_path = args.model_path or str(make_model_folder(tempfile.mkdtemp(), "llama"))

    settings = {"task": args.task, "attempts": 2}
    with (
        EnvServer("verl_server.rollout.environments.games:ReasoningGym", kwargs=settings) as environment,
        Engine(model_path=model_path) as engine,
        AgentLoop(
            engine,
            environment.url,
            ChatRenderer(AutoTokenizer.from_pretrained(model_path)),
            limits=Limits(
                max_turns=2,
                max_new_tokens=args.max_new_tokens,
                straggler_timeout=args.straggler_timeout,
                env=EnvTimeouts(step=args.step_timeout),
            ),
        ) as loop,
    ):
        rollout = loop.run([Task(seed=seed) for seed in range(args.episodes)])

    first = rollout.trajectories[0]
    for turn in first.turns:
        print(f"environment: {turn.observation['text']}\npolicy:      {(turn.action or {}).get('text')!r}")
    print(f"environment: {(first.final_observation or {}).get('text')}")
    print(f"{summarize(rollout.trajectories)}\nin {rollout.seconds:.1f} s")


if __name__ == "__main__":
    main()
