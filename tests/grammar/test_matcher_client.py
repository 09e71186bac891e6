"""`MatcherClient` and the process behind it: the masks are those of a matcher here, and no end of it goes unnoticed."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.grammar.conftest import EOS, TOKENIZER, VOCAB
from verl_server.errors import BadRequestError
from verl_server.grammar import matcher_child, matcher_client
from verl_server.grammar.compiler import GrammarCompiler
from verl_server.grammar.failure import GrammarFailedError, MatchersLostError
from verl_server.grammar.mask_executor import MaskExecutor
from verl_server.grammar.matcher_client import MatcherClient, RemoteMatcher, RemoteRun
from verl_server.grammar.source import Grammar, translate
from verl_server.ipc.blocking_messages import BlockingMessages
from verl_server.ipc.child_process import ChildProcess

_JSON = TOKENIZER.backend_tokenizer.to_str().encode()


def regex(text: str) -> str:
    return translate(Grammar("regex", text), {})


@pytest.fixture(scope="module")
def shared() -> Iterator[MatcherClient]:
    client = MatcherClient(_JSON, [EOS], VOCAB, max_rows=16, buffers=2, processes=2)
    yield client
    client.close()


@pytest.fixture
def client() -> Iterator[MatcherClient]:
    """A client whose process a test may kill."""
    client = MatcherClient(_JSON, [EOS], VOCAB, max_rows=4, buffers=2, processes=1)
    yield client
    client.close()


def pid_of(client: MatcherClient) -> int:
    (slot,) = client._slots
    assert slot.child is not None
    return slot.child._child.pid


def started(client: MatcherClient, matchers: list[RemoteMatcher], buffer: int = 0) -> RemoteRun:
    run = client.begin(buffer)
    assert client.start(matchers, run) == range(len(matchers))
    return run


def stop(pid: int) -> None:
    """Stop a process, and wait until it is stopped: its threads may run on for a moment."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline, "the process does not stop"


def masks(client: MatcherClient, matchers: list[RemoteMatcher], buffer: int = 0) -> np.ndarray:
    started(client, matchers, buffer).wait(None)
    return client.words(buffer)[: len(matchers)].copy()


def consume(client: MatcherClient, pairs: list[tuple[RemoteMatcher, int]]) -> list[bool | BaseException]:
    ends = client.consume(pairs, None, [False] * len(pairs))()
    return [(ends[place] or True) if place in ends else False for place in range(len(pairs))]


def test_masks_and_ends_are_those_of_matchers_in_this_process(shared: MatcherClient) -> None:
    compiler, executor = GrammarCompiler(_JSON, [EOS], VOCAB), MaskExecutor()
    texts = ["[a-c]{3}", "ab?", "(x|yy)z"]
    remote = [shared.compile(regex(text)) for text in texts]
    local = [compiler.compile(regex(text)) for text in texts]
    for _ in range(3):
        expected = np.zeros((len(texts), compiler.num_words), dtype=np.int32)
        executor.fill(local, expected)
        found = masks(shared, remote, buffer=1)
        assert (found == expected).all()
        tokens = [int(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[0]) for row in expected]
        ends = executor.consume(list(zip(local, tokens, strict=True)))
        assert consume(shared, list(zip(remote, tokens, strict=True))) == ends
    assert True in ends


def test_masks_that_are_started_with_the_tokens_are_those_after_them(shared: MatcherClient) -> None:
    """The first ends with its token, and so needs no mask; the last has no mask of the step."""
    texts = ["a", "ab", "a[b-d]e", "ab"]
    matchers, later = [shared.compile(regex(text)) for text in texts], shared.compile(regex("[x-z]"))
    run = shared.begin(1)
    shared.words(1)[:] = 0
    assert shared.consume([(matcher, 69) for matcher in matchers], run, [True, True, True, False])() == {0: None}
    assert shared.start([later], run) == range(3, 4)
    run.wait(None)
    assert run.done == bytes([1, 1, 1, 1])
    found = shared.words(1)[:4].copy()
    assert not found[0].any() and (found[1:] == masks(shared, [matchers[1], matchers[2], later])).all()


def test_a_token_that_breaks_a_matcher_fails_its_row(shared: MatcherClient) -> None:
    matchers = [shared.compile(regex("ab")), shared.compile(regex("ab"))]
    run = shared.begin(0)
    ends = shared.consume([(matchers[0], 70), (matchers[1], 69)], run, [True, True])()
    run.wait(None)
    assert list(ends) == [0] == list(run.failed_rows()) and isinstance(ends[0], GrammarFailedError)


