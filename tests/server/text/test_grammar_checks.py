"""Checks of grammars in text workers: shared, remembered, bounded, and without effect on other requests.

One stack with a fake scheduler serves all tests of this file: what the scheduler does with a checked grammar is tested
elsewhere.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import MakeStack, Stack
from verl_server.errors import BadRequestError, ServerUnavailableError
from verl_server.grammar.source import Grammar
from verl_server.messages.io_struct import TokenizedGenerateReq
from verl_server.server.text.grammar_checks import CheckedGrammar, GrammarChecks
from verl_server.server.text.text_workers import JobKilledError, TextWorkers
from verl_server.server.text.tokenizer import ModelText


@pytest.fixture(scope="module")
def stack(text_folder: Path) -> Iterator[Stack]:
    stack = Stack(text_folder, text_workers=1, grammar_timeout=20.0)
    yield stack
    stack.close()


def constrained(stack: Stack, text: str = "a", **grammar: str) -> Any:
    return stack.post("/generate", {"text": text, "sampling_params": {"max_new_tokens": 2} | grammar})


def last_request(stack: Stack) -> TokenizedGenerateReq:
    found: TokenizedGenerateReq = stack.scheduler.wait_for(TokenizedGenerateReq)[-1]
    return found


def test_the_scheduler_gets_the_tokenizer_first_and_translations_only(stack: Stack) -> None:
    response = constrained(stack, json_schema='{"type": "integer"}')
    assert response.status_code == 200
    req = last_request(stack)
    assert len(stack.scheduler.tokenizers) == 1 and 2 in stack.scheduler.tokenizers[0].eos_token_ids
    ((schema,),) = [each.values() for each in json.loads(req.grammar)["grammars"]]
    assert schema.pop("x-guidance") and schema == {"type": "integer"}
    assert req.sampling.json_schema is None


def test_the_samples_of_a_request_share_a_grammar(stack: Stack) -> None:
    before = len(stack.scheduler.wait_for(TokenizedGenerateReq, 0))
    body = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 1, "n": 2, "regex": "[0-9]+"}}
    assert len(stack.generate(**body)) == 4
    requests = stack.scheduler.wait_for(TokenizedGenerateReq, before + 4)[before:]
    assert len({req.grammar for req in requests}) == 1 and requests[0].grammar


def test_prompts_of_a_batch_may_have_different_grammars(stack: Stack) -> None:
    before = len(stack.scheduler.wait_for(TokenizedGenerateReq, 0))
    params = [{"max_new_tokens": 1, "regex": "[0-9]+"}, {"max_new_tokens": 1}]
    stack.generate(text=["a", "b"], sampling_params=params)
    first, second = stack.scheduler.wait_for(TokenizedGenerateReq, before + 2)[before:]
    assert first.grammar and not second.grammar


def test_results_and_refusals_are_remembered(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    run = TextWorkers.run

    async def counted(self: TextWorkers, job: Any, body: bytes) -> Any:
        runs.append(job.name)
        return await run(self, job, body)

    monkeypatch.setattr(TextWorkers, "run", counted)
    for _ in range(3):
        assert constrained(stack, regex="remembered").status_code == 200
        refused = constrained(stack, regex="(remembered")
        assert refused.status_code == 400 and "unclosed group" in refused.json()["error"]["message"]
    assert runs == ["check_grammar", "check_grammar"]


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ({"json_schema": "{"}, "json_schema is not valid JSON"),
        ({"ebnf": "root ::= missing"}, "the rule `missing`"),
        ({"regex": "a", "json_schema": "{}"}, "set at most one"),
        ({"regex": "a" * 300_000}, "max_grammar_length"),
        ({"json_schema": "[" * 50_000}, "not valid JSON"),
    ],
)
def test_a_refusal_is_400_and_names_the_fault(stack: Stack, grammar: dict[str, str], says: str) -> None:
    response = constrained(stack, **grammar)
    assert response.status_code == 400 and says in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"grammar_backend": "none"}, "grammar_backend=none"), ({"skip_tokenizer_init": True}, "skip_")],
)
def test_a_server_that_cannot_constrain_says_why(text_folder: Path, settings: dict[str, Any], says: str) -> None:
    stack = Stack(text_folder, **settings)
    try:
        body = {"input_ids": [9], "sampling_params": {"max_new_tokens": 1, "regex": "a"}}
        response = stack.post("/generate", body)
        assert response.status_code == 400 and says in response.json()["error"]["message"]
        assert stack.generate(input_ids=[9], sampling_params={"max_new_tokens": 1})
        assert not stack.scheduler.tokenizers
    finally:
        stack.close()


def test_a_tokenizer_of_python_code_is_refused_by_name(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelText, "tokenizer_json", None)
    stack = Stack(text_folder)
    try:
        assert "Python code" in constrained(stack, regex="a").json()["error"]["message"]
    finally:
        stack.close()


def test_a_check_is_killed_at_its_bound_and_costs_its_own_request(make_stack: MakeStack) -> None:
    """The chain of rules overflows the stack of its process. The properties take several times the bound."""
    stack = make_stack(text_workers=1, grammar_timeout=2.0)
    while constrained(stack, regex="a").status_code == 503:  # the worker starts more slowly than the bound on waiting
        pass
    chain = "\n".join(["root ::= r0", *(f'r{i} ::= "{i}" | r{i + 1}' for i in range(9000)), 'r9000 ::= "x"'])
    died = constrained(stack, ebnf=chain)
    assert died.status_code == 400 and "ended with signal SIG" in died.json()["error"]["message"]
    while constrained(stack, regex="b").status_code == 503:
        pass
    slow = constrained(stack, json_schema=json.dumps({"properties": {f"p{i}": {} for i in range(9000)}}))
    assert slow.status_code == 400 and "longer than 2 s (grammar_timeout)" in slow.json()["error"]["message"]
    assert constrained(stack, regex="a").status_code == 200, "a known grammar needs no worker"


# -- checks without processes -------------------------------------------------------------------------------


class FakeWorkers:
    """Answers checks when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[asyncio.Future[CheckedGrammar]] = []

    async def run(self, job: Any, body: bytes) -> CheckedGrammar:
        self.jobs.append(asyncio.get_running_loop().create_future())
        return await self.jobs[-1]

    async def close(self) -> None:
        for job in self.jobs:
            if not job.done():
                job.set_exception(ServerUnavailableError("The server is shutting down."))


