"""One tensor-parallel rank of `test_tensor_parallel`: `python -m tests.parity.tp_rank RANK SIZE FOLDER MEET`.

Rank 0 drives, and prints the results as JSON. The others replay its batches, as a scheduler's followers do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from tests.parity.harness import Driver, Sequence, make_runner, random_prompt
from verl_server.ipc.tp_group import TpGroup
from verl_server.models.loader import iter_checkpoint
from verl_server.sampling.spec import ForwardOutput
from verl_server.worker.forward_batch import ForwardBatch
from verl_server.worker.model_runner import ModelRunner


class LeadingDriver(Driver):
    """Broadcasts each batch before running it.

    A token that was sampled in the step before is not in the batch but taken by the ranks themselves, as when steps
    overlap.
    """

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.sampled: set[int] = set()
        """Rows whose newest token was sampled in the step before."""

    def step(self, work: list[tuple[Sequence, int]]) -> ForwardOutput:
        work = sorted(work, key=lambda item: item[1] > 1)  # decodes first
        batch = self.batch(work)
        for entry, (sequence, extend) in enumerate(work):
            if extend > 1:
                break
            if sequence.spec.output_ids and sequence.row in self.sampled:
                batch.input_ids[entry] = -1
        self.sampled = {work[entry][0].row for entry in batch.sample}
        if len(work) == 1 and work[0][0].cached == 0:
            batch.prompt_logprobs, batch.prompt_next_ids = [(0, 0, 2, [5])], [-1]  # gathers logits on all ranks
        self.runner.tp.broadcast_command(msgspec.msgpack.encode(batch))
        output = self.runner.launch(batch, [work[i][0].spec for i in batch.sample]).result()
        self.accept(work, batch, output)
        return output


def follow(runner: ModelRunner) -> None:
    while command := runner.tp.broadcast_command(None):
        runner.launch(msgspec.msgpack.decode(command, type=ForwardBatch), None)


def lead(runner: ModelRunner) -> list[dict[str, Any]]:
    driver = LeadingDriver(runner)
    first = driver.add(random_prompt(50, seed=1))
    driver.finish([first], 12)
    others = [driver.add(first.tokens + random_prompt(5, seed=2), shared=first), driver.add(random_prompt(70, seed=3))]
    driver.finish(others, 8, chunk=20)
    driver.retract(others[0])
    driver.finish(others, 16)
    runner.tp.broadcast_command(b"")
    return [
        {"prompt": s.spec.prompt_ids, "output": s.spec.output_ids, "logprobs": s.logprobs} for s in (first, *others)
    ]


def main(rank: int, size: int, folder: str, meet: str) -> None:
    tp = TpGroup.create(rank, size, meet, torch.device("cpu"), sync_timeout=30, startup_timeout=60)
    runner = make_runner(Path(folder), tp)
    runner.overlaps = True
    # A rank has at most the whole of each tensor, as get_weights_by_name reads it.
    for name, tensor in iter_checkpoint(folder):
        assert runner.weight_map.read(name).numel() <= tensor.numel()
    if rank == 0:
        print(json.dumps(lead(runner)))
    else:
        follow(runner)
    tp.gather(b"done")
    torch.distributed.destroy_process_group()  # otherwise its threads may abort the exit


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
