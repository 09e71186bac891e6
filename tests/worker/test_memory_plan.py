"""The plan of a GPU's memory for the shapes of Qwen3-0.6B and Qwen3-8B on cards of 16 to 141 GiB, without a GPU.

The engine's own `ModelRunner` plans on the device "meta", so all sums are those of a real start.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.shapes import shape_folder
from tests.worker.test_memory_account import GIB, FakeGpu
from verl_server.errors import BadRequestError
from verl_server.ipc.tp_group import TpGroup
from verl_server.kernels import gpu as assumed_gpu
from verl_server.server_args import ServerArgs
from verl_server.worker.model_runner import ModelRunner
from verl_server.worker.step_memory import most_decodes

CARDS = [16, 24, 40, 48, 80, 141]
META = torch.device("meta")


class PlannedRunner(ModelRunner):
    """A runner whose weights take memory of a stand-in for a GPU, and are not read."""

    def _load_weights(self, folder: Path) -> None:
        gpu = self._gpu
        gpu.held += sum(parameter.nbytes for parameter in self.model.parameters())
        gpu.others += gpu.taken_meanwhile

    def __init__(self, args: ServerArgs, gpu: Card) -> None:
        self._gpu = gpu
        with assumed_gpu.assumed(108, 80, 163 * 1024):
            super().__init__(args, TpGroup(), META, memory=gpu)

    @property
    def account(self) -> dict[str, int]:
        parts: dict[str, int] = self.memory.figures()["account"]
        return parts

    @property
    def tokens(self) -> int:
        return self.num_pages * self.page_size


class Card(FakeGpu):
    """A GPU of `total` GiB of which other processes hold `others` GiB."""

    def __init__(self, total: float, others: float = 0.0, taken_meanwhile: float = 0.0) -> None:
        super().__init__(round(total * GIB), others=round(others * GIB))
        self.taken_meanwhile = round(taken_meanwhile * GIB)


@pytest.fixture(scope="module", params=["0.6b", "8b"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shape_folder(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape of Qwen3-8B, with its own context."""
    return shape_folder(tmp_path_factory.mktemp("8b"), "8b", context=40960)