def test_an_answer_that_nobody_reads_is_not_taken_for_the_next_one(shared: MatcherClient) -> None:
    """The step of the first tokens failed before it was processed."""
    first, second = shared.compile(regex("a")), shared.compile(regex("ab"))
    shared.consume([(first, 69)], None, [False])
    other = [matcher for matcher in (shared.compile(regex("b")) for _ in range(2)) if matcher.child is first.child]
    assert consume(shared, [(second, 69), (other[0], 69)])[0] is False
    shared.consume([(second, 70)], None, [False])
    run = started(shared, other)
    run.wait(None)
    assert isinstance(run.error(0), GrammarFailedError), "the reason why it failed, not the answer to the tokens"


def test_a_matcher_is_reset_before_its_next_step(shared: MatcherClient) -> None:
    matcher = shared.compile(regex("ab"))
    first = masks(shared, [matcher])
    assert consume(shared, [(matcher, 69)]) == [False] and (masks(shared, [matcher]) != first).any()
    matcher.reset()
    assert (masks(shared, [matcher]) == first).all()
    matcher.reset()
    assert consume(shared, [(matcher, 69)]) == [False]


def test_copies_are_independent(shared: MatcherClient) -> None:
    matcher = shared.compile(regex("a|bc"))
    copy = matcher.copy()
    assert consume(shared, [(matcher, 69)]) == [True] and consume(shared, [(copy, 70)]) == [False]


def test_matchers_that_nobody_uses_are_dropped(client: MatcherClient) -> None:
    matcher, other = client.compile(regex("a{3}")), client.compile(regex("a{3}"))
    number, child = matcher.number, matcher.child
    del matcher
    assert list(child.dropped) == [number]
    masks(client, [other])
    assert not child.dropped
    outcomes = child.consume([number], [69], 0, [-1])()
    assert isinstance(outcomes[0], MatchersLostError), "the process does not know it any more"
    assert "ended with code 1" in str(outcomes[0]), "the reason is that of the process"


def test_errors_come_back_with_their_kinds(shared: MatcherClient) -> None:
    with pytest.raises(BadRequestError, match="The grammar was refused"):
        shared.compile('{"grammars": []}')
    matcher = shared.compile(regex("ab"))
    (outcome,) = consume(shared, [(matcher, 70)])
    assert isinstance(outcome, GrammarFailedError) and str(outcome)
    progress = started(shared, [matcher])
    progress.wait(None)
    assert list(progress.failed_rows()) == [0] and isinstance(progress.error(0), GrammarFailedError)


def test_several_threads_compile(shared: MatcherClient) -> None:
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda i: shared.compile(regex(f"[ab]{{{i + 1}}}")), range(32)))
    assert len({(matcher.child, matcher.number) for matcher in made}) == 32
    assert all(consume(shared, [(matcher, 69)]) == [i == 0] for i, matcher in enumerate(made))


def test_a_tokenizer_that_cannot_be_read_is_refused() -> None:
    client = MatcherClient(b"{}", [EOS], VOCAB, max_rows=4, buffers=1)
    with pytest.raises(BadRequestError, match="does not permit constrained decoding"):
        client.compile(regex("ab"))
    client.close()


def test_after_the_process_ended_its_matchers_are_lost_and_the_next_grammar_starts_another(
    client: MatcherClient,
) -> None:
    matcher = client.compile(regex("ab"))
    first, expected = pid_of(client), masks(client, [matcher])
    os.kill(first, signal.SIGKILL)
    progress = started(client, [matcher])
    progress.wait(None)
    assert list(progress.failed_rows()) == [0] and matcher.lost is progress.error(0)
    assert "ended with signal SIGKILL" in str(matcher.lost) and "Send the request again" in str(matcher.lost)
    assert consume(client, [(matcher, 69)]) == [matcher.lost]
    with pytest.raises(MatchersLostError):
        matcher.copy()
    again = client.compile(regex("ab"))
    assert again.lost is None and pid_of(client) != first and (masks(client, [again]) == expected).all()


