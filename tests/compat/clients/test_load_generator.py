"""SGLang's load generator, and many tool-calling chats at once."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from chat_tools import WEATHER
from conftest import SETTINGS, Server


@pytest.mark.client("sglang.benchmark.serving", "sglang")
@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm"])
def test_load(backend: str, server: Server, tmp_path: Path, record_property: Any) -> None:
    """Requests of random ids, all answered in full."""
    requests, concurrency = SETTINGS["requests"], SETTINGS["concurrency"]
    report = tmp_path / "report.jsonl"
    options = {
        "--backend": backend,
        "--base-url": server.url,
        "--model": server.model,
        "--tokenizer": server.model,
        "--dataset-name": "random-ids",
        "--num-prompts": requests,
        "--max-concurrency": concurrency,
        "--random-input-len": 32,
        "--random-output-len": 8,
        "--random-range-ratio": 1.0,
        "--output-file": report,
        "--seed": 1,
    }
    command = [sys.executable, Path(__file__).parent / "load_generator.py"]
    for name, value in options.items():
        command += [name, str(value)]
    done = subprocess.run([*command, "--disable-tqdm"], capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(report.read_text().splitlines()[-1])
    record_property("measured", f"{result['completed']} of {requests} requests, {concurrency} concurrent")
    assert result["completed"] == requests and result["total_output_tokens"] == 8 * requests


@pytest.mark.client("aiohttp", "aiohttp")
def test_tool_calls(server: Server, record_property: Any) -> None:
    """Concurrent chats with a forced tool call: every call's arguments fit the schema."""
    concurrency = SETTINGS["concurrency"]

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": f"Weather {number}?"}],
            "tools": [WEATHER],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": 200,
            "seed": number,
        }
        async with session.post(f"{server.url}/v1/chat/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert arguments["city"] in ("Paris", "Rome") and 1 <= arguments["days"] <= 9

    async def run() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(200)) as session:
            await asyncio.gather(*(one(session, number) for number in range(concurrency)))

    began = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - began < 200
    record_property("measured", f"{concurrency} of {concurrency} at once")
