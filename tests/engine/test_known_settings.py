"""The settings that an adapter takes from the report of a server to which it attaches."""

from __future__ import annotations

from typing import Any

import pytest

from verl_server.engine.http import _known_settings
from verl_server.server_args import ServerArgs


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_page_size_of_another_engine_is_no_setting(engine: str) -> None:
    info: Any = {"engine": engine, "page_size": 1, "tp_size": 2, "model_path": "model", "vocab_size": 5}
    settings = _known_settings(info)
    assert "page_size" not in settings
    assert ServerArgs(**settings).tp_size == 2


def test_the_page_size_of_the_embedded_engine_is_a_setting() -> None:
    info: Any = {"engine": "embedded", "page_size": 32, "model_path": "model"}
    assert ServerArgs(**_known_settings(info)).page_size == 32