@pytest.mark.parametrize("step", ["consume", "start", "call"])
def test_a_process_that_hangs_is_killed(step: str, client: MatcherClient, monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = client.compile(regex("ab"))
    for module, name in ((matcher_child, "STEP_SECONDS"), (matcher_child, "_CALL_SECONDS")):
        monkeypatch.setattr(module, name, 0.1)
    monkeypatch.setattr(matcher_client, "STEP_SECONDS", 0.1)
    stop(pid_of(client))
    if step == "consume":
        assert isinstance(consume(client, [(matcher, 69)])[0], MatchersLostError)
    elif step == "start":
        progress = started(client, [matcher])
        progress.wait(None)
        assert isinstance(progress.error(0), MatchersLostError)
    else:
        with pytest.raises(MatchersLostError, match="did not answer within"):
            matcher.copy()
    assert matcher.lost is not None and "was killed" in str(matcher.lost)
    monkeypatch.undo()
    assert client.compile(regex("ab")).lost is None


def test_only_the_matchers_of_the_process_that_ended_are_lost() -> None:
    client = MatcherClient(_JSON, [EOS], VOCAB, max_rows=4, buffers=2, processes=2)
    matchers = [client.compile(regex("ab")) for _ in range(4)]
    expected = masks(client, matchers)
    child = matchers[1].child
    assert [matcher.child is child for matcher in matchers] == [False, True, False, True]
    os.kill(child._child.pid, signal.SIGKILL)
    progress = started(client, matchers, 1)
    progress.wait(None)
    assert list(progress.failed_rows()) == [1, 3] and (client.words(1)[[0, 2]] == expected[[0, 2]]).all()
    assert consume(client, [(matcher, 69) for matcher in matchers]) == [False, child.lost, False, child.lost]
    client.close()


def test_a_step_and_its_matchers_are_freed_without_a_garbage_collection(shared: MatcherClient) -> None:
    """Scheduler processes collect old objects in idle time only, and a process keeps each matcher until it is freed."""
    matcher = shared.compile(regex("ab"))
    gc.disable()
    try:
        run = started(shared, [matcher])
        run.wait(None)
        number, child = matcher.number, matcher.child
        del run, matcher
        assert number in child.dropped
    finally:
        gc.enable()


def test_a_process_that_hangs_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for its outcomes takes the whole bound, and the masks of the other process are started afterwards."""
    client = MatcherClient(_JSON, [EOS], VOCAB, max_rows=4, buffers=2, processes=2)
    matchers = [client.compile(regex("ab")) for _ in range(2)]
    monkeypatch.setattr(matcher_child, "STEP_SECONDS", 0.1)
    monkeypatch.setattr(matcher_client, "STEP_SECONDS", 0.1)
    run = client.begin(0)
    stop(matchers[0].child._child.pid)
    assert client.consume([(matchers[0], 69)], run, [True])() == {0: matchers[0].lost}
    monkeypatch.setattr(matcher_client, "STEP_SECONDS", 20.0)
    assert client.start(matchers[1:], run) == range(1, 2)
    run.wait(None)
    assert list(run.failed_rows()) == [0] and matchers[1].lost is None
    client.close()


def test_several_processes_that_hang_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests wait meanwhile, so the time must not grow with the number of processes."""
    client = MatcherClient(_JSON, [EOS], VOCAB, max_rows=4, buffers=2, processes=2)
    matchers = [client.compile(regex("ab")) for _ in range(2)]
    monkeypatch.setattr(matcher_child, "STEP_SECONDS", 0.1)
    waits, receive = [], BlockingMessages.receive

    def noted(messages: BlockingMessages, seconds: float | None = None) -> bytes | None:
        waits.append(seconds)
        return receive(messages, seconds)

    monkeypatch.setattr(BlockingMessages, "receive", noted)
    for matcher in matchers:
        stop(matcher.child._child.pid)
    outcomes = consume(client, [(matcher, 69) for matcher in matchers])
    assert outcomes == [matcher.lost for matcher in matchers] and None not in outcomes
    first, second = waits
    assert first is not None and second is not None and first > 0 >= second
    client.close()


def test_an_idle_matcher_notices_the_end_of_its_process(client: MatcherClient) -> None:
    """So a request that comes afterwards is compiled, and does not end with the process."""
    matcher = client.compile(regex("ab"))
    os.kill(pid_of(client), signal.SIGKILL)
    matcher.child._child.popen.wait(timeout=20)
    assert "ended with signal SIGKILL" in str(matcher.lost)


def test_refusals_of_a_tokenizer_leave_no_descriptors() -> None:
    """Each of them starts a process."""
    client = MatcherClient(b"{}", [EOS], VOCAB, max_rows=4, buffers=1, processes=1)
    counts = []
    for _ in range(2):
        with pytest.raises(BadRequestError):
            client.compile(regex("ab"))
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    client.close()
    assert counts[0] == counts[1]


def test_the_process_ends_with_its_client(client: MatcherClient) -> None:
    matcher = client.compile(regex("ab"))
    client.close()
    assert matcher.child._child.poll() is not None and "was stopped" in str(matcher.lost)
    client.close()


@pytest.mark.parametrize("moment", ["before it is ready", "while it reads the tokenizer"])
def test_a_process_that_ends_while_it_starts_is_reported(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(ChildProcess):
        def wait_ready(self, *args: Any, **options: Any) -> dict[str, Any]:
            if moment == "before it is ready":
                os.kill(self.pid, signal.SIGKILL)
            info = super().wait_ready(*args, **options)
            os.kill(self.pid, signal.SIGKILL)
            return info

    client = MatcherClient(_JSON, [EOS], VOCAB, max_rows=4, buffers=2, processes=1)
    monkeypatch.setattr(matcher_child, "ChildProcess", Killed)
    with pytest.raises(MatchersLostError, match=r"signal SIGKILL( while starting)?\. Send the request again") as raised:
        client.compile(regex("ab"))
    assert raised.value.status_code == 503 and "\n" not in str(raised.value)
    monkeypatch.undo()
    assert client.compile(regex("ab")).lost is None, "the next grammar starts another one"
    client.close()
