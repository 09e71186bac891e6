"""`GapProbe`: compares server and trainer on whole sequences that the server scores, right after it got the weights.

`async_grpo` needs it, because the tokens of its episodes are of several versions, and were sampled over a KV cache of
older weights: their recorded log-probabilities say how far the samples are off-policy, and nothing about a push that
failed. The server scores the probe's sequences from their first token on, under one version, which its answer names.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from verl_server.engine.rank_group import RankGroup
from verl_server.errors import VerlServerError
from verl_server.logprob_gap import LogprobGap
from verl_server.train.policy import Policy
from verl_server.train.servers import RolloutServers

logger = logging.getLogger(__name__)

_SCORE_SECONDS = 60.0
"""Seconds that a server has to score the sequences, beside its other requests."""
_MOST_SEQUENCES = 8


class GapProbe:
    def __init__(self, policy: Policy, device: torch.device, servers: RolloutServers, ranks: RankGroup) -> None:
        self._policy = policy
        self._device = device
        self._servers = servers
        self._ranks = ranks
        self._turn = 0

    def gap(self, sequences: Sequence[Sequence[int]], version: str, most_tokens: int) -> LogprobGap | None:
        """Return the gap over the tokens of some of the `sequences`; the same on all ranks, which call it together.

        The trainer's weights are those of `version`. Only rank 0's `sequences` count: the longest that fit a pass of
        `most_tokens`, padding included. Return None if no server could score them under `version`. The servers are
        asked in turn, one in each call.
        """
        chosen = _longest(sequences, most_tokens)
        scored = self._ranks.call("GapProbe", lambda _: self._score(chosen, version))
        self._turn += 1
        if scored is None:
            return None
        tokens, logprobs = scored
        table = torch.zeros((len(tokens), max(map(len, tokens))), dtype=torch.int64)
        rows = []
        for number, row in enumerate(tokens):
            table[number, : len(row)] = torch.tensor(row)
            rows.append(number * table.shape[1] + torch.arange(1, len(row)))
        with torch.no_grad():  # servers score at temperature 1
            own, _ = self._policy(table.to(self._device), torch.cat(rows).to(self._device), 1.0, entropy=False)
        return LogprobGap.of(torch.tensor([value for row in logprobs for value in row]), own.cpu())

    def _score(self, sequences: list[list[int]], version: str) -> tuple[list[list[int]], list[list[float]]] | None:
        """Return (the sequences, the server's log-probability of each token after the first), or None."""
        if not sequences:
            return None
        engine = self._servers.adapters[self._turn % len(self._servers.adapters)]
        try:
            results = engine.generate(
                input_ids=sequences,
                sampling_params={"max_new_tokens": 1, "temperature": 1.0},
                return_logprob=True,
                logprob_start_len=0,
                timeout=_SCORE_SECONDS,
            )
        except VerlServerError as error:
            logger.warning(
                "The gap of log-probabilities is not known, because %s does not score: %s", engine.url, error
            )
            return None
        metas = [result["meta_info"] for result in results]
        if {meta["weight_version"] for meta in metas} != {version}:
            return None
        return sequences, [[entry[0] for entry in meta["input_token_logprobs"][1:]] for meta in metas]


def _longest(sequences: Sequence[Sequence[int]], most_tokens: int) -> list[list[int]]:
    """Return the longest sequences of three tokens and more, as many as fit one pass; the shortest one if none fits.

    Their last tokens are left out, because a server accepts no prompt that fills its context.
    """
    found = sorted((list(each[:-1]) for each in sequences if len(each) > 2), key=len, reverse=True)
    while len(found) > 1 and len(found[0]) > most_tokens:
        del found[0]
    count = max(1, most_tokens // len(found[0])) if found else 0
    return found[: min(count, _MOST_SEQUENCES)]
