"""`/openapi.json` and `/docs`: the operations of all dialects in the form of OpenAPI 3.1, and a page that shows them.

`describe` builds the document from the `Operation` table alone. Bodies are the structs that the routes decode, answers
are the types of `results`, and the descriptions are the docstrings of both. `DescriptionApi` builds it at the first
request, in a thread, and keeps it.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import typing
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from verl_server._version import __version__
from verl_server.sampling_params import UNSUPPORTED_PARAMS, SamplingParams
from verl_server.server.dialects.anthropic.routes import anthropic_error
from verl_server.server.dialects.openai.errors import openai_error
from verl_server.server.dialects.sglang.admin_routes import unsuccessful
from verl_server.server.dialects.vllm.errors import vllm_error
from verl_server.server.dialects.vllm.reading import InferenceRequest
from verl_server.server.dialects.vllm.sampling import SAMPLING_REFUSED, SAMPLING_WITHOUT_EFFECT, VllmSamplingParams
from verl_server.server.generate_request import GenerateReqInput
from verl_server.server.http.field_docs import field_docs
from verl_server.server.http.operation import EVENTS, JSON, TEXT, Operation
from verl_server.server.http.responses import encoded_response, error_response

Schema = dict[str, Any]

HTML = "text/html"
_REF = "#/components/schemas/{name}"
_SCHEMES: dict[str, Schema] = {
    "apiKey": {
        "type": "http",
        "scheme": "bearer",
        "description": "The key of the setting `api_key`. Without it, ordinary routes need no key.",
    },
    "adminKey": {
        "type": "http",
        "scheme": "bearer",
        "description": "The key of the setting `admin_api_key`. If it is set, control routes need it. Else, they need "
        "`api_key` if that is set. Every route accepts it.",
    },
}
_STATUSES = {
    400: "The request is wrong. Nothing was changed.",
    401: "The key is missing or wrong.",
    403: "A web page of another origin may have sent the request, a session key does not permit it, or a session has "
    "used its limits.",
    404: "The named object does not exist, or the route is switched off.",
    409: "Another transaction is open, or the caller's transaction is closed; or a session has the id already.",
    412: "The request expects another run of the server (header X-Verl-Expected-Instance). Nothing was done.",
    413: "The body is larger than `max_request_bytes`.",
    410: "The session has finished or expired.",
    415: "The content type is one that web forms send.",
    429: "The queue is full.",
    500: "An internal error. The server's log has the traceback.",
    503: "The server cannot do this now: it is starting or stopping, or its weights are missing, torn or released.",
    504: "The call exceeded its time limit.",
}
_MESSAGE = {"type": "object", "properties": {"message": {"type": "string"}}, "required": ["message"]}
_FACTS: Schema = {
    "message": {"type": "string"},
    "type": {"type": "string", "description": 'The status as text, "Bad Request" or an error type of OpenAI.'},
    "param": {"type": ["string", "null"], "description": "The field at fault, if the error names one."},
}
_INNER_ERROR = {
    "type": "object",
    "properties": _FACTS
    | {"code": {"type": ["integer", "string", "null"], "description": "The error's name, or the status."}},
    "required": ["message", "type", "code"],
}
_ERROR: Schema = {
    "type": "object",
    "description": "SGLang's error object and, under `error`, OpenAI's.",
    "properties": {"object": {"const": "error"}, **_FACTS, "code": {"type": "integer"}, "error": _INNER_ERROR},
    "required": ["object", "message", "type", "code", "error"],
}
_ERRORS: dict[str, Schema] = {
    "Error": _ERROR,
    "RefusedUpdate": _ERROR
    | {
        "description": "`Error` with `success`, of control routes whose answer has it.",
        "properties": _ERROR["properties"] | {"success": {"const": False}},
        "required": [*_ERROR["required"], "success"],
    },
    "VllmError": {
        "type": "object",
        "description": "vLLM's error object.",
        "properties": {"error": _INNER_ERROR},
        "required": ["error"],
    },
    "AnthropicError": {
        "type": "object",
        "description": "Anthropic's error object.",
        "properties": {"type": {"const": "error"}, "error": {**_MESSAGE, "required": ["type", "message"]}},
        "required": ["type", "error"],
    },
}
_SHAPES: dict[Any, str] = {
    error_response: "Error",
    openai_error: "Error",
    unsuccessful: "RefusedUpdate",
    vllm_error: "VllmError",
    anthropic_error: "AnthropicError",
}
"""`Operation.answer_error` -> name of the shape."""
SAMPLING: list[tuple[type[msgspec.Struct], type[msgspec.Struct], Mapping[str, str], Mapping[str, str]]] = [
    (SamplingParams, GenerateReqInput, UNSUPPORTED_PARAMS, {}),
    (VllmSamplingParams, InferenceRequest, SAMPLING_REFUSED, SAMPLING_WITHOUT_EFFECT),
]
"""(sampling parameters, body that holds them, their refused fields, their fields without effect)"""


class DescriptionApi:
    """Handlers of `/openapi.json` and `/docs`."""

    def __init__(self, described: list[Operation]) -> None:
        self._described = described
        self._document: bytes | None = None
        self._building = asyncio.Lock()

    def operations(self) -> list[Operation]:
        return [
            Operation("/openapi.json", self.openapi),
            Operation("/docs", self.docs, media_types=(HTML,)),
        ]

    async def openapi(self, request: Request) -> Response:
        """Return the OpenAPI 3.1 document of this server."""
        async with self._building:
            if self._document is None:
                operations = [*self._described, *self.operations()]
                self._document = await asyncio.to_thread(lambda: orjson.dumps(describe(operations)))
        return encoded_response(self._document, JSON)

    async def docs(self, request: Request) -> Response:
        """Return a page that shows `/openapi.json`. It loads nothing from other hosts."""
        page = resources.files("verl_server.server").joinpath("docs_page.html").read_text(encoding="utf-8")
        return HTMLResponse(page, headers={"Content-Security-Policy": "default-src 'self' 'unsafe-inline'"})


def describe(operations: Iterable[Operation]) -> Schema:
    """Return the OpenAPI document of these operations."""
    operations = list(operations)
    schemas = _Schemas(operations)
    paths: dict[str, Schema] = {}
    for operation in operations:
        for path in operation.paths:
            shown = re.sub(r"{(\w+)(:\w+)?}", r"{\1}", path)
            for method in operation.methods:
                paths.setdefault(shown, {})[method.lower()] = _operation(operation, shown, method, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "verl-server",
            "version": __version__,
            "description": "The rollout server for agentic RL. A field that is null has its default. An unknown "
            "field is answered 400 if it is like a known one, or in `sampling_params`. Others are counted in /metrics "
            "and named in the header X-Verl-Unknown-Fields.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "responses": schemas.errors,
            "securitySchemes": _SCHEMES,
        },
        "tags": [{"name": tag} for tag in dict.fromkeys(operation.dialect for operation in operations)],
    }


def _operation(operation: Operation, path: str, method: str, schemas: _Schemas) -> Schema:
    doc = inspect.getdoc(operation.handler) or ""
    described: Schema = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()} {path}").strip("_"),
        "summary": re.split(r"(?<=\.)\s", " ".join(doc.split()), maxsplit=1)[0],
        "description": " ".join(doc.split()),
        "tags": [operation.dialect],
        "responses": _responses(operation, path, method, schemas),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ] + [
        {"name": name, "in": "query", "description": meaning, "schema": {"type": "string"}}
        for name, meaning in operation.query.items()
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        needs_body = any(field.required for field in msgspec.structs.fields(operation.body))
        content = {JSON: {"schema": schemas.reference(operation.body)}}
        described["requestBody"] = {"required": needs_body, "content": content}
    if operation.access != "open":
        keys = ("adminKey", "apiKey") if operation.access == "control" else ("apiKey", "adminKey")
        described["security"] = [*([] if operation.access == "owner" else [{}]), *({key: []} for key in keys)]
    if operation.access == "control":
        described["x-control"] = True
    return described


# -- answers ------------------------------------------------------------------------------------------------


def _responses(operation: Operation, path: str, method: str, schemas: _Schemas) -> Schema:
    content: Schema = {}
    for media_type in operation.media_types:
        if media_type in (EVENTS, TEXT, HTML):
            content[media_type] = {"schema": {"type": "string"}}
        else:
            content[media_type] = {"schema": {} if operation.answer is None else schemas.reference(operation.answer)}
    responses: Schema = {"200": {"description": "Success."} | ({"content": content} if content else {})}
    shape = error_shape(operation)
    for status in _error_statuses(operation, path, method):
        schemas.errors[f"{shape}{status}"] = {
            "description": _STATUSES[status],
            "content": {JSON: {"schema": {"$ref": _REF.format(name=shape)}}},
        }
        responses[str(status)] = {"$ref": f"#/components/responses/{shape}{status}"}
    return responses


def error_shape(operation: Operation) -> str:
    """Return the name of the shape of the operation's errors."""
    return _SHAPES[getattr(operation.answer_error, "func", operation.answer_error)]