@pytest.fixture(autouse=True)
def no_child_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing here compiles: the runner only plans."""
    monkeypatch.setattr("verl_server.worker.model_runner.compilation.share", lambda: None)
    yield


def plan(folder: Path, card: Card, **settings: Any) -> PlannedRunner:
    args = ServerArgs(str(folder), load_format="dummy", skip_tokenizer_init=True, **settings)
    return PlannedRunner(args, card)


def settings_in(text: str) -> dict[str, Any]:
    """Return the settings that a message advises."""
    return {name: ast.literal_eval(value) for name, value in re.findall(r"(\w+)=([\w.]+\w)", text)}


# -- what is planned ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("total", CARDS)
def test_every_part_and_every_graph_has_room(folder: Path, total: int) -> None:
    """On a small card, too. 8B has 15.3 GiB of weights, so 16 GiB are refused."""
    card = Card(total)
    if total == 16 and folder.name.startswith("8b"):
        with pytest.raises(BadRequestError, match="does not fit this GPU"):
            plan(folder, card)
        return
    runner = plan(folder, card)
    parts = runner.account
    *each, free = parts.values()
    assert sum(each) == free == card.total and min(each) >= 0
    entries = most_decodes(None, runner.max_rows)
    assert parts["cuda_graphs"] >= runner._step_memory.graphs(entries, runner.max_rows) > 0
    assert parts["step"] == runner._step_memory.largest(8192 + runner.max_rows, runner.max_rows)
    assert parts["slack"] == GIB // 2
    card.held = parts["weights"] + parts["kv_cache"] + parts["tables"] + parts["slack"]
    account = runner.memory._account
    assert account is not None and account.shortage() == 0
    assert account.room_for_graphs(parts["cuda_graphs"]) >= parts["cuda_graphs"], "no graph is lost"


@pytest.mark.parametrize("held", [0, 40, 56])
def test_the_plan_counts_what_is_free_and_not_what_the_card_has(folder: Path, held: int) -> None:
    """A process that holds the rest makes a small card of a large one."""
    assert plan(folder, Card(80, others=held)).account == plan(folder, Card(80 - held)).account


def test_a_card_that_the_model_barely_fits_starts_and_says_what_is_lost(
    large: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    runner = plan(large, Card(20))
    assert 0 < runner.num_pages < runner.max_rows and runner.account["unassigned"] == 0
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    of_context, of_rows = (text for text in warnings if text.startswith("The KV cache"))
    assert f"at most {runner.tokens} tokens" in of_context and "context_length=40960" in of_context
    assert f"at most {runner.num_pages} requests run at once" in of_rows and "max_running_requests=256" in of_rows
    assert all("Lower chunked_prefill_size" in text for text in (of_context, of_rows))
    assert any(text.startswith("weight_receive_bytes is") for text in warnings)
    assert "Filters, penalties and masks of all requests at once" in caplog.text


def test_a_card_with_room_warns_of_nothing(large: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    runner = plan(large, Card(80))
    assert f"The KV cache holds {runner.tokens} tokens: {runner.tokens / 40960:.1f} requests" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "Filters, penalties" not in caplog.text


def test_a_capacity_that_was_set_names_its_setting(large: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan(large, Card(80), max_total_tokens=1024)
    assert "at most 1024 tokens" in caplog.text and "Raise max_total_tokens." in caplog.text


# -- starts with too little memory ------------------------------------------------------------------------------------


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_allocated(large: Path) -> None:
    card = Card(80, others=60.6)
    with pytest.raises(BadRequestError) as error:
        plan(large, card)
    assert card.held == 0, "reading weights takes minutes"
    message = str(error.value)
    for words in (
        "19.52 GiB are needed",
        "weights 15.26 GiB",
        "the largest step 2.25 GiB",
        "CUDA graphs 1.21 GiB",
        "19.40 GiB were free at the start",
        "Other processes hold 60.60 GiB (process 7)",
        "It fits with chunked_prefill_size=2048 ",
    ):
        assert words in message, words


@pytest.mark.parametrize("fraction", [0.5, 0.85])
@pytest.mark.parametrize("free", [17.3, 17.6, 18.4, 19.2, 19.5])
def test_the_advised_settings_start_and_hold_a_request(large: Path, free: float, fraction: float) -> None:
    with pytest.raises(BadRequestError, match="does not fit this GPU") as error:
        plan(large, Card(free), mem_fraction_static=fraction)
    advice = str(error.value).partition("It fits with ")[2].partition("(")[0]
    runner = plan(large, Card(free), **{"mem_fraction_static": fraction} | settings_in(advice))
    assert runner.tokens >= 4096


def test_a_model_that_no_setting_helps_says_so(large: Path) -> None:
    with pytest.raises(BadRequestError) as error:
        plan(large, Card(16))
    message = str(error.value)
    assert "With the smallest settings" in message and "17.22 GiB are needed" in message
    assert "It fits" not in message and "Use a smaller model or a larger tp_size" in message


def test_settings_that_are_the_smallest_already_are_not_advised(large: Path) -> None:
    smallest = {"chunked_prefill_size": 256, "max_running_requests": 8, "disable_cuda_graph": True}
    with pytest.raises(BadRequestError, match=r"With a small KV cache \d+\.\d\d GiB are needed\. Use a smaller model"):
        plan(large, Card(16), **smallest)


def test_nobody_asks_who_holds_memory_at_a_start_that_fits(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's library takes time, and no start needs it."""

    def asked(_: Card) -> str:
        raise AssertionError("asked")

    monkeypatch.setattr(Card, "holders", asked)
    plan(large, Card(24))


@pytest.mark.parametrize("total", [24, 48, 80])
def test_a_share_that_is_too_small_names_one_that_helps(large: Path, total: int) -> None:
    with pytest.raises(BadRequestError, match=r"mem_fraction_static=0\.1 is too small") as error:
        plan(large, Card(total), mem_fraction_static=0.1)
    (advised,) = re.findall(r"Raise mem_fraction_static to ([\d.]+\d)", str(error.value))
    assert plan(large, Card(total), mem_fraction_static=float(advised)).tokens >= 4096
    with pytest.raises(BadRequestError, match="is too small"):
        plan(large, Card(total), mem_fraction_static=float(advised) - 0.05)


def test_memory_that_others_take_while_the_weights_are_read_is_named(large: Path) -> None:
    with pytest.raises(BadRequestError) as error:
        plan(large, Card(24, taken_meanwhile=6))
    message = str(error.value)
    assert "Other processes have taken 6.00 GiB since the start" in message and "(process 7)" in message
