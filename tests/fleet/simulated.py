"""`play`: conversations over servers with simulated prefix caches, as `Placement` distributes them.

Time passes in turns of a heap, so a simulation has one result. A cache is an LRU of blocks of 16 tokens, each named by
all tokens before its end, as a radix cache shares them. The outputs are in the cache, too, and no placement sees them
before they come back as a part of the next prompt.
"""

from __future__ import annotations

import heapq
import json
import random
from collections import OrderedDict
from dataclasses import dataclass, field

from verl_server.fleet.members import Member
from verl_server.fleet.operations import RoutedOperation
from verl_server.fleet.placement import Placement
from verl_server.fleet.requests import RoutedRequest
from verl_server.fleet.upstream import Upstream

GENERATE = RoutedOperation(("/generate",), ("POST",), "sglang", "key", True, True)
_BLOCK = 16


@dataclass
class Cache:
    capacity: int
    """Tokens."""
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def hits(self, ids: list[int]) -> int:
        """Return the number of leading tokens that the cache has."""
        count = 0
        for block in _blocks(ids):
            if block not in self.blocks:
                break
            count += _BLOCK
        return count

    def add(self, ids: list[int]) -> None:
        for block in reversed(list(_blocks(ids))):  # the beginning is evicted last
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) * _BLOCK > self.capacity:
            self.blocks.popitem(last=False)


def _blocks(ids: list[int]) -> list[int]:
    found, before = [], 0
    for at in range(0, len(ids) - _BLOCK + 1, _BLOCK):
        before = hash((before, *ids[at : at + _BLOCK]))
        found.append(before)
    return found


@dataclass
class Workload:
    conversations: int = 128
    turns: int = 8
    group: int = 1
    """Conversations that begin with one prompt."""
    system: int = 0
    """Tokens with which all prompts begin."""
    prompt: tuple[int, int] = (300, 900)
    """Least and most tokens of a first prompt."""
    observation: tuple[int, int] = (50, 400)
    output: tuple[int, int] = (50, 400)
    thinks: tuple[float, float] = (0.1, 3.0)
    """Seconds of the environment between two turns."""


@dataclass
class Played:
    hit: float
    """Cached tokens as a share of the tokens of prompts that an endless cache would have."""
    shares: list[float]
    """Share of the tokens of prompts that each server got."""
    most_load: float
    placement: Placement
    servers: dict[int, list[int]]
    """Conversation -> the server of each turn."""


def play(work: Workload, servers: int, capacity: int, *, hints: bool, margin: float = 0.2, seed: int = 0) -> Played:
    rng = random.Random(seed)
    members = [Member(f"http://server{n}:1", Upstream(f"http://server{n}:1", 1.0)) for n in range(servers)]
    for member in members:
        member.capacity = capacity
    caches, endless = [Cache(capacity) for _ in members], Cache(1 << 60)
    placement = Placement(margin)

    def drawn(bounds: tuple[int, int]) -> list[int]:
        return [rng.randrange(1000, 50000) for _ in range(rng.randint(*bounds))]

    system = [rng.randrange(1000, 50000) for _ in range(work.system)]
    firsts = [system + drawn(work.prompt) for _ in range(work.conversations // work.group)]
    histories = [list(firsts[n // work.group]) for n in range(work.conversations)]
    queue = [(rng.uniform(0, 2.0), n, "ask") for n in range(work.conversations)]
    heapq.heapify(queue)
    running: dict[int, tuple[Member, int]] = {}
    placed: dict[int, list[int]] = {n: [] for n in range(work.conversations)}
    cached = possible = 0
    got = [0] * servers
    most_load = 0.0
    while queue:
        now, n, what = heapq.heappop(queue)
        if what == "end":
            member, tokens = running.pop(n)
            member.ended(tokens)
            output = drawn(work.output)
            histories[n] += output
            caches[members.index(member)].add(histories[n])
            endless.add(histories[n])
            histories[n] += drawn(work.observation)
            if len(placed[n]) < work.turns:
                heapq.heappush(queue, (now + rng.uniform(*work.thinks), n, "ask"))
            continue
        ids = histories[n]
        body = json.dumps({"sampling_params": {"max_new_tokens": 400}, "input_ids": ids}).encode()
        headers = [(b"x-smg-routing-key", b"conversation-%d" % n)] if hints else []
        request = RoutedRequest(GENERATE, "POST", b"/generate", headers, body)
        member = placement.choose(request, members)
        at = members.index(member)
        placed[n].append(at)
        cached += caches[at].hits(ids)
        possible += endless.hits(ids)
        got[at] += len(ids)
        caches[at].add(ids)
        endless.add(ids)
        member.began(request.tokens)
        running[n] = member, request.tokens
        most_load = max(most_load, member.load)
        heapq.heappush(queue, (now + 0.01 * rng.randint(*work.output), n, "end"))
    return Played(cached / possible, [each / sum(got) for each in got], most_load, placement, placed)
