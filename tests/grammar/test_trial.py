"""Trials of grammars: what is refused before the scheduler compiles it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.grammar.conftest import TOKENIZER, VOCAB
from verl_server.errors import BadRequestError
from verl_server.grammar import trial
from verl_server.grammar.compiler import GrammarCompiler
from verl_server.grammar.json_schema import marked_rule
from verl_server.grammar.mask_executor import MaskExecutor
from verl_server.grammar.source import Grammar, Kind, translate
from verl_server.grammar.trial import try_out


def run(compiler: GrammarCompiler, kind: Kind, text: str) -> int:
    return try_out(compiler, translate(Grammar(kind, text), {}))


def test_a_good_grammar_returns_its_size(compiler: GrammarCompiler) -> None:
    assert 0 <= run(compiler, "json_schema", '{"type": "object"}') < 2**27


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "[^\\s\\S]", "failed after 0 tokens"),
        ("json_schema", '{"$ref": "#"}', "failed after 0 tokens"),
        ("ebnf", 'root ::= "a" root', "Too many items"),
        ("regex", "((((((a{1,100}){1,100}){1,100}){1,100}){1,100}){1,100})", "too many expressions"),
    ],
)
def test_a_refusal_says_what_to_do(compiler: GrammarCompiler, kind: Kind, text: str, says: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        run(compiler, kind, text)
    assert says in str(caught.value)


def test_a_refusal_without_a_place_names_the_schema_that_has_it_alone(compiler: GrammarCompiler) -> None:
    def refusal(start: str, schema: dict[str, Any]) -> str:
        rules = [marked_rule("a", "tools[0] `get`", {}), marked_rule("b", "tools[1] `add`", schema)]
        with pytest.raises(BadRequestError) as caught:
            run(compiler, "ebnf", "\n".join([f"start: {start}", *rules, ""]))
        return str(caught.value)

    slow = {"type": "integer", "multipleOf": 7919 * 104729}
    assert refusal("a | b", slow).startswith("tools[1] `add`: The grammar was refused: fuel exhausted")
    assert refusal("a | b", {"not": {}}).startswith("tools[1] `add`: the output cannot be constrained")
    assert refusal('c a b\nc: "a" c', {}).startswith("tools[0] `get`, tools[1] `add`: The grammar was refused")


def test_slow_masks_are_refused(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock says that each mask took 30 ms."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(trial.time, "process_time", lambda: 0.03 * next(ticks))
    with pytest.raises(BadRequestError, match="took more than 20 ms each"):
        run(compiler, "regex", "[a-z]{50}")


def test_a_panic_is_a_refusal(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicError(BaseException):
        pass

    def panic(*args: object) -> None:
        raise PanicError

    monkeypatch.setattr(MaskExecutor, "fill", panic)
    with pytest.raises(BadRequestError, match="made the compiler fail"):
        run(compiler, "regex", "a")


def test_the_bounds_of_the_process_are_lifted_afterwards(compiler: GrammarCompiler) -> None:
    import resource
    import threading

    before = resource.getrlimit(resource.RLIMIT_AS), threading.stack_size()
    run(compiler, "regex", "a+")
    assert (resource.getrlimit(resource.RLIMIT_AS), threading.stack_size()) == before


_HUNGRY = """
from verl_server.grammar import trial
from verl_server.grammar.compiler import GrammarCompiler
from verl_server.grammar.source import Grammar, translate
trial.MOST_MEMORY = 48 << 20
compiler = GrammarCompiler(open({path!r}, "rb").read(), [2], {vocab})
trial.try_out(compiler, translate(Grammar("regex", "a" * {length}), {{}}))
print("compiled")
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_grammar_that_needs_too_much_memory_ends_its_process(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(TOKENIZER.backend_tokenizer.to_str())
    outcomes = []
    for length in (1, 250_000):
        code = _HUNGRY.format(path=str(path), vocab=VOCAB, length=length)
        # glibc would reserve 64 MiB of addresses for each thread.
        environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
        outcomes.append((done.returncode, done.stdout.strip()))
    assert outcomes[0] == (0, "compiled") and outcomes[1][0] < 0, outcomes
    assert trial.MOST_MEMORY == 1 << 30
