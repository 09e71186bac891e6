"""`RunningStep`: a step that was launched, until its result is read.

Made by `ModelRunner.launch`, read once by the `Scheduler`, one step later where steps overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from verl_server.sampling.logprobs import PromptCandidates
from verl_server.sampling.sampler import Sampled
from verl_server.worker.forward_batch import ForwardOutput


@dataclass
class RunningStep:
    sampled: Sampled | None
    """None if nothing is sampled, and on ranks that do not sample."""
    prompt: dict[int, PromptCandidates] = field(default_factory=dict)
    done: torch.cuda.Event | None = None
    """Recorded behind the last copy to the host; None if the step was computed while it was launched."""

    def result(self) -> ForwardOutput:
        """Wait until the step is computed; what it gave."""
        if self.done is not None:
            self.done.synchronize()
        output = ForwardOutput([], [], [], []) if self.sampled is None else self.sampled.read()
        output.prompt_logprobs = {entry: prompt.read() for entry, prompt in self.prompt.items()}
        return output