GRAMMAR = Grammar("regex", "a")


async def started(count: int, workers: FakeWorkers) -> None:
    while len(workers.jobs) < count:
        await asyncio.sleep(0)


def test_concurrent_requests_share_one_check() -> None:
    async def scenario() -> None:
        workers = FakeWorkers()
        checks = GrammarChecks(workers)  # type: ignore[arg-type]
        callers = [asyncio.ensure_future(checks.check(GRAMMAR)) for _ in range(50)]
        await started(1, workers)
        callers[0].cancel()  # its client gave up, and the others still wait
        await asyncio.sleep(0)
        workers.jobs[0].set_result(CheckedGrammar("translated", 1))
        results = await asyncio.gather(*callers, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert all(isinstance(result, CheckedGrammar) for result in results[1:]) and len(workers.jobs) == 1

    asyncio.run(scenario())


def test_a_check_that_was_killed_is_repeated_after_a_while() -> None:
    async def scenario() -> None:
        workers, now = FakeWorkers(), [0.0]
        checks = GrammarChecks(workers, clock=lambda: now[0])  # type: ignore[arg-type]
        for attempt, error in enumerate([JobKilledError("too slow"), BadRequestError("wrong")]):
            call = asyncio.ensure_future(checks.check(GRAMMAR))
            await started(attempt + 1, workers)
            workers.jobs[attempt].set_exception(error)
            for _ in range(2):
                with pytest.raises(BadRequestError, match=str(error)):
                    await (call if not call.done() else checks.check(GRAMMAR))
            now[0] += 61.0
        with pytest.raises(BadRequestError, match="wrong"):
            await checks.check(GRAMMAR)
        assert len(workers.jobs) == 2, "an error of the grammar itself is remembered for good"

    asyncio.run(scenario())


def test_a_busy_server_is_not_remembered() -> None:
    async def scenario() -> None:
        workers = FakeWorkers()
        checks = GrammarChecks(workers)  # type: ignore[arg-type]
        call = asyncio.ensure_future(checks.check(GRAMMAR))
        await started(1, workers)
        await checks.close()
        with pytest.raises(ServerUnavailableError):
            await call
        call = asyncio.ensure_future(checks.check(GRAMMAR))
        await started(2, workers)
        workers.jobs[1].set_result(CheckedGrammar("translated", 1))
        assert (await call).translation == "translated"

    asyncio.run(scenario())


def test_the_memory_of_results_is_bounded() -> None:
    async def scenario() -> None:
        workers = FakeWorkers()
        checks = GrammarChecks(workers)  # type: ignore[arg-type]
        for i in range(300):
            call = asyncio.ensure_future(checks.check(Grammar("regex", f"{i}" + "a" * 200_000)))
            await started(i + 1, workers)
            workers.jobs[i].set_result(CheckedGrammar("b" * 200_000, 1))
            await call
        assert checks._length <= 2**25 and len(checks._results) < 100
        assert checks._length == sum(result.length for result in checks._results.values())

    asyncio.run(scenario())
