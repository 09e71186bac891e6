"""Constrained decoding from the request to the result: outputs parse, and hostile grammars harm nobody."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.grammar.hostile import KINDS, Hostile, generated
from verl_server import Engine
from verl_server.errors import ServerUnavailableError, VerlServerError
from verl_server.models.tiny import make_model_folder

BOUND = 4.0
"""Seconds for the check of a grammar."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = make_model_folder(tmp_path_factory.mktemp("model"))
    with Engine(
        model_path=str(folder), device="cpu", check_invariants=True, grammar_timeout=BOUND, log_level="error"
    ) as engine:
        yield engine


def generate(engine: Engine, **params: Any) -> Any:
    return engine.generate(prompt="Hello", sampling_params={"max_new_tokens": 150} | params, return_logprob=True)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{2,5}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["user", "agent", None]},
        "scores": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "when": {"type": "string", "format": "date"},
    },
    "required": ["name", "age", "kind", "scores", "when"],
    "additionalProperties": False,
}


def test_every_output_of_a_schema_is_valid(engine: Engine) -> None:
    schema = json.dumps(PERSON | {"x-guidance": {"whitespace_flexible": False}})
    results = [
        result
        for temperature in (0.0, 1.0, 3.0)
        for result in generate(engine, json_schema=schema, n=6, temperature=temperature)
    ]
    for result in results:
        assert result["meta_info"]["finish_reason"]["type"] == "stop"
        jsonschema.validate(json.loads(result["text"]), PERSON)
        logprobs = [entry[0] for entry in result["meta_info"]["output_token_logprobs"]]
        assert max(logprobs) == 0.0, "a token without an alternative has probability one"
        assert result["meta_info"]["completion_tokens"] == len(result["output_ids"]) == len(logprobs)
    assert len({result["text"] for result in results}) > 6


@pytest.mark.parametrize(
    ("params", "pattern"),
    [
        ({"regex": "[ab]{3,5}-[0-9]{2}"}, "[ab]{3,5}-[0-9]{2}"),
        ({"ebnf": 'root ::= digit ("+" digit){1,4}\ndigit ::= [0-9]'}, r"\d(\+\d){1,4}"),
        ({"ebnf": 'start: "a" B\nB: /b{2,4}/'}, "ab{2,4}"),
        ({"regex": "ab", "ignore_eos": True}, "ab"),
        ({"regex": "a*", "min_new_tokens": 5, "temperature": 0.0}, "a{5,}"),
        ({"regex": "[a-z]{8}", "repetition_penalty": 1.5, "top_p": 0.5, "logprobs_mode": "raw"}, "[a-z]{8}"),
        ({"regex": "ab?", "stop_token_ids": [200]}, "ab?"),
    ],
)
def test_every_output_of_a_grammar_matches(engine: Engine, params: dict[str, Any], pattern: str) -> None:
    for result in generate(engine, n=4, **params):
        assert result["meta_info"]["finish_reason"]["type"] == "stop"
        assert re.fullmatch(pattern, result["text"]), result["text"]


def test_the_text_before_a_tag_is_free(engine: Engine) -> None:
    tag = {
        "type": "tag",
        "begin": "<n>",
        "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
        "end": "</n>",
    }
    form = {
        "type": "triggered_tags",
        "triggers": ["<n>"],
        "tags": [tag],
        "at_least_one": True,
        "stop_after_first": True,
    }
    result = generate(engine, structural_tag=json.dumps({"type": "structural_tag", "format": form}), temperature=0.0)
    assert re.match(r"<n>-?\d+", result["text"])


def test_a_batch_may_mix_constrained_and_free_prompts(engine: Engine) -> None:
    free = {"max_new_tokens": 12, "temperature": 0.0}
    alone = engine.generate(prompt=["Hello", "World"], sampling_params=free)
    mixed = engine.generate(prompt=["Hello", "A", "World"], sampling_params=[free, {"regex": "[xy]{7}"}, free])
    assert [mixed[0]["text"], mixed[2]["text"]] == [result["text"] for result in alone]
    assert re.fullmatch("[xy]{7}", mixed[1]["text"])


def test_constrained_outputs_repeat_with_a_seed(engine: Engine) -> None:
    params = {"regex": "[a-z]{30}", "sampling_seed": 7}
    assert generate(engine, **params)["text"] == generate(engine, **params)["text"]


