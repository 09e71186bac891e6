"""The file of a mixture, and the options that do not fit it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from verl_server.errors import BadRequestError
from verl_server.files.run_output import without_host
from verl_server.rollout.episode import Limits
from verl_server.train.environment_draw import draw_of
from verl_server.train.grpo import main
from verl_server.train.mixture import MixedEnvironment, Mixture, read_mixture
from verl_server.train.options import AsyncTrainArgs, TrainArgs
from verl_server.train.rollouts.group_messages import decode_args, encode_args
from verl_server.train.run_settings import run_settings

ONE = '[[environment]]\nname = "code"\nurl = "http://a:1"\n'
TWO = '[[environment]]\nname = "math"\nurl = "http://b:2"\n'
EXAMPLE = Path(__file__).parents[2] / "examples" / "mixture.toml"


def read(tmp_path: Path, text: str) -> Mixture:
    file = tmp_path / "mix.toml"
    file.write_text(text)
    return read_mixture(file)


def test_a_file_with_what_each_environment_has_of_its_own(tmp_path: Path) -> None:
    own = 'weight = 2.5\nobservation_key = "board"\naction_key = "move"\n'
    own += "max_turns = 4\nmax_new_tokens = 9\nsuccess = 0.5\n"
    mixture = read(tmp_path, f"{ONE}{own}{TWO}")
    assert mixture["code"] == MixedEnvironment("code", "http://a:1", 2.5, "board", "move", 4, 9, 0.5)
    assert mixture["math"] == MixedEnvironment("math", "http://b:2")
    assert mixture.shares == {"code": 5, "math": 2}
    limits = Limits(max_turns=7, max_new_tokens=8, max_tokens=99)
    assert mixture["code"].limits(limits) == Limits(max_turns=4, max_new_tokens=9, max_tokens=99)
    assert mixture["math"].limits(limits) == limits
    assert [environment.success for environment in mixture.judged(0.8).environments] == [0.5, 0.8]


def test_the_example_is_a_mixture() -> None:
    assert list(read_mixture(EXAMPLE).shares.values()) == [3, 2, 1]


@pytest.mark.parametrize(
    ("weights", "shares"), [((0.7, 0.3), (7, 3)), ((4, 2), (2, 1)), ((1e-3, 1), (1, 1000)), ((0.1 + 0.2, 0.3), None)]
)
def test_weights_are_taken_as_they_are_written(weights: tuple[float, ...], shares: tuple[int, ...] | None) -> None:
    environments = tuple(MixedEnvironment(str(i), "http://a", weight) for i, weight in enumerate(weights))
    if shares is None:
        with pytest.raises(BadRequestError, match=r"in proportion only every \d+ groups, .* round them"):
            Mixture(environments)
    else:
        assert tuple(Mixture(environments).shares.values()) == shares


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[[environment", "mix.toml is no TOML"),
        ("", r"mix.toml: there is no \[\[environment\]\]: add a table"),
        ("steps = 3\n" + ONE, "mix.toml has steps, and a mixture has"),
        ('[environment]\nname = "code"\n', r"write \[\[environment\]\] with two brackets"),
        ("environment = [3]", r"\[\[environment\]\] 1 is no table"),
        (TWO + '[[environment]]\nurl = "http://a"\n', r"\[\[environment\]\] 2 has no name: add it"),
        ('[[environment]]\nname = "code"\n', r"\[\[environment\]\] 1 \(code\) has no url"),
        (ONE + "wieght = 3\n", r"1 \(code\) has 'wieght', which is no key of an environment: name, url, weight, "),
        (ONE + 'agent = "m:f"\n', r"1 \(code\) has agent: an agent cannot be an environment of a mixture"),
        (ONE + 'weight = "3"\n', r"1 \(code\): Expected `float`, got `str` - at `\$.weight`"),
        (ONE + "weight = 0\n", r"1 \(code\): weight is 0, and must be more than 0"),
        (ONE + "weight = inf\n", "weight is inf"),
        (ONE + "max_turns = 0\n", r"1 \(code\): max_turns is 0, and must be at least 1"),
        (ONE + "success = nan\n", "success is nan"),
        (ONE.replace("http://a:1", "a:1"), "url is 'a:1', and no URL: write http://HOST:PORT"),
        (ONE.replace("code", "a/b"), "'a/b' is no name of an environment: use"),
        (ONE + ONE, "mix.toml: two environments have the name 'code': rename one"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_and_the_remedy(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(BadRequestError, match=error) as raised:
        read(tmp_path, text)
    assert str(raised.value).startswith(str(tmp_path / "mix.toml"))


def test_an_absent_file_is_named_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model-path", "m", "--mixture", str(tmp_path / "absent.toml")]) == 2
    assert f"--mixture: Cannot read {tmp_path / 'absent.toml'}" in capsys.readouterr().err


MIXTURE = Mixture((MixedEnvironment("code", "http://a:1"), MixedEnvironment("math", "http://b:2", 3)))


def test_options_that_do_not_fit_a_mixture_are_refused() -> None:
    def options(**changes: Any) -> TrainArgs:
        return TrainArgs(model_path="m", mixture=MIXTURE, **changes)

    with pytest.raises(BadRequestError, match="remove --env-url, or add it to the file"):
        options(env_url="http://e")
    with pytest.raises(BadRequestError, match="an agent plays one environment: remove --mixture, or --agent"):
        options(agent="m:f")
    with pytest.raises(BadRequestError, match="--eval-tasks 1 is less than the 2 environments of --mixture"):
        options(eval_tasks=1, eval_every=5)
    with pytest.raises(BadRequestError, match="--env-url is missing: name an environment server, or several"):
        TrainArgs(model_path="m")
    draw = draw_of(options(eval_success=0.25))
    assert draw is not None and draw.mixture["code"].success == 0.25
    assert draw_of(TrainArgs(model_path="m", env_url="http://e")) is None


def test_the_rollout_process_gets_what_was_read() -> None:
    args = AsyncTrainArgs(model_path="m", mixture=MIXTURE)
    assert decode_args(encode_args(args)).mixture == MIXTURE


def test_a_run_stores_its_mixture_without_hosts() -> None:
    args = TrainArgs(model_path="m", mixture=MIXTURE)
    stored = run_settings(args)
    assert [row["url"] for row in stored["mixture"]] == ["http://*", "http://*"]
    moved = Mixture(tuple(dataclasses.replace(e, url=f"http://other/{i}") for i, e in enumerate(MIXTURE.environments)))
    assert moved.compared(without_host) != stored["mixture"], "a path on the server is compared"
    assert stored["mixture"][1]["weight"] == 3 and not [name for name in stored if name.startswith("mixture.")]
    assert run_settings(TrainArgs(model_path="m", env_url="http://e"))["mixture"] is None
