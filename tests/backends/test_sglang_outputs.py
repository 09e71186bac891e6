"""From SGLang's requests to new tokens: `StepStreamer` sends the outputs of a step, `step_of` translates them.

Needs no SGLang: the requests here have the attributes of SGLang's `Req` that `StepStreamer` reads.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import pytest

from verl_server.backends.process.driver import NewTokens, Step
from verl_server.backends.sglang.outputs import MESSAGES, Outputs, Reply, RunningRequest, step_of
from verl_server.backends.sglang.step_streamer import StepStreamer
from verl_server.messages.io_struct import FinishReason, TokenizedGenerateReq
from verl_server.messages.packed import TokenLogprobs
from verl_server.sampling_params import SamplingParams

PROMPT = [5, 6, 7, 8]
STOP = 2


@dataclass
class Reason:
    """One of SGLang's finish reasons."""

    fields: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return self.fields


STOPPED = Reason({"type": "stop", "matched": STOP})
FULL = Reason({"type": "length", "length": 2})


@dataclass
class Logprobs:
    """SGLang's `ReqLogprob`."""

    top_logprobs_num: int = 0
    input_token_logprobs_val: list[float | None] | None = None
    input_top_logprobs_val: list[Any] | None = None
    input_top_logprobs_idx: list[Any] | None = None
    output_token_logprobs_val: list[float] = field(default_factory=list)
    output_top_logprobs_val: list[list[float]] = field(default_factory=list)
    output_top_logprobs_idx: list[list[int]] = field(default_factory=list)


@dataclass(eq=False)
class Req:
    """SGLang's request."""

    rid: str
    return_logprob: bool = False
    output_ids: array[int] = field(default_factory=lambda: array("q"))
    finished_reason: Reason | None = None
    finished_len: int | None = None
    finished_output: bool | None = None
    send_token_offset: int = 0
    cached_tokens: int = 0
    input_logprob_sent: bool = False
    logprob: Logprobs = field(default_factory=Logprobs)

    @property
    def output_ids_through_stop(self) -> array[int]:
        return self.output_ids[: self.finished_len]

    def finished(self) -> bool:
        return self.finished_reason is not None

    def add(self, *ids: int) -> None:
        self.output_ids.extend(ids)

    def finish(self, reason: Reason, length: int | None = None) -> None:
        self.finished_reason, self.finished_len = reason, length


