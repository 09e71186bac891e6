"""A scheduler over the fakes whose requests have grammars, and masks that are late when a test wants it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from tests.grammar.conftest import EOS, TOKENIZER
from tests.grammar.local_matchers import LocalMatchers, LocalRun
from tests.scheduler.fakes import Harness, prompt
from verl_server.grammar.mask_executor import MaskExecutor
from verl_server.grammar.mask_memory import FAILED, States, Words
from verl_server.grammar.matcher_client import RemoteMatcher
from verl_server.grammar.source import Grammar, Kind, translate
from verl_server.messages.io_struct import GrammarTokenizer, TokenizedGenerateReq
from verl_server.sampling_params import SamplingParams
from verl_server.scheduler.step_masks import StartedMasks

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy", None]}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)


class GrammarHarness(Harness):
    def __init__(self, overlaps: bool = True, **settings: Any) -> None:
        super().__init__(overlaps=overlaps, **({"chunked_prefill_size": 64} | settings))
        tokenizer = TOKENIZER.backend_tokenizer.to_str().encode()
        self.scheduler.grammars.make_matchers = LocalMatchers
        self.scheduler.handle(GrammarTokenizer(tokenizer=tokenizer, eos_token_ids=[EOS]))

    def constrain(
        self, rid: str, kind: Kind, text: str, new: int = 60, stop_ids: list[int] | None = None, **params: Any
    ) -> None:
        sampling = SamplingParams(max_new_tokens=new, temperature=0.0, **params)
        self.scheduler.handle(
            TokenizedGenerateReq(
                rid=rid,
                input_ids=prompt(int(rid.strip("abcdefghijklmnopqrstuvwxyz") or 0), 9),
                sampling=sampling,
                stop_ids=[EOS] if stop_ids is None else stop_ids,
                return_logprob=True,
                grammar=translate(Grammar(kind, text), {}),
            )
        )

    @property
    def matchers(self) -> LocalMatchers:
        matchers = self.scheduler.grammars._matchers
        assert isinstance(matchers, LocalMatchers)
        return matchers

    def before_compilation(self, hook: Callable[[str], object]) -> None:
        """Call `hook` in the thread that compiles, before it compiles a grammar."""
        self.matchers.before_compilation = hook

    def hold_compilation(self) -> threading.Event:
        """Compile nothing until the returned event is set."""
        gate = threading.Event()
        self.before_compilation(lambda _: gate.wait(20))
        return gate

    def compile(self) -> None:
        """Wait until all grammars are compiled."""
        for req in self.scheduler.grammars.waiting.values():
            assert req.grammar is not None
            req.grammar.start.exception(timeout=20)

    def finish(self) -> None:
        self.compile()
        self.run()

    def text(self, rid: str) -> str:
        return str(TOKENIZER.decode([token for token in self.tokens[rid] if token != EOS]))


class HeldRun(LocalRun):
    """Computes its rows in the test's thread: the held ones only when somebody waits for them."""

    def __init__(self, buffer: int, words: Words, states: States, holder: HeldMasks) -> None:
        super().__init__(buffer, words, states)
        self.held = set[int]()
        self._holder = holder

    def compute(self, executor: MaskExecutor) -> None:
        room = int(self.num_rows * self._holder.most_held)
        for row, matcher in enumerate(self.matchers):
            if row in self.ended:
                continue
            if len(self.held) < room and self._holder.is_held(matcher):
                self.held.add(row)
            else:
                self.compute_row(row)

    def wait(self, is_due: Callable[[], bool] | None, least: int = 0) -> None:
        for row in range(0 if is_due else self.num_rows):
            self.wait_row(row)

    def wait_row(self, row: int) -> None:
        if not self.is_done(row):
            self.compute_row(row)

    def compute_row(self, row: int) -> None:
        super().compute_row(row)
        if self._holder.fails(self.matchers[row]):
            self.fail(row)

    def fail(self, row: int) -> None:
        self.errors[row] = RuntimeError("index out of bounds")
        self._memory[row] = FAILED


class HeldMasks(LocalMatchers):
    """Holds the masks of some matchers until `release` finds that they are not held any longer."""

    def __init__(self, local: LocalMatchers, is_held: Callable[[Any], bool]) -> None:
        self.executor, self.buffers, self.states = local.executor, local.buffers, local.states
        self.is_held = is_held
        self.fails: Callable[[Any], bool] = lambda _: False
        """Returns True if the library fails to compute a mask."""
        self.most_held = 0.25
        """Fraction of the masks of a step that may be held. A step waits for three of four masks."""
        self.runs: list[HeldRun] = []

    @property
    def num_held(self) -> int:
        return sum(len(run.held) for run in self.runs)

    def begin(self, buffer: int) -> HeldRun:
        self.runs.append(HeldRun(buffer, self.words(buffer), self.states[buffer], self))
        return self.runs[-1]

    def release(self) -> None:
        for run in self.runs:
            for row in run.held:
                if not self.is_held(run.matchers[row]):
                    run.wait_row(row)


def hold(h: GrammarHarness, is_held: Callable[[RemoteMatcher], bool]) -> HeldMasks:
    """Let every step be due at once, and hold masks."""
    held, masks = HeldMasks(h.matchers, is_held), h.scheduler.grammars.masks
    assert masks is not None
    masks.matchers, start = held, masks.start

    def release_first(*args: Any) -> StartedMasks | None:
        held.release()
        return start(*args)

    masks.start = release_first  # type: ignore[method-assign]
    h.runner.is_computed = lambda: True
    return held


def make_late(h: GrammarHarness, rid: str) -> list[RemoteMatcher]:
    """Hold the masks of a request until it is removed from the returned list."""
    grammar = h.scheduler.requests[rid].grammar
    assert grammar is not None
    slow = [grammar.open()]
    hold(h, lambda matcher: matcher in slow)
    return slow
