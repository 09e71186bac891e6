"""Values that an environment may return, and the errors that its author gets for other values."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest
import torch

from tests.rollout.fakes import env_server
from verl_server.errors import BadRequestError
from verl_server.rollout.environment import EnvError, RemoteEnvironment
from verl_server.rollout.environments.action_schema import ActionSchema
from verl_server.rollout.environments.hosted_env import EnvMessageError, HostedEnv, reset_observation, step_result

_SEES = {"text": "a"}


class Scripted:
    """An environment that returns the values that the test sets."""

    reset_returns: Any = _SEES
    step_returns: Any = (_SEES, None, False)

    def reset(self, seed: int | None = None) -> Any:
        return self.reset_returns

    def step(self, action: dict[str, Any]) -> Any:
        return self.step_returns


@pytest.mark.parametrize("returned", [_SEES, "a", (_SEES, {}), ["a", {"info": 1}]])
def test_forms_of_reset(returned: Any) -> None:
    assert reset_observation(returned, "E.reset") == _SEES


@pytest.mark.parametrize(
    ("returned", "reward", "done"),
    [
        ((_SEES, 0.5, True), 0.5, True),
        ((_SEES, None, False), None, False),
        (["a", 1, 0], 1.0, False),
        ((_SEES, True, np.True_), 1.0, True),
        ((_SEES, np.float32(0.5), np.False_), 0.5, False),
        ((_SEES, torch.tensor(0.5), torch.tensor(True)), 0.5, True),
        ((_SEES, 0.5, False, False, {}), 0.5, False),
        ((_SEES, 0.5, True, False, {}), 0.5, True),
        ((_SEES, 0.5, False, np.True_, {"why": "time"}), 0.5, True),
    ],
)
def test_forms_of_step(returned: Any, reward: float | None, done: bool) -> None:
    assert step_result(returned, "E.step") == (_SEES, reward, done)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, r"E\.reset must return the observation \(a dict or a string\), or Gymnasium's \(observation, info\)"),
        (None, "It returned an object of type NoneType: None"),
        ((_SEES, 1.0), "It returned an object of type tuple with 2 entries: "),
        ((7, {}), "observation that is a dict or a string. It returned an object of type int: 7"),
        (np.zeros(3), "It returned an object of type ndarray"),
    ],
)
def test_a_reset_that_returns_something_else(returned: Any, says: str) -> None:
    with pytest.raises(EnvMessageError, match=says):
        reset_observation(returned, "E.reset")


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (_SEES, r"E\.step must return \(observation, reward, done\), or Gymnasium's \(observation, reward, terminated"),
        ((_SEES, 1.0), "It returned an object of type tuple with 2 entries: "),
        ((_SEES, 1.0, False, {}), "It returned an object of type tuple with 4 entries: "),
        ((_SEES, 1.0, False, False, "info"), "It returned an object of type tuple with 5 entries: "),
        (
            ("a", "1.0", False),
            "reward that is a finite number, or None for no reward. It returned .* str: '1.0'",
        ),
        (("a", float("nan"), False), "It returned an object of type float: nan"),
        (("a", np.ones(2), False), "It returned an object of type ndarray"),
        (("a", 1.0, "False"), "`done` as True or False. It returned an object of type str: 'False'"),
        (("a", 1.0, None), "`done` as True or False"),
        (("a", 1.0, False, 2, {}), "`truncated` as True or False"),
        ((None, 1.0, False), "observation that is a dict or a string"),
    ],
)
def test_a_step_that_returns_something_else(returned: Any, says: str) -> None:
    with pytest.raises(EnvMessageError, match=says):
        step_result(returned, "E.step")


def test_the_client_reads_the_class_and_the_method() -> None:
    class Wrong(Scripted):
        step_returns = (_SEES, {"score": 1})

    async def main() -> None:
        async with env_server(Wrong) as url, RemoteEnvironment(url) as environment:
            await environment.reset(1)
            with pytest.raises(EnvError, match=r"Wrong\.step must return .* tuple with 2 entries"):
                await environment.step({})

    asyncio.run(main())


def test_gymnasiums_forms_over_the_wire() -> None:
    class Gym(Scripted):
        reset_returns = (_SEES, {"info": 1})
        step_returns = ({"board": np.arange(2)}, np.float64(0.25), False, True, {"TimeLimit.truncated": True})

    async def main() -> None:
        async with env_server(Gym) as url, RemoteEnvironment(url) as environment:
            assert (await environment.reset(1)).observation == _SEES
            result = await environment.step({})
            assert (result.observation, result.reward, result.done) == ({"board": [0, 1]}, 0.25, True)

    asyncio.run(main())


def test_what_is_no_json_is_an_error_and_the_episode_goes_on() -> None:
    class Odd(Scripted):
        def step(self, action: dict[str, Any]) -> Any:
            return ({"text": object()} if action else _SEES), None, False

        @property
        def state(self) -> Any:
            return 7

    async def main() -> None:
        async with env_server(Odd) as url, RemoteEnvironment(url) as environment:
            await environment.reset(1)
            with pytest.raises(EnvError, match=r"cannot be written as JSON: .*object"):
                await environment.step({"text": "x"})
            with pytest.raises(
                EnvError, match=r"Odd\.state must be a property that is a dict\. It returned an object of type int: 7"
            ):
                await environment.state()
            assert (await environment.step({})).observation == _SEES

    asyncio.run(main())


def test_a_function_that_returns_no_environment() -> None:
    def make() -> Any:
        return {"text": "hello"}

    async def main() -> None:
        with pytest.raises(EnvMessageError, match=r"make\(\) returned .* dict.*: it has no method reset\(seed=None\)"):
            await HostedEnv(make, None).reset({})

    asyncio.run(main())


# -- actions --------------------------------------------------------------------------------------------------

_GUESS = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 5},
        "where": {"type": "object", "properties": {"row": {"type": "integer", "minimum": 0}}},
    },
    "required": ["text"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ({}, r"G\.action_schema at `action`: 'text' is a required property"),
        ({"text": 5}, r"at `action\.text`: 5 is not of type 'string'"),
        ({"text": "too long"}, r"at `action\.text`: 'too long' is too long"),
        ({"text": "a", "where": {"row": -1}}, r"at `action\.where\.row`: -1 is less than the minimum"),
        ({"text": "a", "txt": "b"}, r"at `action`: .*'txt' was unexpected"),
    ],
)
def test_a_violation_names_the_field(action: dict[str, Any], says: str) -> None:
    violation = ActionSchema("G", _GUESS).violation(action)
    assert violation is not None
    assert re.search(says, violation), violation


def test_an_action_that_fits() -> None:
    assert ActionSchema("G", _GUESS).violation({"text": "a", "where": {"row": 1}}) is None


@pytest.mark.parametrize("schema", ["text", {"type": "strng"}, {"properties": {"text": {"minLength": "1"}}}])
def test_a_schema_that_is_none_is_refused_at_the_start(schema: Any) -> None:
    with pytest.raises(BadRequestError, match=r"G\.action_schema"):
        ActionSchema("G", schema)


def test_no_schema_is_downloaded() -> None:
    schema = ActionSchema("G", {"$ref": "http://127.0.0.1:9/schema.json"})
    with pytest.raises(Exception, match="Unresolvable"):
        schema.violation({})


def test_an_action_that_violates_the_schema_does_not_reach_the_environment() -> None:
    class Typed(Scripted):
        action_schema = _GUESS
        seen: list[Any] = []  # noqa: RUF012

        def step(self, action: dict[str, Any]) -> Any:
            self.seen.append(action)
            return super().step(action)

    async def main() -> None:
        async with env_server(Typed) as url, RemoteEnvironment(url) as environment:
            await environment.reset(1)
            with pytest.raises(EnvError, match=r"VALIDATION_ERROR: .*Typed\.action_schema at `action\.text`: 5 is not"):
                await environment.step({"text": 5})
            assert (await environment.step({"text": "a"})).observation == _SEES  # the episode continues
        assert Typed.seen == [{"text": "a"}]

    asyncio.run(main())


def test_a_client_that_leaves_in_the_middle_of_a_step_frees_its_place() -> None:
    """The client waits for an answer, and `close` arrives while `step` still runs."""
    started, ended = asyncio.Event(), asyncio.Event()

    class Hanging:
        async def reset(self, seed: int | None = None) -> dict[str, Any]:
            return _SEES

        async def step(self, action: dict[str, Any]) -> Any:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

    async def main() -> None:
        async with env_server(Hanging, max_concurrent_envs=1) as url:
            first, second = RemoteEnvironment(url), RemoteEnvironment(url)
            await first.reset(1)
            step = asyncio.ensure_future(first.step({}))
            await started.wait()
            step.cancel()
            await first.close()
            assert (await second.reset(2)).observation == _SEES
            await second.close()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert ended.is_set()