def _error_statuses(operation: Operation, path: str, method: str) -> list[int]:
    """Return the statuses of the errors that an operation may answer."""
    dialect = operation.dialect
    statuses = {412, 500}
    if dialect != "server":
        statuses |= {503}  # every dialect needs the scheduler
    if operation.access != "open":
        statuses |= {401}
    if operation.body is not None or operation.query or operation.access == "control" or "{" in path:
        statuses |= {400}
    if operation.body is not None or method != "GET":
        statuses |= {413}
    if operation.body is not None and operation.access != "control":
        statuses |= {429}
    if operation.access == "control" or path == "/abort_request":
        statuses |= {403, 404, 409, 415, 504}
    if operation.access in ("owner", "local_owner"):
        statuses |= {403, 409, 503}
    if "{" in path or path == "/metrics" or operation.body is not None:
        statuses |= {404}
    return sorted(statuses)


# -- schemas ------------------------------------------------------------------------------------------------


class _Schemas:
    """The components of the document: bodies, answers and errors."""

    errors: dict[str, Schema]
    """Responses with an error status, by shape and status."""

    def __init__(self, operations: list[Operation]) -> None:
        bodies = {operation.body for operation in operations if operation.body is not None}
        answers = [operation.answer for operation in operations if operation.answer is not None]
        types = [*sorted(bodies, key=lambda body: body.__name__), *answers, *(params for params, *_ in SAMPLING)]
        references, self.components = msgspec.json.schema_components(types, ref_template=_REF, schema_hook=_any)
        self._references = list(zip(types, references, strict=True))
        for cls in _classes(types):
            if (component := self.components.get(cls.__name__)) is not None:
                _describe_fields(component, cls)
        for body in bodies:
            _accept_null(self.components[body.__name__])
        for operation in operations:
            if operation.body is not None:
                _add_known_fields(self.components[operation.body.__name__], operation.refused, operation.without_effect)
        for params, holder, refused, without_effect in SAMPLING:
            self._describe_sampling(params, holder, refused, without_effect)
        self.components |= _ERRORS
        self.errors = {}

    def reference(self, type_: Any) -> Schema:
        return next(reference for known, reference in self._references if known == type_)

    def _describe_sampling(
        self,
        params: type[msgspec.Struct],
        holder: type[msgspec.Struct],
        refused: Mapping[str, str],
        without_effect: Mapping[str, str],
    ) -> None:
        """`sampling_params` is decoded on its own, so the struct of a body does not say what it holds."""
        component = self.components[params.__name__]
        _accept_null(component)
        _add_known_fields(component, refused, without_effect)
        if (body := self.components.get(holder.__name__)) is not None:
            one = {"$ref": _REF.format(name=params.__name__)}
            many = [{"type": "array", "items": one}] if params is SamplingParams else []
            body["properties"]["sampling_params"]["anyOf"] = [one, *many, {"type": "null"}]


