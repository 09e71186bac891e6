"""An agent of the anthropic SDK plays a game with tool calls, as a function of the runner or as a program of its own.

    pip install 'verl-server[agents,games]'
    verl-server rollout --agent examples/anthropic_agent.py:play --tasks reasoning-gym:chain_sum \
        --model-path MODEL --out runs/sums
    verl-server rollout --agent "python examples/anthropic_agent.py" --tasks reasoning-gym:chain_sum \
        --model-path MODEL --out runs/sums-program

The input of a task may narrow the move, for example {"pattern": "^-?[0-9]+$"}: it is added to the move's schema.
"""

from __future__ import annotations

import json
import os
from typing import Any

CHOICE: Any = {"type": "any", "disable_parallel_tool_use": True}
MAX_TOKENS = 2048


def tools_for(task_input: Any) -> list[Any]:
    """Return the tools in the shape of Anthropic's API."""
    move = {"type": "string", "description": "The move, as the game wants it written", **(task_input or {})}
    schema = {"type": "object", "properties": {"move": move}, "required": ["move"], "additionalProperties": False}
    return [{"name": "play", "description": "Make a move and see what happens", "input_schema": schema}]


async def play(session: Any, task: Any) -> str:
    """Play until the game is over. The runner calls this function for each episode."""
    game = session.environment
    messages: list[Any] = [{"role": "user", "content": game.observation}]
    async with session.anthropic() as client:
        while not game.done:
            response = await client.messages.create(
                model="policy",
                max_tokens=MAX_TOKENS,
                messages=messages,
                tools=tools_for(task.input),
                tool_choice=CHOICE,
            )
            messages.append({"role": "assistant", "content": response.content})
            if response.stop_reason != "tool_use":
                break
            tool_use = next(block for block in response.content if block.type == "tool_use")
            result, _ = await game.step(tool_use.input["move"])
            answer = {"type": "tool_result", "tool_use_id": tool_use.id, "content": result}
            messages.append({"role": "user", "content": [answer]})
    return str(game.observation)


def main() -> None:
    """The same loop as a program: the URL and the key of its session are in the environment."""
    import httpx
    from anthropic import Anthropic

    with open(os.environ["VERL_TASK_FILE"], encoding="utf-8") as file:
        tools = tools_for(json.load(file)["input"])
    client = Anthropic()
    game = httpx.Client(timeout=60)
    environment = os.environ["VERL_ENVIRONMENT_URL"]
    seen = game.get(f"{environment}/observation").json()
    messages: list[Any] = [{"role": "user", "content": seen["observation"]}]
    while not seen["done"]:
        response = client.messages.create(
            model="policy", max_tokens=MAX_TOKENS, messages=messages, tools=tools, tool_choice=CHOICE
        )
        messages.append({"role": "assistant", "content": response.content})
        if response.stop_reason != "tool_use":
            break
        tool_use: Any = next(block for block in response.content if block.type == "tool_use")
        seen = game.post(f"{environment}/step", json={"text": tool_use.input["move"]}).json()
        answer = {"type": "tool_result", "tool_use_id": tool_use.id, "content": seen["observation"]}
        messages.append({"role": "user", "content": [answer]})
    print(seen["observation"])


if __name__ == "__main__":
    main()
