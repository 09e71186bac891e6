"""A scheduler over the fakes whose requests have grammars, and masks that are late when a test wants it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from tests.grammar.conftest import EOS, TOKENIZER
from tests.scheduler.fakes import Harness, prompt
from verl_server.grammar.compiler import Matcher
from verl_server.grammar.mask_executor import MaskExecutor, MaskRun, Words
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

    def before_compilation(self, hook: Callable[[str], object]) -> None:
        """Call `hook` in the thread that compiles, before it compiles a grammar."""
        compiler = self.scheduler.grammars._compiler
        assert compiler is not None
        compile = compiler.compile

        def hooked(grammar: str) -> Matcher:
            hook(grammar)
            return compile(grammar)

        compiler.compile = hooked  # type: ignore[method-assign]

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


class HeldRun(MaskRun):
    """Computes its rows in the test's thread: the held ones only when somebody waits for them."""

    def __init__(self, matchers: Sequence[Matcher], words: Words, executor: HeldMasks) -> None:
        super().__init__(matchers, words, SimpleQueue())
        self.matchers, self.held = matchers, set[int]()
        self._fails = executor.fails
        room = int(len(matchers) * executor.most_held)
        for row, matcher in enumerate(matchers):
            if len(self.held) < room and executor.is_held(matcher):
                self.held.add(row)
            else:
                self.compute_row(row)

    def wait(self, is_computed: Callable[[], bool] | None, least: int = 0) -> None:
        for row in range(0 if is_computed else len(self.matchers)):
            self.wait_row(row)

    def wait_row(self, row: int) -> None:
        if not self.is_done(row):
            self.compute_row(row)

    def compute_row(self, row: int) -> None:
        super().compute_row(row)
        if self._fails(self.matchers[row]):
            self.errors[row] = RuntimeError("index out of bounds")


class HeldMasks(MaskExecutor):
    """Holds the masks of some matchers until `release` finds that they are not held any longer."""

    def __init__(self, is_held: Callable[[Matcher], bool]) -> None:
        super().__init__()
        self.is_held = is_held
        self.fails: Callable[[Matcher], bool] = lambda _: False
        """Returns True if the library fails to compute a mask."""
        self.most_held = 0.25
        """Fraction of the masks of a step that may be held. A step waits for three of four masks."""
        self.runs: list[HeldRun] = []

    @property
    def num_held(self) -> int:
        return sum(len(run.held) for run in self.runs)

    def start(self, matchers: Sequence[Matcher], words: Words) -> MaskRun:
        self.runs.append(HeldRun(matchers, words, self))
        return self.runs[-1]

    def release(self) -> None:
        for run in self.runs:
            for row in run.held:
                if not self.is_held(run.matchers[row]):
                    run.wait_row(row)


def hold(h: GrammarHarness, is_held: Callable[[Matcher], bool]) -> HeldMasks:
    """Let the logits of every step be computed at once, and hold masks."""
    executor, masks = HeldMasks(is_held), h.scheduler.grammars.masks
    assert masks is not None
    masks.executor, start = executor, masks.start

    def release_first(*args: Any) -> StartedMasks | None:
        executor.release()
        return start(*args)

    masks.start = release_first  # type: ignore[method-assign]
    h.runner.is_computed = lambda: True
    return executor


def make_late(h: GrammarHarness, rid: str) -> list[Matcher]:
    """Hold the masks of a request until it is removed from the returned list."""
    grammar = h.scheduler.requests[rid].grammar
    assert grammar is not None
    slow = [grammar.open()]
    hold(h, lambda matcher: matcher in slow)
    return slow