class Driver:
    """The two ends of the socket: SGLang's requests and the running requests of this project, by SGLang's id."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.streamer = StepStreamer(self)
        self.running: dict[str, RunningRequest] = {}

    def send(self, data: bytes) -> None:
        self.sent.append(data)

    def start(self, rid: str, return_logprob: bool = False, max_new_tokens: int = 8, **fields: Any) -> Req:
        """Start a request, whose id here is `rid` in capitals."""
        req = TokenizedGenerateReq(
            rid=rid.upper(),
            input_ids=PROMPT,
            sampling=SamplingParams(max_new_tokens=max_new_tokens),
            return_logprob=return_logprob,
            **fields,
        )
        self.running[rid] = RunningRequest(req)
        return Req(rid, return_logprob, logprob=Logprobs(req.top_logprobs_num))

    def step(self, *reqs: Req, skip: Req | None = None) -> Step:
        """Stream `reqs`, and return what the driver makes of the messages."""
        self.streamer.stream_output(list(reqs), any(req.return_logprob for req in reqs), skip)
        return self.received()

    def received(self) -> Step:
        step: Step = []
        for message in map(MESSAGES.decode, self.sent):
            assert isinstance(message, Outputs)
            step += step_of(message, self.running)
        self.sent.clear()
        return step


@pytest.fixture
def driver() -> Driver:
    return Driver()


def ids(step: Step) -> dict[str, list[int]]:
    return {new.rid: new.output_ids for new in step}


def only(step: Step) -> NewTokens:
    (new,) = step
    return new


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_each_token_is_sent_once_and_in_order(driver: Driver) -> None:
    a, b = driver.start("a"), driver.start("b")
    a.add(10)
    assert ids(driver.step(a)) == {"A": [10]}
    a.add(11, 12)
    b.add(20)
    assert ids(driver.step(a, b)) == {"A": [11, 12], "B": [20]}
    assert ids(driver.step(a, b)) == {"A": [], "B": []}
    b.add(21)
    assert ids(driver.step(b)) == {"B": [21]}


def test_a_step_is_one_message(driver: Driver) -> None:
    a, b = driver.start("a"), driver.start("b")
    b.finish(FULL)
    driver.streamer.stream_output([a, b], False)
    assert len(driver.sent) == 1
    driver.streamer.stream_output([b], False)
    driver.streamer.stream_output([], False)
    assert len(driver.sent) == 1, "a step without outputs has no message"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (STOPPED, FinishReason(type="stop", matched=STOP)),
        (FULL, FinishReason(type="length")),
        (
            Reason({"type": "abort", "message": "too long", "status_code": 400, "err_type": "BadRequestError"}),
            FinishReason(type="abort", message="The engine ended the request: too long", status_code=400),
        ),
        (
            Reason({"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}),
            FinishReason(type="abort", message="The engine ended the request: Aborted", status_code=500),
        ),
        (
            Reason({"type": "stop", "matched": "NaN happened"}),
            FinishReason(type="abort", message="The engine ended the request: NaN happened", status_code=500),
        ),
    ],
    ids=["stop", "length", "abort", "abort without a status", "token outside of the vocabulary"],
)
def test_a_finished_request_is_sent_once_with_its_last_token(
    driver: Driver, reason: Reason, expected: FinishReason
) -> None:
    a = driver.start("a")
    a.add(10)
    assert only(driver.step(a)).finish_reason is None
    a.add(STOP)
    a.finish(reason)
    new = only(driver.step(a))
    assert new.output_ids == [STOP] and new.finish_reason == expected
    a.add(11)  # the token of the step that SGLang had launched before it saw the end
    assert driver.step(a) == []


def test_tokens_behind_the_stop_are_left_out(driver: Driver) -> None:
    """A request with a stop in the middle of the tokens of a step, or whose next step was launched already."""
    a, b = driver.start("a", return_logprob=True, top_logprobs_num=1), driver.start("b")
    a.add(10, STOP, 11)
    a.logprob.output_token_logprobs_val = [-0.5, -0.25, -1.0]
    a.logprob.output_top_logprobs_val, a.logprob.output_top_logprobs_idx = [[-0.5], [-0.25], [-1.0]], [[1], [2], [3]]
    a.finish(STOPPED, length=2)
    b.add(20)
    b.finish(STOPPED)
    found = {new.rid: new for new in driver.step(a, b)}
    assert found["A"].output_ids == [10, STOP] and found["A"].logprobs == [-0.5, -0.25]
    assert [top.token_ids for top in found["A"].top_logprobs or []] == [[1], [2]]
    assert found["B"].output_ids == [20] and b.finished_len == 1, "SGLang reads the length of the output"


def test_a_request_whose_prompt_is_incomplete_is_skipped(driver: Driver) -> None:
    chunked, other = driver.start("a"), driver.start("b")
    other.add(20)
    assert ids(driver.step(chunked, other, skip=chunked)) == {"B": [20]}
    chunked.add(10)
    chunked.finish(FULL)
    assert driver.step(chunked, skip=chunked) == []
    assert ids(driver.step(chunked)) == {"A": [10]}, "its end was skipped, too"


def test_max_new_tokens_0_has_no_tokens(driver: Driver) -> None:
    a = driver.start("a", return_logprob=True, max_new_tokens=0, top_logprobs_num=1, logprob_start_len=2)
    a.add(10)
    a.logprob.output_token_logprobs_val = [-0.5]
    a.logprob.output_top_logprobs_val, a.logprob.output_top_logprobs_idx = [[-0.5]], [[1]]
    a.logprob.input_token_logprobs_val = [None, -0.5]
    a.logprob.input_top_logprobs_val, a.logprob.input_top_logprobs_idx = [None, [-0.5]], [None, [1]]
    a.finish(FULL)
    new = only(driver.step(a))
    assert (new.output_ids, new.logprobs, new.top_logprobs) == ([], [], None)
    assert new.finish_reason == FinishReason(type="length")
    assert new.prompt_logprobs is not None and new.prompt_logprobs.logprobs == [None, -0.5]


def test_cached_tokens_are_those_of_the_first_output(driver: Driver) -> None:
    """After a retraction, SGLang counts the pages that it wrote itself for the request."""
    a, b = driver.start("a"), driver.start("b")
    a.cached_tokens, b.cached_tokens = 2, 0
    assert [new.cached_tokens for new in driver.step(a, b)] == [2, 0]
    a.cached_tokens = b.cached_tokens = 4
    assert [new.cached_tokens for new in driver.step(a, b)] == [2, 0]


def test_aborted_requests_are_left_out(driver: Driver) -> None:
    a, b = driver.start("a"), driver.start("b")
    a.add(10)
    b.add(20)
    driver.streamer.stream_output([a, b], False)
    del driver.running["a"]
    assert ids(driver.received()) == {"B": [20]}


# -- log-probabilities -------------------------------------------------------------------------------------------------


def test_log_probabilities_are_sent_once(driver: Driver) -> None:
    a, b = driver.start("a", return_logprob=True), driver.start("b")
    a.add(10)
    b.add(20)
    a.logprob.output_token_logprobs_val.append(-0.5)
    found = {new.rid: new for new in driver.step(a, b)}
    assert found["A"].logprobs == [-0.5] and found["A"].top_logprobs is None
    assert found["B"].logprobs == [], "they were not requested"
    a.add(11, 12)
    a.logprob.output_token_logprobs_val += [-0.25, -1.0]
    assert only(driver.step(a)).logprobs == [-0.25, -1.0]


def test_candidates_are_sent_once(driver: Driver) -> None:
    a = driver.start("a", return_logprob=True, top_logprobs_num=2)
    own = a.logprob
    for token, logprobs, candidates in [(10, [-0.25, -2.0], [10, 3]), (11, [-0.5, -1.0], [4, 11])]:
        a.add(token)
        own.output_token_logprobs_val.append(logprobs[candidates.index(token)])
        own.output_top_logprobs_val.append(logprobs)
        own.output_top_logprobs_idx.append(candidates)
        assert only(driver.step(a)).top_logprobs == [TokenLogprobs.of(logprobs, candidates)]


def test_log_probabilities_of_the_prompt_are_sent_once(driver: Driver) -> None:
    a = driver.start("a", return_logprob=True, top_logprobs_num=1, logprob_start_len=1)
    own = a.logprob
    assert only(driver.step(a)).prompt_logprobs is None, "SGLang has not computed them"
    own.input_token_logprobs_val = [None, -0.5, -2.0]
    own.input_top_logprobs_val, own.input_top_logprobs_idx = [None, [-0.5], [-0.25]], [None, [7], [1]]
    prompt = only(driver.step(a)).prompt_logprobs
    assert prompt is not None
    assert prompt.token_ids == PROMPT[1:] and prompt.logprobs == [None, -0.5, -2.0]
    assert prompt.ranks == [None, None, None], "SGLang reports no ranks"
    assert prompt.top == [None, TokenLogprobs.of([-0.5], [7]), TokenLogprobs.of([-0.25], [1])]
    assert only(driver.step(a)).prompt_logprobs is None


def test_log_probabilities_of_the_prompt_without_candidates(driver: Driver) -> None:
    a = driver.start("a", return_logprob=True, logprob_start_len=0)
    a.logprob.input_token_logprobs_val = [None, -0.5, -2.0, -1.0]
    prompt = only(driver.step(a)).prompt_logprobs
    assert prompt is not None and prompt.logprobs == [None, -0.5, -2.0, -1.0] and prompt.top is None


# -- other messages ----------------------------------------------------------------------------------------------------


def test_a_rank_without_a_socket_marks_its_requests_as_the_others_do() -> None:
    running, ended = Req("a"), Req("b", finished_reason=STOPPED)
    running.add(10)
    ended.add(20, STOP)
    streamer = StepStreamer(None)
    streamer.stream_output([running, ended], False)
    streamer.send_output(Reply("1"))
    assert ended.finished_output and ended.finished_len == 2
    assert not running.finished_output and running.finished_len is None


@dataclass
class AbortReq:
    """SGLang's message about a request that its scheduler gives up, which has the same name."""

    rid: str
    finished_reason: dict[str, Any] | None = None
    abort_message: str | None = None


