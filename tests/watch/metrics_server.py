"""A server of a tiny model with its session store, and requests that make each of its metrics appear."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from verl_server import HttpServerEngineAdapter

KEY = "key-of-the-boards-test"


@contextmanager
def busy_server(model: Path, store: Path) -> Iterator[httpx.Client]:
    """Yield a client of a server that has had every kind of request that a panel shows."""
    settings = {"device": "cpu", "port": 0, "kv_cache_gib": 0.05, "cpu_threads": 1}
    with HttpServerEngineAdapter(
        model_path=str(model),
        api_key=KEY,
        admin_api_key=KEY,
        session_store=str(store),
        cpu_kernel_choice="torch",
        **settings,
    ) as engine:
        assert engine.url is not None
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=engine.url, headers=headers, trust_env=False, timeout=60) as client:
            play(client, model)
            yield client


def play(client: httpx.Client, model: Path) -> None:
    """Generate, push weights, play a session, and make mistakes."""
    sampling = {"max_new_tokens": 4, "ignore_eos": True}
    for _ in range(2):
        body = {"input_ids": list(range(40)), "sampling_params": sampling, "an_unknown_field": 1}
        assert client.post("/generate", json=body).status_code == 200
    assert client.post("/generate", json={"input_ids": "none"}).status_code == 400
    assert client.get("/no_such_route").status_code == 404
    push = {"model_path": str(model), "weight_version": "3@0123abcd"}
    assert client.post("/update_weights_from_disk", json=push).status_code == 200
    assert client.post("/update_weights_from_disk", json={"model_path": str(model / "none")}).status_code == 400
    session = client.post("/sessions", json={}).json()
    turn = {"input_ids": [1, 2, 3], "sampling_params": sampling}
    key = {"Authorization": f"Bearer {session['key']}"}
    assert client.post("/generate", json=turn, headers=key).status_code == 200
    assert client.post(f"/sessions/{session['id']}/finish", json={}).status_code == 200
