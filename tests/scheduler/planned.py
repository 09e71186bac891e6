"""A `BatchPlanner` that is driven by hand: requests without messages, and steps without a model."""

from __future__ import annotations

import itertools
from typing import Any

from verl_server.messages.io_struct import TokenizedGenerateReq
from verl_server.sampling_params import SamplingParams
from verl_server.scheduler.batch_planner import BatchPlanner
from verl_server.scheduler.schedule_batch import Req, ScheduleBatch

SAMPLED = 7
"""The token that every request samples."""


def request(rid: str, ids: list[int], max_new_tokens: int = 8, *, arrival: int = 1, **fields: Any) -> Req:
    message = TokenizedGenerateReq(rid=rid, input_ids=ids, sampling=SamplingParams(), **fields)
    return Req(message, arrival=arrival, max_new_tokens=max_new_tokens, seed=0)


class Planned:
    """Pages of 4 tokens, and a clock that stands still."""

    def __init__(self, num_pages: int = 64, max_rows: int = 8, chunk: int = 64, **settings: Any) -> None:
        self.now = 0.0
        self.planner = BatchPlanner(num_pages, 4, max_rows, chunk, clock=lambda: self.now, **settings)
        self._arrivals = itertools.count(1)

    def add(self, rid: str, ids: list[int], max_new_tokens: int = 8, *, step_bytes: int = 0, **fields: Any) -> Req:
        req = request(rid, ids, max_new_tokens, arrival=next(self._arrivals), **fields)
        req.step_bytes = step_bytes
        self.planner.add(req)
        return req

    def step(self, **options: Any) -> dict[str, int]:
        """Plan and compute one step. Return the number of tokens that it computed, by rid."""
        batch = self.planner.plan(**options)
        return {} if batch is None else self.compute(batch)

    def compute(self, batch: ScheduleBatch) -> dict[str, int]:
        prefilled = self.planner.collected(batch)
        ended = [(req, True) for req in batch.sampled if req.row >= 0 and req.append(SAMPLED) is not None]
        self.planner.remove_finished(ended)
        self.planner.share(prefilled)
        self.planner.check_invariants()
        return {req.rid: length for req, length in zip(batch.reqs, batch.forward.extend_lens, strict=True)}

    def run(self) -> None:
        """Run steps until no request is left."""
        while self.step():
            pass
