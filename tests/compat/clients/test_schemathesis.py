"""Schemathesis over `/openapi.json`: bounded, valid and invalid requests to every operation."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from conftest import SETTINGS, Server
from schemathesis.checks import CHECKS

pytestmark = pytest.mark.client("Schemathesis", "schemathesis")

_HANG_SECONDS = 60.0
"""An answer that takes longer counts as a hang. The sum of the server's bounds for one request is smaller: waiting for
a text worker, rendering, compiling a grammar, waiting for the end of a pause, and waiting for a control call."""
RESTORE = ("/continue_generation", "/end_weight_update", "/resume", "/wake_up", "/resume_memory_occupation")
"""Routes that end the states in which generation waits or is refused. Weights that are lost are loaded again."""
NAMES = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")


@pytest.fixture(scope="module")
def fuzzed(make_server: Callable[..., Server]) -> Server:
    """A server with short bounds."""
    bounds = {"control_timeout": 10.0, "paused_request_timeout": 3.0, "weight_update_lease": 2.0, "text_timeout": 10.0}
    return make_server(context_length=256, enable_weights_cpu_backup=True, **bounds)


def restore(server: Server) -> None:
    for path in RESTORE:
        with contextlib.suppress(urllib.error.HTTPError):  # 400: the server is not in that state
            server.post(path, {})
    if not server.get("/weight_version")["accepts"]:
        server.post("/update_weights_from_disk", {"model_path": server.model, "weight_version": "restored"})


def check(case: Any, checks: list[Any], statuses: Counter[str]) -> None:
    """Send one request. Raise if the answer is a crash, undocumented, not of its schema, or late."""
    began = time.monotonic()
    response = case.call(timeout=_HANG_SECONDS)
    seconds = time.monotonic() - began
    statuses[f"{response.status_code // 100}xx"] += 1
    assert response.status_code != 500, f"500: {response.text[:500]}"
    assert seconds < _HANG_SECONDS
    case.validate_response(response, checks=checks)


def fuzz(operation: Any, mode: Any, server: Server, cases: int, statuses: Counter[str]) -> str | None:
    """Send `cases` valid or invalid requests. Return the first failure."""
    checks = list(CHECKS.get_by_names(list(NAMES)))
    is_control = operation.definition.raw.get("x-control", False)
    failures: list[str] = []

    @hypothesis.settings(
        max_examples=cases,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        if failures:
            return
        try:
            check(case, checks, statuses)
        except (Exception, BaseExceptionGroup) as error:
            failures.append(f"{operation.label} ({mode.value}): {error!r:.1500}\n{case.as_curl_command()[:1500]}")
        finally:
            if is_control:
                restore(server)

    with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # nothing about the operation can be invalid
        run()
    return failures[0] if failures else None


@pytest.mark.timeout(1200)
def test_openapi(fuzzed: Server, record_property: Any) -> None:
    """Every operation: no 500, no undocumented status, content type or body, no hang."""
    schema = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    expected = fuzzed.greedy([70, 71])
    statuses: Counter[str] = Counter()
    failures, operations = [], 0
    for result in schema.get_all_operations():
        operations += 1
        for mode in schemathesis.GenerationMode:
            if (failure := fuzz(result.ok(), mode, fuzzed, SETTINGS["cases"], statuses)) is not None:
                failures.append(failure)
    record_property(
        "measured",
        f"{operations} operations, {statuses.total()} cases, {len(failures)} failures {json.dumps(statuses)}",
    )
    assert not failures, "\n\n".join(failures)
    restore(fuzzed)
    assert requests.get(f"{fuzzed.url}/health_generate", timeout=_HANG_SECONDS).status_code == 200
    assert len(fuzzed.greedy([70, 71])) == len(expected)