def _any(type_: type) -> Schema:
    """Return the schema of a type that JSON lacks. The schema permits any value."""
    return {}


def _classes(types: Iterable[Any]) -> list[type]:
    """Return all classes of the package in these types, nested ones included."""
    found: list[type] = []
    queue = list(types)
    while queue:
        type_ = queue.pop()
        queue += typing.get_args(type_)
        if not isinstance(type_, type) or type_ in found or not type_.__module__.startswith("verl_server"):
            continue
        found.append(type_)
        queue += typing.get_type_hints(type_).values()
    return found


def _describe_fields(component: Schema, cls: type) -> None:
    """Add the docstrings of fields. Remove `id` and the tag, which only messages between processes have."""
    properties: dict[str, Schema] = component.get("properties", {})
    config = getattr(cls, "__struct_config__", None)
    if config is not None and config.tag is not None:
        for internal in ("id", config.tag_field):
            properties.pop(internal, None)
            if internal in component.get("required", ()):
                component["required"].remove(internal)
    if not component.get("required", True):
        del component["required"]
    if "description" in component:
        component["description"] = inspect.cleandoc(component["description"])
    for name, doc in field_docs(cls).items():
        if name in properties:
            properties[name] = {key: value for key, value in properties[name].items() if key != "description"}
            properties[name]["description"] = doc


def _accept_null(component: Schema) -> None:
    """Add null to each optional property: it means the default."""
    for name, schema in component["properties"].items():
        variants = schema.get("anyOf", [{key: schema[key] for key in schema if key not in ("description", "default")}])
        if name in component.get("required", ()) or {"type": "null"} in variants or variants == [{}]:
            continue
        kept = {key: schema[key] for key in ("description", "default") if key in schema}
        component["properties"][name] = {"anyOf": [*variants, {"type": "null"}]} | kept


def _add_known_fields(component: Schema, refused: Mapping[str, str], without_effect: Mapping[str, str]) -> None:
    """Add to a body's schema the known fields that are not implemented."""
    properties = component["properties"]
    for name, remedy in refused.items():
        text = f"Refused (400) if it is set: {remedy}."
        properties.setdefault(name, {"description": text, "deprecated": True, "x-refused": True})
    for name, reason in without_effect.items():
        properties.setdefault(name, {"description": f"Accepted without effect: {reason}.", "x-without-effect": True})
