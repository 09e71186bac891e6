"""Stop regexes: what matches after each token, what RE2 refuses, and the bound on the text that a search reads."""

from __future__ import annotations

import json
import random

import pytest

from tests.server.conftest import MakeStack, Stack
from tests.server.test_tokenizer_manager import run
from verl_server import ServerArgs
from verl_server.errors import BadRequestError
from verl_server.messages.io_struct import TokenizedGenerateReq
from verl_server.models.tiny import byte_tokenizer
from verl_server.server.generate_request import read_generate
from verl_server.server.limits import Limits
from verl_server.server.text import stop_regex
from verl_server.server.text.detokenizer import OutputText
from verl_server.server.text.stop_regex import StopRegexes
from verl_server.server.text.text_tools import ModelBounds, NeedsWorkerError, TextTools

_TOKENIZER = byte_tokenizer()


def stopped(text: str, patterns: list[str], stop: list[str] | None = None, trim: bool = True) -> tuple[str, str | None]:
    """Return (text, what ended it) of an output that grows byte by byte."""
    output = OutputText(lambda ids: str(_TOKENIZER.decode(ids)), stop or [], not trim, StopRegexes(patterns))
    for token in _TOKENIZER.encode(text, add_special_tokens=False):
        if output.push(token) is not None:
            break
    output.finish()
    return output.text, output.matched


@pytest.mark.parametrize(
    ("text", "patterns", "shown", "matched"),
    [
        ("answer: 42. More", [r"\d+\."], "answer: ", r"\d+\."),
        ("no digits", [r"\d"], "no digits", None),
        ("aéb", ["é"], "a", "é"),
        ("one\nFinal: x", ["(?m)^Final"], "one\n", "(?m)^Final"),
        ("one Final: x", ["(?m)^Final", "^one F"], "", "^one F"),
        ("xfoo foo", [r"\bfoo"], "xfoo ", r"\bfoo"),
        ("abcd", ["bc", "a?bc"], "", "a?bc"),
        ("foobar", ["foo$"], "", "foo$"),
    ],
)
def test_text_ends_where_the_first_match_begins(
    text: str, patterns: list[str], shown: str, matched: str | None
) -> None:
    assert stopped(text, patterns) == (shown, matched)


def test_no_stop_trim_keeps_the_match() -> None:
    assert stopped("say END now", ["E.D"], trim=False) == ("say END", "E.D")


def test_a_stop_string_goes_before_a_regex_that_the_same_token_completes() -> None:
    assert stopped("the END", ["t.*D"], ["END"]) == ("the ", "END")


def test_a_match_at_a_distance_is_found_up_to_the_bound() -> None:
    for pattern, tail in (("<x*>", 1024), ("<x*(>|y{118})", 524)):
        assert StopRegexes([pattern]).tail == tail, "the tail is shorter for a larger pattern"
        within, beyond = "<" + "x" * (tail - 1) + ">", "<" + "x" * tail + ">"
        assert stopped("é" * 9 + within, [pattern]) == ("é" * 9, pattern)
        assert stopped(beyond, [pattern])[1] is None
    assert stopped(" " * 2000 + "begin", ["^begin"])[1] is None, "the end of a long text is not its beginning"
    assert stopped("a" * 2000 + "b", [r"\bab"])[1] is None, "the character before the part that is searched counts"


def test_a_search_reads_a_bounded_part_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0

    class Counting:
        programsize = 1

        def search(self, text: str, at: int) -> None:
            nonlocal longest
            longest = max(longest, len(text))

    monkeypatch.setattr(stop_regex, "_compile", lambda pattern: Counting())
    assert stopped("word " * 2000, ["pattern"])[1] is None
    assert longest <= 1024 + 2


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "missing"),
        ("(?=look)", "look-around"),
        (r"(a)\1", "backreferences"),
        ("a{2000}", "repetition size"),
        (r"((\pL{10}){10}){5}", "too large"),
        ("(.{300}){3}", "instructions"),
    ],
)
def test_what_re2_refuses_is_a_400_with_its_reason(pattern: str, says: str) -> None:
    with pytest.raises(BadRequestError, match=says) as caught:
        StopRegexes([pattern])
    assert "stop_regex" in str(caught.value)


def test_hostile_patterns_end_in_time() -> None:
    """Patterns that are exponential for a backtracking engine. The test would take forever with one."""
    rng = random.Random(0)
    text = "".join(rng.choice("ab") for _ in range(500))
    for pattern in ("(a|b)*a(a|b){9}c", "(a+)+$x", "(a|a)*c", "(.*)*c", "(?:a?){30}a{30}c", "(x+x+)+y"):
        assert stopped(text, [pattern])[1] is None


# -- requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 4, None])
def test_a_regex_ends_the_request(stack: Stack, chunk: int | None) -> None:
    stack.scheduler.script = lambda req: stack.text.encode("sum: 12 apples")
    stack.scheduler.chunk = chunk
    out = run(stack, input_ids=[1], sampling_params={"stop_regex": r"\d{2}", "max_new_tokens": 50}, return_logprob=True)
    assert out["text"] == "sum: " and out["output_ids"] == stack.text.encode("sum: 12")
    assert out["meta_info"]["finish_reason"] == {"type": "stop", "matched": r"\d{2}"}
    assert len(out["meta_info"]["output_token_logprobs"]) == len(out["output_ids"])


def test_a_refused_regex_is_a_400(stack: Stack) -> None:
    body = {"text": "hi", "sampling_params": [{"stop_regex": ["fine", r"(a)\1"]}]}
    response = stack.post("/generate", body)
    assert response.status_code == 400 and "backreferences" in response.json()["error"]["message"]
    assert not [m for m in stack.scheduler.received if isinstance(m, TokenizedGenerateReq)]


def test_long_regexes_are_compiled_in_a_text_worker() -> None:
    limits = Limits.of(ServerArgs(model_path="model"), context_length=256)
    bounds = ModelBounds(context_length=256, vocab_size=1000)
    on_loop = TextTools(_TOKENIZER, limits, bounds, most_text=1000)  # type: ignore[arg-type]
    worker = TextTools(_TOKENIZER, limits, bounds, in_worker=True)  # type: ignore[arg-type]
    body = json.dumps({"input_ids": [1], "sampling_params": {"stop_regex": "a" * 100 + r"(a)\1"}}).encode()
    with pytest.raises(NeedsWorkerError):
        read_generate(on_loop, body)
    with pytest.raises(BadRequestError, match="backreferences"):
        read_generate(worker, body)


def test_a_regex_needs_a_tokenizer(make_stack: MakeStack) -> None:
    stack = make_stack(skip_tokenizer_init=True)
    for name in ("stop_regex", "bad_words"):
        with pytest.raises(BadRequestError, match=f"`{name}` needs a tokenizer"):
            run(stack, input_ids=[1], sampling_params={name: ["x"]})