@pytest.mark.parametrize(
    ("message", "text", "status"),
    [
        (AbortReq("a", abort_message="It waited for too long."), "It waited for too long.", 500),
        (
            AbortReq("a", {"type": "abort", "message": "The queue is full.", "status_code": 503}),
            "The queue is full.",
            503,
        ),
    ],
    ids=["message", "reason"],
)
def test_a_request_that_sglang_gives_up_ends(driver: Driver, message: AbortReq, text: str, status: int) -> None:
    driver.start("a")
    driver.streamer.send_output(message, None)
    new = only(driver.received())
    assert new.rid == "A" and new.output_ids == []
    expected = FinishReason(type="abort", message=f"The engine ended the request: {text}", status_code=status)
    assert new.finish_reason == expected


def test_other_messages_of_sglang_are_not_sent(driver: Driver) -> None:
    @dataclass
    class FlushCacheReqOutput:
        success: bool
        rid: str = "a"

    driver.start("a")
    driver.streamer.send_output(FlushCacheReqOutput(True))
    assert driver.sent == []


@pytest.mark.parametrize(
    "reply", [Reply("1", b"\x00\xffweights"), Reply("2", error="RuntimeError: no memory"), Reply("3")]
)
def test_replies_arrive_as_they_were_sent(driver: Driver, reply: Reply) -> None:
    driver.streamer.send(reply)
    assert [MESSAGES.decode(data) for data in driver.sent] == [reply]
