"""The rule about figures that are not finite: the step is lost, and often the run."""

from __future__ import annotations

import math

from verl_server.watch.advisory_rules.figures import Finding, Past, StepFigures, Steps

_CAUSES = {
    "reward": (
        "a reward function that divides by zero or takes the logarithm of it",
        "Make the environment return a number for every answer.",
    ),
    "logprob": (
        "server and trainer do not compute the same policy, or a sampled token is impossible for one of them",
        "Look at the last push in events.jsonl, and at the temperature and the masks of requests.",
    ),
    "losses": (
        "the policy diverged: a learning rate that is too high, or a dtype that is too small for the model",
        "Continue from a checkpoint before this step, with a lower --grpo.learning-rate, or with --compute-dtype "
        "bfloat16 or float32 if it was float16.",
    ),
}


def non_finite(steps: Steps, past: Past, level: float = 1.0) -> Finding | None:
    """Judge the newest step. `level` changes nothing: a figure is finite or not."""
    names = names_of(steps[-1])
    if not names:
        return None
    kinds = [kind for kind in _CAUSES if any(name.startswith(kind) for name in names)]
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return Finding(
        figure=float(len(names)),
        bound=0.0,
        message=f"not finite: {shown}",
        cause="; or ".join(_CAUSES[kind][0] for kind in kinds),
        remedy=" ".join(_CAUSES[kind][1] for kind in kinds),
        severity="error",
    )


def names_of(step: StepFigures) -> list[str]:
    """Return the names of the rewards, gaps and losses of a step that are not finite. JSON has null in their places."""
    names = dict.fromkeys(name for name in step.not_finite if name.startswith(tuple(_CAUSES)))
    if step.reward is not None and not math.isfinite(step.reward):
        names["reward"] = None
    names |= {
        f"losses.{name}": None for name, value in step.losses.items() if value is None or not math.isfinite(value)
    }
    return list(names)
