"""`CodeTool`: the tool `run_python`, which runs a policy's code in a separate, isolated process with limits."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from verl_server.errors import BadRequestError
from verl_server.rollout.environments.isolation import Isolation, check_isolation, isolated
from verl_server.rollout.launched import Program, launch

_TOOL = {
    "type": "function",
    "function": {
        "name": "run_python",
        "description": "Run a Python program and return what it prints. Nothing is kept between two programs.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program."}},
            "required": ["code"],
        },
    },
}


class CodeTool:
    """A `TextEnvironment` with one tool. Its episodes have no reward, so pass a reward function."""

    def __init__(
        self,
        prompt: str = "",
        *,
        isolation: Isolation = "bubblewrap",
        seconds: float = 10.0,
        memory_bytes: int = 2**30,
        output_bytes: int = 16_384,
    ) -> None:
        """`prompt` is the first observation. Raise BadRequestError if this machine cannot isolate the code."""
        check_isolation(isolation)
        self._prompt = prompt
        self._isolation = isolation
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._output_bytes = output_bytes

    @property
    def tools(self) -> list[dict[str, Any]]:
        return [_TOOL]

    async def reset(self, seed: int | None) -> str:
        return self._prompt

    async def step(self, text: str) -> tuple[str, float | None, bool]:
        """End the episode: the text is the final answer."""
        return "", None, True

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Run the program and return its output. If it fails or runs too long, return its message."""
        code = arguments.get("code")
        if name != "run_python" or not isinstance(code, str):
            raise BadRequestError('The tool is run_python with the arguments {"code": PROGRAM}.')
        folder = Path(tempfile.mkdtemp(prefix="verl-code-"))
        program = Program(
            argv=isolated([sys.executable, "-I", "-c", code], self._isolation),
            env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "LANG": "C.UTF-8"},
            cwd=str(folder),
            limits={
                "RLIMIT_AS": self._memory_bytes,
                "RLIMIT_CPU": max(1, round(self._seconds) + 1),
                "RLIMIT_FSIZE": 2**26,
                "RLIMIT_CORE": 0,
            },
            log=folder / "output",
            log_bytes=self._output_bytes,
            grace=0.2,
        )
        try:
            async with asyncio.timeout(self._seconds):
                exit = await launch(program)
        except TimeoutError:
            return f"(The program ran longer than {self._seconds:.3g} s and was ended.)"
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        if exit.code == 0:
            return exit.output
        return f"{exit.output}\n({exit.error or f'exit code {exit.code}'})"

    async def close(self) -> None:
        return
