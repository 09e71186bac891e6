"""An agent of the openai SDK plays a game with tool calls, as a function of the runner or as a program of its own.

    pip install 'verl-server[agents,games]'
    verl-server rollout --agent examples/openai_agent.py:play --tasks textarena:GuessTheNumber-v0 \
        --model-path MODEL --out runs/guess
    verl-server rollout --agent "python examples/openai_agent.py" --tasks textarena:GuessTheNumber-v0 \
        --model-path MODEL --out runs/guess-program

The input of a task may narrow the move, for example {"pattern": "^\\[[0-9]+\\]$"}: it is added to the move's schema.
"""

from __future__ import annotations

import json
import os
from typing import Any


def tools_for(task_input: Any) -> list[dict[str, Any]]:
    """Return the tools in the shape of OpenAI's API."""
    move = {"type": "string", "description": "The move, as the game wants it written", **(task_input or {})}
    parameters = {"type": "object", "properties": {"move": move}, "required": ["move"], "additionalProperties": False}
    about = {"name": "play", "description": "Make a move and see what happens", "parameters": parameters}
    return [{"type": "function", "function": about}]


async def play(session: Any, task: Any) -> str:
    """Play until the game is over. The runner calls this function for each episode."""
    game = session.environment
    messages: list[Any] = [{"role": "user", "content": game.observation}]
    async with session.openai() as client:
        while not game.done:
            completion = await client.chat.completions.create(
                model="policy",
                messages=messages,
                tools=tools_for(task.input),
                tool_choice="required",
                parallel_tool_calls=False,
            )
            message = completion.choices[0].message
            messages.append(message)
            for tool_call in message.tool_calls or []:
                arguments = json.loads(tool_call.function.arguments)
                result, _ = await game.step(arguments["move"])
                messages.append({"role": "tool", "tool_call_id": tool_call.id, "content": result})
    return str(game.observation)


def main() -> None:
    """The same loop as a program: the URL and the key of its session are in the environment."""
    import httpx
    from openai import OpenAI

    with open(os.environ["VERL_TASK_FILE"], encoding="utf-8") as file:
        tools = tools_for(json.load(file)["input"])
    client = OpenAI()
    game = httpx.Client(timeout=60)
    environment = os.environ["VERL_ENVIRONMENT_URL"]
    seen = game.get(f"{environment}/observation").json()
    messages: list[Any] = [{"role": "user", "content": seen["observation"]}]
    while not seen["done"]:
        completion = client.chat.completions.create(
            model="policy", messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False
        )
        message = completion.choices[0].message
        messages.append(message)
        for tool_call in message.tool_calls or []:
            arguments = json.loads(tool_call.function.arguments)
            seen = game.post(f"{environment}/step", json={"text": arguments["move"]}).json()
            messages.append({"role": "tool", "tool_call_id": tool_call.id, "content": seen["observation"]})
    print(seen["observation"])


if __name__ == "__main__":
    main()