def test_the_server_names_its_grammar_backend(engine: Engine) -> None:
    assert engine.get_server_info()["grammar_backend"] == "llguidance"  # type: ignore[typeddict-item]


# -- the process of the matchers ---------------------------------------------------------------------------------------


def masks_of(pid: int) -> str:
    """Return the inode of the memory of masks that a process maps, "" for none."""
    lines = (Path("/proc") / str(pid) / "maps").read_text().splitlines()
    return next((line.split()[4] for line in lines if "verl-grammar-masks" in line), "")


def matchers_of(engine: Engine) -> list[int]:
    """Return the processes that write masks for the scheduler of an engine."""
    scheduler = int(engine.get_server_info()["scheduler_info"]["pid"])  # type: ignore[typeddict-item]
    if not (inode := masks_of(scheduler)):
        return []
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(folder.name) != scheduler and masks_of(int(folder.name)) == inode:
                found.append(int(folder.name))
    return found


def test_requests_with_a_grammar_end_when_their_process_is_killed_and_others_do_not(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    with Engine(model_path=str(folder), device="cpu", check_invariants=True, log_level="error") as engine:
        free = {"max_new_tokens": 100, "temperature": 0.0, "ignore_eos": True}
        expected = engine.generate(prompt="Hello", sampling_params=free)["text"]
        assert not matchers_of(engine), "a server without grammars has no such process"
        constrained = {"regex": "[a-z]{4000}", "max_new_tokens": 490}
        events = engine.generate(prompt="Hello", sampling_params=constrained, stream=True)
        next(events)
        (killed,) = matchers_of(engine)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            beside = pool.submit(engine.generate, prompt="Hello", sampling_params=free)
            os.kill(killed, signal.SIGKILL)
            with pytest.raises(ServerUnavailableError, match="ended with signal SIGKILL"):
                list(events)
            assert beside.result(timeout=60)["text"] == expected
        assert generate(engine, regex="[ab]{4}")["meta_info"]["finish_reason"]["type"] == "stop"
        (again,) = matchers_of(engine)
        inode = masks_of(again)
    with contextlib.suppress(OSError):  # its number is free again
        assert masks_of(again) != inode, "it ends with its server"


# -- hostile grammars ---------------------------------------------------------------------------------------


def attack(engine: Engine, hostile: list[Hostile]) -> None:
    """Send hostile grammars, some at a time, while ordinary requests run. Each must be answered within its bound."""
    free = {"max_new_tokens": 8, "temperature": 0.0}
    expected = engine.generate(prompt="Hello", sampling_params=free)["text"]
    attacking = threading.Event()

    def ordinary() -> list[float]:
        times = []
        while not attacking.is_set():
            start = time.monotonic()
            assert engine.generate(prompt="Hello", sampling_params=free)["text"] == expected
            times.append(time.monotonic() - start)
        return times

    def one(case: Hostile) -> tuple[str, str]:
        name, kind, text = case
        try:
            result = engine.generate(prompt="Hello", sampling_params={kind: text, "max_new_tokens": 24})
        except VerlServerError as error:
            assert error.status_code in (400, 503), f"{name}: {error}"
            return name, str(error)
        return name, result["meta_info"]["finish_reason"]["type"]

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        beside = pool.submit(ordinary)
        try:
            answers = [pool.submit(one, case) for case in hostile]
            done, pending = concurrent.futures.wait(answers, timeout=2 * BOUND * len(hostile))
            assert not pending, f"{len(pending)} of {len(hostile)} grammars have no answer"
            assert all(answer.result()[1] for answer in done)
        finally:
            attacking.set()
        assert beside.result(timeout=30), "no ordinary request was answered meanwhile"
    assert engine.generate(prompt="Hello", sampling_params={"regex": "ab", "max_new_tokens": 9})["text"] == "ab"
    assert engine.generate(prompt="Hello", sampling_params=free)["text"] == expected


def test_hostile_grammars_harm_nobody(engine: Engine) -> None:
    assert len(KINDS) >= 40
    attack(engine, KINDS)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_five_hundred_hostile_grammars_harm_nobody(engine: Engine) -> None:
    attack(engine, list(generated(500)))
