"""Recognizes the server at an address: verl-server, or a genuine SGLang or vLLM server."""

from __future__ import annotations

from typing import Any

import orjson

from verl_server.engine.attached.server import AttachedServer
from verl_server.engine.attached.sglang_server import SglangServer
from verl_server.engine.attached.vllm_server import VllmServer
from verl_server.engine.http_answers import raise_for
from verl_server.engine.http_connection import Answer
from verl_server.engine.http_transport import HttpTransport
from verl_server.engine.server_address import path_remedy
from verl_server.errors import BadRequestError
from verl_server.messages.io_struct import INSTANCE_HEADER


def identify(transport: HttpTransport, url: str, first: Answer) -> AttachedServer | None:
    """Return the server of another project at `url`, None if it is a verl-server.

    `first` is an answer of the server to any request. Raise BadRequestError for an unknown server, and the error of
    `/server_info` if that refuses the key or fails.
    """
    if first.headers.get(INSTANCE_HEADER) is not None:
        if path_remedy(url) and transport.probe("/server_info").status_code == 404:
            raise BadRequestError(f"{url} answered 404 to GET /server_info.{path_remedy(url)}")
        return None
    answer = transport.probe("/server_info")
    if answer.status_code in (401, 403) or answer.status_code >= 500:
        raise_for(answer)
    info = _object(answer)
    if "scheduler_info" in info:
        return None
    if "internal_states" in info or "server_args" in info:
        return SglangServer(transport, url, info)
    version = _object(transport.probe("/version")).get("version")
    if "vllm_config" in info or version is not None:
        return VllmServer(transport, url, str(version))
    raise BadRequestError(
        f"The server at {url} is neither verl-server nor SGLang nor vLLM: /server_info answered {answer.status_code}, "
        f"and /version has no version. Is the URL the server's own, not that of a router?{path_remedy(url)}"
    )


def _object(answer: Answer) -> dict[str, Any]:
    """Return the JSON object in an answer; empty if there is none."""
    try:
        body = orjson.loads(answer.content) if answer.status_code == 200 else None
    except orjson.JSONDecodeError:
        return {}
    return body if isinstance(body, dict) else {}
