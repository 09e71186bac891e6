"""One turn: write as many letters as the task asks for. Two rewards, one of which reads a parsed reply, and metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["WordsTaskset"]


class WordsData(vf.TaskData):
    letters: int


class WordsTask(vf.Task[WordsData]):
    @staticmethod
    def parsed(reply: str) -> str:
        """Return the letters of a reply."""
        return "".join(re.findall("[A-Za-z]", reply))

    @vf.reward
    async def amount(self, trace: vf.Trace) -> float:
        return 1.0 - min(1.0, abs(len(self.parsed(trace.last_reply)) - self.data.letters) / 16)

    @vf.reward(weight=0.25)
    async def form(self, trace: vf.Trace) -> float:
        return len(self.parsed(trace.last_reply)) / max(1, len(trace.last_reply))

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class WordsConfig(vf.TasksetConfig):
    split: str = "train"
    rows: int = 3
    fails: bool = False
    """Scoring raises."""


class FailingTask(WordsTask):
    @vf.reward
    async def broken(self) -> float:
        raise ValueError("the reference answer is missing")


class WordsTaskset(vf.Taskset[WordsTask, WordsConfig]):
    def load(self) -> Iterator[WordsTask]:
        for row in range(self.config.rows):
            letters = row + (100 if self.config.split == "test" else 1)
            data = WordsData(prompt=f"Write {letters} letters.", system_prompt="Be short.", letters=letters)
            yield (FailingTask if self.config.fails else WordsTask)(data, self.config.task)
