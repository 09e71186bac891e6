"""`replay_actions`: bring a new environment to the place where an earlier process has left an episode.

The recorded actions are sent again. The episode may go on only if the environment gives exactly the recorded answers:
then its tokens are those that the policy would have read. `Episode.replay` calls it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from verl_server.files.json_values import jsonable
from verl_server.rollout.environment import Action, EnvError, StepResult
from verl_server.rollout.recorded_turns import RecordedTurn

_MOST_SHOWN = 300
"""Characters of a value in a message."""


async def replay_actions(
    recorded: Sequence[RecordedTurn],
    reset: Callable[[], Awaitable[StepResult]],
    step: Callable[[Action], Awaitable[StepResult]],
) -> str | None:
    """Reset an environment and play the actions of the turns. Return None if all answers are the recorded ones.

    Otherwise, return what differs first, or how the environment failed, as text. Observations are compared as JSON: 1
    and 1.0 differ, the order of keys does not matter. A turn without an action (wrong JSON, say) did not reach the
    environment, and is passed over.
    """
    number = -1
    try:
        result = await reset()
        first = recorded[0].turn.observation
        if (difference := _difference("the first observation", first, None, result)) is not None:
            return difference
        for number, record in enumerate(recorded):
            if record.turn.action is None:
                continue
            result = await step(record.turn.action)
            place = f"the answer in turn {number}"
            if (difference := _difference(place, record.answer, record.turn.reward, result)) is not None:
                return difference
    except EnvError as error:
        return f"the environment failed in {'the reset' if number < 0 else f'turn {number}'}: {error}"
    return None


def _difference(place: str, observation: dict[str, Any], reward: float | None, result: StepResult) -> str | None:
    pairs = {"reward": (reward, result.reward), "end": (False, result.done)}
    for name, (recorded, found) in pairs.items():
        if recorded != found:
            return f"{place} has another {name}: recorded {recorded}, now {found}"
    recorded_json, found_json = _json(observation), _json(result.observation)
    if recorded_json == found_json:
        return None
    start = next((i for i, (a, b) in enumerate(zip(recorded_json, found_json, strict=False)) if a != b), 0)
    shown = slice(max(0, start - 40), max(0, start - 40) + _MOST_SHOWN)
    return f"{place} differs: recorded {recorded_json[shown]}, now {found_json[shown]}"


def _json(value: Any) -> str:
    """Return the JSON text of an observation, with sorted keys."""
    return msgspec.json.encode(value, enc_hook=jsonable, order="sorted").decode()
