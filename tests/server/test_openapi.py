"""`/openapi.json` describes every operation, and `/docs` shows it without other hosts."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest

from tests.server.conftest import Stack
from verl_server.server.app import operations
from verl_server.server.auth import AccessRules
from verl_server.server.http.operation import Operation
from verl_server.server.openapi import describe
from verl_server.server.sessions.service import SessionService


@pytest.fixture(scope="module")
def table(module_stack: Stack) -> list[Operation]:
    sessions = SessionService(module_stack.manager, module_stack.args)
    return operations(module_stack.manager, module_stack.args, AccessRules(module_stack.args), sessions)


@pytest.fixture(scope="module")
def document(module_stack: Stack) -> dict[str, Any]:
    response = module_stack.get("/openapi.json")
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    parsed: dict[str, Any] = response.json()
    return parsed


def test_it_has_every_route_and_no_other(document: dict[str, Any], table: list[Operation]) -> None:
    mounted = {
        (re.sub(r":\w+}", "}", path), method.lower())
        for operation in table
        for path in operation.paths
        for method in operation.methods
    }
    assert mounted == {(path, method) for path, methods in document["paths"].items() for method in methods}


def test_every_reference_and_operation_id_is_defined_once(document: dict[str, Any]) -> None:
    for reference in re.findall(r"'\$ref': '#/components/(\w+)/(\w+)'", str(document)):
        assert reference[1] in document["components"][reference[0]], reference
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids))


def test_every_known_field_of_a_body_is_described(document: dict[str, Any], table: list[Operation]) -> None:
    for operation in table:
        if operation.body is None:
            continue
        properties = document["components"]["schemas"][operation.body.__name__]["properties"]
        assert "id" not in properties or "id" in operation.fields
        for name in operation.fields:
            assert properties[name].get("description"), f"{operation.path}: {name} has no description"
        for name, remedy in operation.refused.items():
            assert name in operation.fields or (
                properties[name]["deprecated"] and remedy in properties[name]["description"]
            )
        for name, reason in operation.without_effect.items():
            assert name in {*operation.fields, *operation.refused} or reason in properties[name]["description"]


def test_answers_conform_to_it(document: dict[str, Any], module_stack: Stack) -> None:
    result = module_stack.generate(input_ids=[1, 2], return_logprob=True, sampling_params={"max_new_tokens": 3})
    for answer, path, method in (
        (result, "/generate", "post"),
        (module_stack.get("/model_info").json(), "/model_info", "get"),
        (document, "/openapi.json", "get"),
    ):
        schema = document["paths"][path][method]["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(answer, schema | {"components": document["components"]})


def test_errors_conform_to_it(document: dict[str, Any], module_stack: Stack) -> None:
    for path, body in (
        ("/generate", {"input_ids": "x"}),
        ("/generate", {"input_ids": [1], "sampling_params": {"nonsense": 1}}),
        ("/v1/completions", {}),
        ("/pause_generation", {"mode": "never"}),
    ):
        response = module_stack.post(path, body)
        described = document["paths"][path]["post"]["responses"][str(response.status_code)]
        error = document["components"]["responses"][described["$ref"].rpartition("/")[2]]
        schema = error["content"]["application/json"]["schema"]
        jsonschema.validate(response.json(), schema | {"components": document["components"]})


def test_null_is_the_default_of_every_optional_field(document: dict[str, Any]) -> None:
    schema = {"$ref": "#/components/schemas/GenerateReqInput", "components": document["components"]}
    jsonschema.validate({"input_ids": [1], "stream": None, "sampling_params": {"top_p": None}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"input_ids": [1], "stream": "yes"}, schema)


def test_sampling_parameters_are_described(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for body, params in (("GenerateReqInput", "SamplingParams"), ("InferenceRequest", "VllmSamplingParams")):
        reference = {"$ref": f"#/components/schemas/{params}"}
        assert reference in schemas[body]["properties"]["sampling_params"]["anyOf"]
    assert schemas["SamplingParams"]["properties"]["beam_width"]["deprecated"]


def test_keys_are_described(document: dict[str, Any]) -> None:
    paths = document["paths"]
    assert "security" not in paths["/health"]["get"]
    assert paths["/generate"]["post"]["security"] == [{}, {"apiKey": []}, {"adminKey": []}]
    assert paths["/pause_generation"]["post"]["security"] == [{}, {"adminKey": []}, {"apiKey": []}]


def test_it_is_built_once(module_stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    module_stack.get("/openapi.json")
    monkeypatch.setattr("verl_server.server.openapi.describe", None)
    assert module_stack.get("/openapi.json").status_code == 200


def test_it_needs_the_key_of_ordinary_routes(make_stack: Any) -> None:
    stack = make_stack(api_key="secret")
    for path in ("/openapi.json", "/docs"):
        assert stack.get(path).status_code == 401
        assert stack.get(path, headers={"Authorization": "Bearer secret"}).status_code == 200


def test_the_page_loads_nothing_from_other_hosts(module_stack: Stack) -> None:
    page = module_stack.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert 'fetch("openapi.json")' in page.text
    assert "://" not in page.text and "default-src 'self'" in page.headers["content-security-policy"]


def test_describing_nothing_is_a_document(table: list[Operation]) -> None:
    assert describe([])["paths"] == {}
