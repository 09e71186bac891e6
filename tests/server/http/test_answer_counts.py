"""Answers are counted by route and status, and callers cannot make up labels."""

from __future__ import annotations

import re

import pytest

from tests.server.conftest import MakeStack, Stack


def counts(stack: Stack) -> dict[tuple[str, str, str], float]:
    """Return (endpoint, method, status) -> answers, without those of `/metrics`."""
    pattern = r'http_responses_total\{endpoint="(.*?)",method="(.*?)",model_name=".*?",status_code="(.*?)"\} (\S+)'
    found = re.findall(pattern, stack.get("/metrics").text)
    return {(endpoint, method, status): float(n) for endpoint, method, status, n in found if endpoint != "/metrics"}


def test_answers_and_errors_of_a_route(stack: Stack) -> None:
    for ids in ([5], [5], "none"):
        stack.post("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}})
    stack.get("/get_model_info")
    expected = {("/generate", "POST", "200"): 2, ("/generate", "POST", "400"): 1, ("/model_info", "GET", "200"): 1}
    assert counts(stack) == expected


@pytest.mark.parametrize("path", ["/nowhere-1", "/nowhere-2", "/generate/"])
def test_a_path_that_nobody_serves_is_no_label(module_stack: Stack, path: str) -> None:
    before = counts(module_stack)
    module_stack.get(path)
    module_stack.request("MADEUP", path)
    after = counts(module_stack)
    assert {key for key in after} - set(before) <= {("not served", "", "404")}
    assert after[("not served", "", "404")] == before.get(("not served", "", "404"), 0) + 2


def test_a_parameter_of_a_path_is_no_label_and_refusals_count(make_stack: MakeStack) -> None:
    stack = make_stack(api_key="right")
    stack.get("/sessions/ses_1", headers={"Authorization": "Bearer right"})
    stack.get("/sessions/ses_2", headers={"Authorization": "Bearer wrong"})
    assert counts(stack) == {("/sessions/{session_id}", "GET", "404"): 1, ("/sessions/{session_id}", "GET", "401"): 1}
