"""The loop while no request runs: it warms up, collects garbage, or sleeps."""

from __future__ import annotations

from typing import Any

from tests.scheduler.fakes import Harness, prompt
from verl_server.messages.io_struct import SchedulerInput, TokenizedGenerateReq
from verl_server.sampling_params import SamplingParams
from verl_server.scheduler.garbage import Garbage
from verl_server.scheduler.rank import SchedulerLoop


class ScriptedSockets:
    """Sockets that return the next messages of a script after each wait. The end of the script stops the loop."""

    def __init__(self, script: list[list[SchedulerInput]]) -> None:
        self.script = script
        self.waits: list[float | None] = []
        self.loop: SchedulerLoop | None = None

    def wait(self, seconds: float | None) -> None:
        self.waits.append(seconds)

    def receive(self) -> list[SchedulerInput]:
        if not self.script:
            assert self.loop is not None
            self.loop.stopping = True
            return []
        return self.script.pop(0)

    def ring(self) -> None: ...


class NoGarbage(Garbage):
    is_due = False


def run(h: Harness, script: list[list[SchedulerInput]], garbage: Garbage | None = None) -> ScriptedSockets:
    sockets: Any = ScriptedSockets(script)
    sockets.loop = loop = SchedulerLoop(h.scheduler, sockets, garbage or NoGarbage())
    loop.run()
    found: ScriptedSockets = sockets
    return found


def test_idle_time_warms_up_until_nothing_is_left_and_never_delays_a_request() -> None:
    h = Harness()
    done: list[int] = []

    def warm_up() -> bool:
        assert not h.scheduler.requests, "a request waits"
        done.append(len(h.finished))
        h.runner.can_warm_up = len(done) < 3
        return True

    request = TokenizedGenerateReq(rid="a", input_ids=prompt(1, 3), sampling=SamplingParams(max_new_tokens=2))
    h.runner.can_warm_up = True
    h.runner.warm_up = warm_up  # type: ignore[method-assign]
    sockets = run(h, [[], [request], *[[] for _ in range(8)]])
    assert h.finished["a"].type == "length"
    assert done == [0, 1, 1], "once before the request arrived, twice after it ended"
    assert sockets.waits[0] and sockets.waits[-1] is None, "the loop sleeps when nothing is left"


def test_idle_time_waits_while_a_rank_cannot_warm_up() -> None:
    h = Harness()
    h.runner.can_warm_up = True
    h.runner.warm_up = lambda: False  # type: ignore[method-assign]
    sockets = run(h, [[] for _ in range(4)])
    assert all(sockets.waits), "the loop does not spin"


def test_garbage_is_collected_in_idle_time_only() -> None:
    class Due(Garbage):
        is_due = True
        collected = 0

        def collect(self) -> None:
            assert not h.scheduler.requests, "a request waits"
            self.collected, self.is_due = self.collected + 1, False

    h, garbage = Harness(), Due()
    request = TokenizedGenerateReq(rid="a", input_ids=prompt(1, 3), sampling=SamplingParams(max_new_tokens=2))
    sockets = run(h, [[request], *[[] for _ in range(8)]], garbage)
    assert h.finished["a"].type == "length" and garbage.collected == 1
    assert sockets.waits[0] and sockets.waits[-1] is None, "the loop sleeps when nothing is left"
