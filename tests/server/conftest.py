"""A TokenizerManager over a `FakeScheduler`, and HTTP calls to its application without a socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.fake_scheduler import INFO, FakeScheduler
from verl_server.ipc.message_socket import MessageSocket
from verl_server.server.app import create_app
from verl_server.server.text.tokenizer import ModelText
from verl_server.server.tokenizer_manager import TokenizerManager
from verl_server.server_args import ServerArgs


class FakeChild:
    """Stands for the scheduler's process. A test ends the process by setting `code`."""

    name = "scheduler-tp0"

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def terminate(self, grace: float = 10.0) -> int | None:
        self.code = -9
        return self.code

    def log_tail(self) -> str:
        return "\n\nLast lines of scheduler-tp0's log:\nBoom: the reason\n"


class Stack:
    """Manager, fake scheduler and HTTP application of one test."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.args = ServerArgs(model_path=str(folder), **{"control_timeout": 5.0} | settings)
        self.deaths: list[Exception] = []
        messages, schedulers_end = MessageSocket.pair()
        self.manager = TokenizerManager(self.args, messages, on_death=self.deaths.append)
        self.scheduler = FakeScheduler(schedulers_end)
        self.child = FakeChild()
        text = ModelText(self.args)
        text.load_tokenizer()
        self.text = text
        self.manager.start(text, INFO, [self.child])
        self.manager.ready = True
        self.app = create_app(self.manager, self.args)

    def request(self, method: str, path: str, bound: float = 20, **kwargs: Any) -> httpx.Response:
        """Send one request to the application, on the manager's loop as in production. Wait `bound` seconds at most."""

        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.request(method, path, **kwargs)

        return self.manager.run_sync(call(), timeout=bound)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.request("GET", path, **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        if body is not None:
            kwargs["json"] = body
        return self.request("POST", path, **kwargs)

    def generate(self, **body: Any) -> Any:
        """Return the JSON reply of `/generate`, which must succeed."""
        response = self.post("/generate", body)
        assert response.status_code == 200, response.text
        return response.json()

    def close(self) -> None:
        self.manager.shutdown()
        self.scheduler.stop()


MakeStack = Callable[..., Stack]


@pytest.fixture
def make_stack(text_folder: Path) -> Iterator[MakeStack]:
    stacks: list[Stack] = []

    def make(**settings: Any) -> Stack:
        stacks.append(Stack(text_folder, **settings))
        return stacks[-1]

    yield make
    for stack in stacks:
        stack.close()


@pytest.fixture(scope="module")
def module_stack(text_folder: Path) -> Iterator[Stack]:
    """One stack that is shared by tests that leave no state behind."""
    stack = Stack(text_folder)
    yield stack
    stack.close()


@pytest.fixture
def reset_stack(module_stack: Stack) -> Stack:
    """The module's stack without requests, settings of the fake scheduler, or state that control routes keep."""
    scheduler = module_stack.scheduler
    scheduler.script, scheduler.chunk, scheduler.hold, scheduler.control = None, None, False, None
    for path in ("/shutdown_weight_transfer_engine", "/wake_up", "/resume"):
        assert module_stack.post(path).status_code == 200
    assert not scheduler.running
    scheduler.received.clear()
    return module_stack


@pytest.fixture
def stack(make_stack: MakeStack) -> Stack:
    return make_stack()
