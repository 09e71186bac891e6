"""`/v1/models` and `/v1/models/NAME`, two routes that OpenAI's and Anthropic's clients share.

Anthropic's clients send the header `anthropic-version` with each request, and are answered in Anthropic's shape, also
where access rules or the router refuse the request (`Operation.shared_with`).
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from verl_server import lora
from verl_server.server.dialects.anthropic.routes import anthropic_error
from verl_server.server.dialects.openai.errors import ModelNotFoundError, openai_error
from verl_server.server.http.operation import Operation
from verl_server.server.http.responses import json_response
from verl_server.server.tokenizer_manager import TokenizerManager

VERSION_HEADER = "anthropic-version"
_PAGE = {
    "after_id": "Anthropic's cursor: the page after this model.",
    "before_id": "Anthropic's cursor: the page before this model.",
    "lifecycle": "Anthropic's filter. The served model is active.",
    "limit": "Anthropic's size of a page. There is one model.",
}


class ModelsApi:
    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._created = int(time.time())

    def operations(self) -> list[Operation]:
        shapes: dict[str, Any] = {"answer_error": openai_error, "shared_with": {VERSION_HEADER: anthropic_error}}
        return [
            Operation("/v1/models", self.models, in_session=True, query=_PAGE, **shapes),
            Operation("/v1/models/{name:path}", self.model, in_session=True, **shapes),
        ]

    async def models(self, request: Request) -> Response:
        """Return a list with the served model. With the header `anthropic-version`, return Anthropic's page."""
        self._manager.check_serving()
        if not _is_anthropic(request):
            return json_response({"object": "list", "data": [self._openai()]})
        query = request.query_params
        is_other_page = "after_id" in query or "before_id" in query
        states = [*query.getlist("lifecycle"), *query.getlist("lifecycle[]")]
        page = [] if is_other_page or (states and "active" not in states) else [self._anthropic()]
        name = page[0]["id"] if page else None
        return json_response({"data": page, "first_id": name, "last_id": name, "has_more": False})

    async def model(self, request: Request) -> Response:
        """Return the served model; 404 for another name. With the header `anthropic-version`, in Anthropic's shape."""
        name = request.path_params["name"]
        self._manager.check_serving()
        if name.strip("/") != self._name.strip("/"):
            is_adapter = name.strip("/").startswith(f"{self._name.strip('/')}:")
            text = f"The model '{name}'"
            raise ModelNotFoundError(lora.refusal(text, "does not exist") if is_adapter else f"{text} does not exist")
        return json_response(self._anthropic() if _is_anthropic(request) else self._openai())

    @property
    def _name(self) -> str:
        return self._manager.server_args.served_model_name or self._manager.controls.model_path

    @property
    def _context_length(self) -> int:
        return self._manager.scheduler_info["context_length"]

    def _openai(self) -> dict[str, Any]:
        """Return the model in OpenAI's shape, with the additional fields of vLLM and SGLang."""
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "verl-server",
            "root": self._manager.controls.model_path,
            "parent": None,
            "max_model_len": self._context_length,
        }

    def _anthropic(self) -> dict[str, Any]:
        """Return the model in Anthropic's shape. Prompt and output share the context, so either may fill it."""
        created = datetime.fromtimestamp(self._created, UTC).isoformat().replace("+00:00", "Z")
        return {
            "type": "model",
            "id": self._name,
            "display_name": self._name,
            "created_at": created,
            "lifecycle": "active",
            "max_input_tokens": self._context_length,
            "max_tokens": self._context_length,
        }


def _is_anthropic(request: Request) -> bool:
    return VERSION_HEADER in request.headers
