"""Text workers that hang, die, are too few or are no longer needed. Long texts and templates run in workers only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.conftest import MakeStack, Stack
from tests.server.fake_scheduler import INFO
from tests.server.test_tokenizer_manager import run as generate
from verl_server.errors import BadRequestError, ServerUnavailableError
from verl_server.server.dialects.openai.reading import CHAT
from verl_server.server.dialects.openai.tokenizing import DETOKENIZE, TOKENIZE
from verl_server.server.generate_request import GENERATE
from verl_server.server.text.text_tools import TextSetup, unpack
from verl_server.server.text.text_workers import TextWorkers
from verl_server.server.text.tokenizer import ModelText
from verl_server.server.text_service import TextService
from verl_server.server.text_worker import make_tools
from verl_server.server_args import ServerArgs
from verl_server.web.json_body import MalformedBodyError

HANGS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
"""A template that takes minutes to render."""
BOUND = 30.0


@pytest.fixture(scope="module")
def setup(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TextSetup:
    """A setup whose served template is harmless and whose listed template hangs."""
    listed = tmp_path_factory.mktemp("templates") / "hangs.jinja"
    listed.write_text(HANGS)
    args = ServerArgs(model_path=str(text_folder), allowed_chat_templates=(str(listed),))
    text = ModelText(args)
    text.load_tokenizer()
    service = TextService(args, text, INFO)
    return text.setup(service.limits, service.bounds)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), BOUND))


@contextlib.asynccontextmanager
async def workers(setup: TextSetup, count: int = 1, timeout: float = BOUND) -> AsyncIterator[TextWorkers]:
    pool = TextWorkers(lambda: setup, count, timeout, niceness=0)
    try:
        yield pool
    finally:
        await pool.close()


def chat(content: str = "hello", **more: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}]} | more).encode()


HANGING = chat(chat_template_kwargs={"chat_template": HANGS})


async def busy(pool: TextWorkers) -> int:
    """Return the pid of a worker as soon as the worker has a job."""
    while not (pool.pids and not pool._idle):
        await asyncio.sleep(0.01)
    return pool.pids[0]


def is_gone(pid: int) -> bool:
    """Return True once the process is gone, within 10 s.

    The parent may reap a process a moment after this process has learned of its end.
    """
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not Path(f"/proc/{pid}").exists()


def test_results_and_errors_cross_the_process(setup: TextSetup) -> None:
    async def test() -> None:
        async with workers(setup) as pool:
            read = await pool.run(CHAT, chat("hé", seed=5))
            assert read.request.seed == 5 and len(unpack(read.prompts[0])) == len(setup_text("hé"))
            with pytest.raises(BadRequestError, match="messages cannot be empty"):
                await pool.run(CHAT, b'{"messages": []}')
            with pytest.raises(MalformedBodyError, match="not valid JSON"):
                await pool.run(GENERATE, b"{")
            with pytest.raises(BadRequestError, match=r"does not use `x{64}`"):
                await pool.run(CHAT, chat(chat_template_kwargs={"x" * 10**6: 1}))

    def setup_text(content: str) -> bytes:
        return f"<user\n{content}>\n<assistant\n".encode()  # one token for each byte and for each special token

    run(test)


def test_a_job_that_hangs_is_killed_and_the_next_one_is_done(setup: TextSetup) -> None:
    async def test() -> None:
        async with workers(setup) as pool:
            await pool.run(CHAT, chat())
            (first,) = pool.pids
            pool._timeout = 0.2  # set only now, because it also bounds how long a job waits for a worker to start
            with pytest.raises(BadRequestError, match=r"longer than 0\.2 s .*text_timeout"):
                await pool.run(CHAT, HANGING)
            pool._timeout = BOUND
            assert (await pool.run(CHAT, chat())).prompts
            assert pool.pids != [first] and is_gone(first)

    run(test)


def test_jobs_that_wait_behind_one_that_hangs_are_done(setup: TextSetup) -> None:
    async def test() -> None:
        async with workers(setup, count=2) as pool:
            hanging = asyncio.ensure_future(pool.run(CHAT, HANGING))
            await busy(pool)
            answers = await asyncio.gather(*(pool.run(CHAT, chat(str(i))) for i in range(20)))
            assert [unpack(a.prompts[0]) for a in answers[:2]] != [unpack(answers[0].prompts[0])] * 2
            assert not hanging.done() and len(pool.pids) == 2

    run(test)


def test_a_worker_that_dies_fails_its_job_only(setup: TextSetup) -> None:
    async def test() -> None:
        async with workers(setup) as pool:
            hanging = asyncio.ensure_future(pool.run(CHAT, HANGING))
            os.kill(await busy(pool), signal.SIGKILL)
            waiting = asyncio.ensure_future(pool.run(CHAT, chat()))
            with pytest.raises(ServerUnavailableError, match="signal SIGKILL"):
                await hanging
            assert (await waiting).prompts

    run(test)


def test_an_idle_worker_that_dies_is_replaced(setup: TextSetup) -> None:
    async def test() -> None:
        async with workers(setup) as pool:
            await pool.run(CHAT, chat())
            os.kill(pool.pids[0], signal.SIGKILL)
            while pool.pids:
                await asyncio.sleep(0.01)
            assert (await pool.run(CHAT, chat())).prompts

    run(test)


def test_waiting_is_bounded(setup: TextSetup) -> None:
    async def test() -> None:
        async with workers(setup) as pool:
            hanging = asyncio.ensure_future(pool.run(CHAT, HANGING))
            await busy(pool)
            pool._timeout = 0.05
            with pytest.raises(ServerUnavailableError, match=r"text workers were busy for 0\.05 s"):
                await pool.run(CHAT, chat())
            assert not hanging.done() and not pool._waiting

    run(test)


def test_a_caller_who_leaves_takes_no_place_in_the_queue(setup: TextSetup) -> None:
    async def test() -> None:
        async with workers(setup) as pool:
            hanging = asyncio.ensure_future(pool.run(CHAT, HANGING))
            pid = await busy(pool)
            waiting = asyncio.ensure_future(pool.run(CHAT, chat()))
            while not pool._waiting:
                await asyncio.sleep(0)
            for task in (waiting, hanging):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert not pool._waiting
            os.kill(pid, signal.SIGKILL)  # no caller waits for its job
            assert (await pool.run(CHAT, chat())).prompts

    run(test)


def test_close_fails_everybody_and_leaves_no_process(setup: TextSetup) -> None:
    async def test() -> None:
        async with workers(setup) as pool:
            calls = [asyncio.ensure_future(pool.run(CHAT, HANGING)) for _ in range(2)]
            pid = await busy(pool)
            await pool.close()
            for call in calls:
                with pytest.raises(ServerUnavailableError, match="shutting down"):
                    await call
            assert is_gone(pid)
            with pytest.raises(ServerUnavailableError, match="shutting down"):
                await pool.run(CHAT, chat())

    run(test)


def test_close_while_a_worker_starts(setup: TextSetup) -> None:
    async def test() -> None:
        async with workers(setup) as pool:
            call = asyncio.ensure_future(pool.run(CHAT, chat()))
            while not pool._starting:
                await asyncio.sleep(0)
            await pool.close()
            with pytest.raises(ServerUnavailableError, match="shutting down"):
                await call
            assert not pool.pids

    run(test)


def test_a_worker_that_cannot_start_is_an_error(setup: TextSetup) -> None:
    async def test() -> None:
        broken = msgspec.structs.replace(setup, tokenizer=b"{")
        async with workers(broken) as pool:
            with pytest.raises(ServerUnavailableError, match="No text worker could be started"):
                await pool.run(CHAT, chat())

    run(test)


def test_a_tokenizer_of_another_kind_is_loaded_by_the_worker(setup: TextSetup) -> None:
    fast, other = (make_tools(msgspec.structs.replace(setup, tokenizer=t)) for t in (setup.tokenizer, None))
    text = "hé <|im_start|> \n x"
    assert fast.encode([text]) == other.encode([text])
    (ids,) = fast.encode([text])
    assert fast.decoder(False)(ids) == other.decoder(False)(ids) == text


# -- which work runs where --------------------------------------------------------------------------------------


def test_long_work_is_not_done_on_the_loop(stack: Stack) -> None:
    text = stack.manager.text
    short = b'{"input_ids": [5, 6]}'
    assert text.on_loop(GENERATE, short) is not None
    assert text.on_loop(GENERATE, b'{"text": "hello"}') is not None
    assert text.on_loop(GENERATE, short[:-1] + b" " * 200_000 + b"}") is None
    assert text.on_loop(GENERATE, json.dumps({"text": "x" * 9000}).encode()) is None
    assert text.on_loop(TOKENIZE, json.dumps({"prompt": ["x" * 10] * 1000}).encode()) is None
    assert text.on_loop(DETOKENIZE, json.dumps({"tokens": [[5] * 10] * 1000}).encode()) is None
    assert text.on_loop(CHAT, chat()) is None, "templates must run in workers only"
    assert text.on_loop(CHAT, b'{"messages": [], "input_ids": [5]}') is not None


def test_a_long_request_gets_the_same_answer(make_stack: MakeStack) -> None:
    stack = make_stack()
    for body in (
        {"input_ids": [[5, 6], [7]], "sampling_params": {"max_new_tokens": 3}, "rid": "r"},
        {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2, "n": 2}, "return_logprob": True},
        {"text": "hi", "sampling_params": [{"max_new_tokens": 1}]},
        {"input_ids": [5, 999]},
        {"input_ids": []},
        {"input_ids": [[5], []]},
        {"text": ["a"], "sampling_params": [{}, {}]},
        {"input_ids": [5] * 300},
    ):
        data = json.dumps(body).encode()
        answers = [
            stack.request("POST", "/generate", content=content)
            for content in (data, data[:-1] + b" " * 200_000 + data[-1:])
        ]
        short, long = [_without_times(answer.json()) for answer in answers]
        assert answers[0].status_code == answers[1].status_code and short == long
    assert stack.manager.text.worker_pids


def _without_times(answer: Any) -> Any:
    if isinstance(answer, list):
        return [_without_times(each) for each in answer]
    for name in ("e2e_latency", "response_sent_to_client_ts", "id"):
        answer.get("meta_info", {}).pop(name, None)
    return answer


def test_long_text_of_the_in_process_engine_goes_to_a_worker(stack: Stack) -> None:
    with pytest.raises(BadRequestError, match="prompt is too long: 10000 tokens"):
        generate(stack, text="x" * 10_000)
    assert len(stack.manager.text.worker_pids) == 1


def test_one_warning_for_a_variable_that_the_template_does_not_use(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"enable_thinking": False}}
    for path in ("/v1/chat/completions", "/v1/chat/completions", "/tokenize"):
        assert stack.post(path, body).status_code == 200
    assert len([r for r in caplog.records if "enable_thinking" in r.getMessage()]) == 1


def test_shutdown_ends_the_workers(make_stack: MakeStack) -> None:
    stack = make_stack()
    assert stack.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).status_code == 200
    pids = stack.manager.text.worker_pids
    stack.manager.shutdown()
    assert pids and all(map(is_gone, pids))


def test_workers_import_neither_torch_nor_transformers() -> None:

    program = (
        "import sys, verl_server.server.text_worker; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=BOUND, check=True)
    assert done.stdout.strip() == "[]"
