"""The tool of `verl_walk`: verifiers runs this module as a process, and reads the annotations of its tools as types."""

from typing import Literal

import verifiers.v1 as vf


class WalkState(vf.State):
    position: int = 0
    steps: int = 0


class WalkTools(vf.Toolset[vf.SharedToolsetConfig, WalkState]):
    TOOL_PREFIX = None

    @vf.tool
    async def walk(self, direction: Literal["up", "down"]) -> str:
        """Walk one step."""
        self.state.position += 1 if direction == "up" else -1
        self.state.steps += 1
        return f"You are at {self.state.position}."


if __name__ == "__main__":
    WalkTools.run()
