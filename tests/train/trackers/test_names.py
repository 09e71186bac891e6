"""The names of figures in trackers: each field has one, the page lists them, and an absent figure is not a zero."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

from tests.train.trackers.steps import evaluation, step_metrics
from verl_server.train.environment_figures import EnvironmentFigures
from verl_server.train.metrics import StepMetrics
from verl_server.train.trackers.names import (
    CRITIC_LOSSES,
    ENVIRONMENT_FIGURES,
    EVALUATED_ENVIRONMENT_FIGURES,
    EVALUATION_FIGURES,
    EVALUATION_GROUPS,
    STEP_FIGURES,
    STEP_GROUPS,
    WITHOUT_NAME,
    figures_of_evaluation,
    figures_of_step,
)
from verl_server.watch.run_records import HeldOutFigures

PAGE = Path(__file__).parents[3] / "docs" / "trackers.md"


def test_each_field_of_a_step_has_one_name_or_a_reason_for_none() -> None:
    named = [*STEP_FIGURES.values(), *STEP_GROUPS.values(), *WITHOUT_NAME, "environments"]
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(StepMetrics))
    of_environment = [field.name for field in dataclasses.fields(EnvironmentFigures)]
    assert sorted(ENVIRONMENT_FIGURES.values()) == sorted(of_environment)
    assert sorted(EVALUATED_ENVIRONMENT_FIGURES.values()) == sorted(HeldOutFigures.__struct_fields__)


def test_figures_of_each_environment_of_a_mixture() -> None:
    figures = EnvironmentFigures(3, 1, 12, 2, 1, 0.5, None, 2.5, 40)
    found = figures_of_step(step_metrics(2, environments={"code": figures}))
    own = {name: figure for name, figure in found.items() if name.startswith("env/")}
    assert own.keys() == {f"env/code/{end}" for end in ENVIRONMENT_FIGURES} - {"env/code/success"}
    assert (own["env/code/reward"], own["env/code/groups"], own["env/code/tokens"]) == (0.5, 3, 40)
    held = {"code": {"episodes": 4, "failed": 1, "reward": 0.5, "success": 0.25}}
    evaluated = figures_of_evaluation(evaluation(10, environments=held))
    of_verifiers = figures_of_evaluation(evaluation(10, episode_metrics={"near": 0.5}))
    assert of_verifiers["evaluation/metrics/near"] == 0.5
    assert evaluated["evaluation/env/code/success"] == 0.25 and evaluated["evaluation/env/code/failed"] == 1
    incomplete = figures_of_evaluation(evaluation(10, environments=held, incomplete="timeout"))
    assert evaluated.keys() - incomplete.keys() == {
        *("evaluation/reward", "evaluation/success"),
        *("evaluation/env/code/reward", "evaluation/env/code/success"),
    }


def test_the_page_lists_the_names_with_their_fields() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    groups = {f"{prefix}KEY": field for prefix, field in STEP_GROUPS.items()}
    mixture = {f"env/NAME/{end}": field for end, field in ENVIRONMENT_FIGURES.items()}
    mixture |= {f"evaluation/env/NAME/{end}": field for end, field in EVALUATED_ENVIRONMENT_FIGURES.items()}
    of_steps = [*STEP_FIGURES.items(), *CRITIC_LOSSES.items(), *groups.items()]
    of_evaluations = EVALUATION_FIGURES | {f"{prefix}KEY": key for prefix, key in EVALUATION_GROUPS.items()}
    code = [*of_steps, *of_evaluations.items(), *mixture.items()]
    assert sorted(rows) == sorted(code)


def test_figures_of_a_step() -> None:
    figures = figures_of_step(step_metrics(2, reward=None, waits={"episodes": 0.5}, idle={"trainer": 0.25}))
    assert "reward/mean" not in figures, "a step without a reward has no figure of it"
    assert figures["episodes/count"] == 8 and figures["gap/mean"] == 1e-5 and figures["time/rollout"] == 1.5
    assert figures["policy/behaviour_kl"] == 0.25 and math.isnan(figures["policy/loss"])
    assert figures["episodes/ended/env_error"] == 1 and figures["time/wait/episodes"] == 0.5
    assert figures["idle/trainer"] == 0.25
    assert not {"age/mean", "policy/loss_scale"} & figures.keys()


def test_losses_of_the_critic_are_not_among_those_of_the_policy() -> None:
    losses = {"loss": 0.5, "grad_norm": 1.0} | {key: 0.25 for key in CRITIC_LOSSES.values()}
    figures = figures_of_step(step_metrics(0, losses=losses, stop_reasons={"value": 1}))
    named = {name for name in figures if name.startswith(("policy/", "critic/"))}
    assert named == {"policy/loss", "policy/grad_norm", "policy/skipped_optimizer_steps", *CRITIC_LOSSES}
    assert figures["episodes/ended/value"] == 1, "a key of another mapping is none of the critic"


def test_a_step_has_the_same_names_whichever_trainer_made_it() -> None:
    synchronous = figures_of_step(step_metrics(0)).keys()
    asynchronous = figures_of_step(step_metrics(0, age=1.0, age_max=2, waits={"deadline": 1.0})).keys()
    assert asynchronous - synchronous == {"age/mean", "age/max", "time/wait/deadline"}
    assert not synchronous - asynchronous


def test_figures_of_an_evaluation() -> None:
    figures = figures_of_evaluation(evaluation(10, reward=0.75))
    assert figures.keys() == EVALUATION_FIGURES.keys()
    assert (figures["evaluation/reward"], figures["evaluation/push_delay"]) == (0.75, 0.5)
    incomplete = figures_of_evaluation(evaluation(10, incomplete="timeout"))
    assert EVALUATION_FIGURES.keys() - incomplete.keys() == {"evaluation/reward", "evaluation/success"}
