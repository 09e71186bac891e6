"""Routes for information on the model, the settings, the load and the metrics. No route changes the server."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from verl_server._version import __version__
from verl_server.chat.formats import NONE
from verl_server.errors import BadRequestError, ServerDiedError, VerlServerError
from verl_server.messages.io_struct import GetInternalStateReq
from verl_server.messages.results import ModelInfo, ServedVersion, ServerInfo
from verl_server.server.dialects.vllm.config import vllm_config
from verl_server.server.http.operation import JSON, TEXT, Operation
from verl_server.server.http.responses import NotServedError, json_response
from verl_server.server.metrics import CONTENT_TYPE, gauges_text
from verl_server.server.scraped_figures import Scrape
from verl_server.server.tokenizer_manager import TokenizerManager

_STATE_TIMEOUT = 2.0
"""The most seconds to wait for the scheduler's figures, which a long update may delay."""
_SECTIONS = {"memory": "memory", "disagg": "disaggregation", "queues": "queues"}
"""Name in `?include=` -> part of a load."""
_INCLUDES = {"core", "spec", "lora", "all", *_SECTIONS}


class InfoApi:
    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._started = time.time()

    def operations(self) -> list[Operation]:
        return [
            Operation("/model_info", self.model_info, aliases=("/get_model_info",), answer=ModelInfo),
            Operation(
                "/server_info",
                self.server_info,
                aliases=("/get_server_info",),
                query={"config_format": "json or text: add `vllm_config`, the settings under vLLM's names."},
                answer=ServerInfo,
            ),
            Operation("/weight_version", self.weight_version, aliases=("/get_weight_version",), answer=ServedVersion),
            Operation(
                "/v1/loads",
                self.loads,
                query={
                    "include": "Parts, separated by commas: core, memory, spec, lora, disagg, queues, all.",
                    "dp_rank": "Only this data-parallel rank. There is one, 0.",
                    "format": "json, or prometheus for metrics as text.",
                },
                media_types=(JSON, TEXT),
            ),
            Operation("/get_load", self.get_load),
            Operation("/metrics", self.metrics, access="open", media_types=(TEXT,)),
        ]

    async def _internal_state(self) -> dict[str, Any]:
        """Return the scheduler's figures, or {} if it does not answer in time."""
        try:
            reply = await self._manager.control(GetInternalStateReq(), timeout=_STATE_TIMEOUT)
        except ServerDiedError:
            raise
        except VerlServerError:
            return {}
        return reply.payload if isinstance(reply.payload, dict) else {}

    async def model_info(self, request: Request) -> Response:
        """Return a `ModelInfo`."""
        return json_response(model_info(self._manager))

    async def weight_version(self, request: Request) -> Response:
        """Return {"weight_version", "since", "instance_id", "weights_confirmed", "accepts"} at once: the scheduler is
        not asked. `since` is the Unix time at which this label was activated, that of the start for the loaded weights.
        `accepts` is false before the first request of the start was answered, and while the weights cannot serve: torn,
        not loaded or released, as far as the scheduler's last reply said. 503 while the server starts or stops."""
        manager, controls = self._manager, self._manager.controls
        manager.check_serving()
        served: ServedVersion = {
            "weight_version": controls.weight_version,
            "since": controls.versions.since,
            "instance_id": manager.instance_id,
            "weights_confirmed": controls.weights_confirmed,
            "accepts": manager.ready and controls.weights_refusal is None,
        }
        return json_response(served)

    async def server_info(self, request: Request) -> Response:
        """Return a `ServerInfo`. With `config_format`, add `vllm_config` as an object ("json") or as text."""
        given = request.query_params.get("config_format")
        if given not in (None, "json", "text"):
            raise BadRequestError(f"config_format must be json or text, not {given!r:.100}.")
        info = await self.server_info_dict()
        if given is not None:
            manager = self._manager
            config = vllm_config(manager.server_args, manager.scheduler_info, manager.controls.model_path)
            info["vllm_config"] = config if given == "json" else str(config)
        return json_response(info)

    async def server_info_dict(self) -> dict[str, Any]:
        state = await self._internal_state()
        info: dict[str, Any] = self._manager.server_args.public_dict() | self._manager.scheduler_info
        if self._manager.scheduler_info:  # the server has started
            info["grammar_backend"] = "llguidance" if self._manager.text.constrains_outputs else "none"
        pause, engine = self._manager.controls.pause, self._manager.server_args.engine_args
        return info | {
            "model_path": self._manager.controls.model_path,  # an update from disk changes it
            "tokenizer_path": self._manager.server_args.tokenizer_path or self._manager.server_args.model_path,
            "device": str(info["device"]).partition(":")[0],  # the setting; `scheduler_info` has rank 0's device
            "dp_size": 1,
            "pp_size": engine.get("pipeline_parallel_size", 1),
            "ep_size": self._manager.server_args.tp_size if engine.get("enable_expert_parallel") else 1,
            "disaggregation_mode": "null",
            "enable_memory_saver": self._manager.scheduler_info.get("releases_memory", False),
            "scheduler_info": self._manager.scheduler_info,
            "internal_states": [state],
            "weight_version": self._manager.controls.weight_version,
            "instance_id": self._manager.instance_id,
            "weights_confirmed": self._manager.controls.weights_confirmed,
            "busy_seconds": round(self._manager.busy.seconds, 3),
            "paused_since": None if pause is None else pause.since,
            "paused_seconds": None if pause is None else round(pause.seconds, 3),
            "startup_time": self._started,
            "version": __version__,
            "frontend": "python",
        }

    # -- load -----------------------------------------------------------------------------------------------

    async def loads(self, request: Request) -> Response:
        """Return the load of the one data-parallel rank, in the format of SGLang's `/v1/loads`. With
        `format=prometheus`, return the numbers as Prometheus gauges."""
        included = {part.strip() for part in request.query_params.get("include", "all").split(",")} - {""}
        if wrong := included - _INCLUDES:
            raise BadRequestError(f"Unknown include {sorted(wrong)}; known: {sorted(_INCLUDES)}.")
        form = request.query_params.get("format", "json")
        if form not in ("json", "prometheus"):
            raise BadRequestError(f"format must be json or prometheus, not {form!r:.100}.")
        rank = request.query_params.get("dp_rank", "0")
        if rank != "0":
            raise BadRequestError(f"dp_rank={rank!r:.20} does not exist: this server has one data-parallel rank, 0.")
        load = self._load(await self._internal_state(), included)
        if form == "prometheus":
            return Response(gauges_text(load), headers={"Content-Type": CONTENT_TYPE})
        return json_response(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": __version__,
                "accelerator": self._manager.scheduler_info.get("device"),
                "num_accelerators": self._manager.server_args.tp_size,
                "loads": [load],
            }
        )

    def _load(self, state: dict[str, Any], included: set[str]) -> dict[str, Any]:
        """Return the figures of a load: the numbers of the scheduler and the `included` parts."""
        running = state.get("num_running_reqs", 0)
        waiting = state.get("num_waiting_reqs", max(0, self._manager.num_requests - running))
        info, numbers = self._manager.scheduler_info, dict(state)
        memory, retracted = numbers.pop("memory", {}), numbers.pop("num_retracted_reqs", 0)
        numbers.pop("memory_usage", None)
        load: dict[str, Any] = {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_waiting_uncached_tokens": 0,
            "num_used_tokens": 0,
            "num_total_tokens": 0,
            "num_prealloc_ready_tokens": 0,
            "max_total_num_tokens": info.get("max_total_num_tokens"),
            "max_running_requests": info.get("max_running_requests"),
            "token_usage": 0.0,
            "gen_throughput": 0.0,
            "cache_hit_rate": 0.0,
        }
        load |= numbers | {"num_running_reqs": running, "num_waiting_reqs": waiting}
        load["num_active_tokens"] = load["num_total_tokens"]
        load["utilization"] = max(load["token_usage"], running / (load["max_running_requests"] or 1))
        sections = {
            "memory": {
                "weight_gb": _gigabytes(memory.get("weight_bytes", 0)),
                "kv_cache_gb": _gigabytes(memory.get("kv_cache_bytes", 0)),
                "graph_gb": 0.0,
                "token_capacity": load["max_total_num_tokens"],
            },
            "disaggregation": {"mode": "null"},
            "queues": {
                "waiting": waiting,
                "grammar": 0,
                "paused": waiting if self._manager.controls.is_paused else 0,
                "retracted": retracted,
                "prealloc_ready": 0,
            },
        }
        wanted = [part for name, part in _SECTIONS.items() if name in included or "all" in included]
        return load | {part: sections[part] for part in wanted}

    async def get_load(self, request: Request) -> Response:
        """Return a list with the load of the one data-parallel rank: `dp_rank`, `num_reqs`, `num_waiting_reqs`,
        `num_tokens`. The name and the form are those of older versions of SGLang."""
        load = self._load(await self._internal_state(), set())
        entry = {
            "rid": None,
            "http_worker_ipc": None,
            "dp_rank": 0,
            "num_reqs": load["num_running_reqs"] + load["num_waiting_reqs"],
            "num_waiting_reqs": load["num_waiting_reqs"],
            "num_tokens": load["num_total_tokens"],
            "ts_tic": time.perf_counter(),
        }
        return json_response([entry])

    async def metrics(self, request: Request) -> Response:
        """Return Prometheus metrics as text; 404 if `enable_metrics` is off."""
        if not self._manager.server_args.enable_metrics:
            raise NotServedError(404, "GET /metrics: metrics are off (enable_metrics=False).")
        try:
            state = await self._internal_state()
        except VerlServerError:
            state = {}
        controls = self._manager.controls
        scrape = Scrape(
            state,
            paused_seconds=0.0 if controls.pause is None else controls.pause.seconds,
            busy_seconds=self._manager.busy.seconds,
            weight_version=controls.weight_version,
        )
        return Response(self._manager.metrics.render(scrape), headers={"Content-Type": CONTENT_TYPE})


def _gigabytes(nbytes: int) -> float:
    return round(nbytes / 2**30, 3)


def model_info(manager: TokenizerManager) -> dict[str, Any]:
    """Return the body of `/model_info`, which `Engine.get_model_info` returns too."""
    manager.check_serving()
    assert manager.model_text is not None
    config, server_args, format = manager.model_text.config, manager.server_args, manager.text.format
    return {
        "model_path": manager.controls.model_path,
        "served_model_name": server_args.served_model_name or manager.controls.model_path,
        "tokenizer_path": server_args.tokenizer_path or server_args.model_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": manager.controls.weight_version,
        "load_format": server_args.load_format,
        "reasoning_parser": format.reasoning if format.reasoning != NONE else None,
        "tool_call_parser": format.tools if format.tools != NONE else None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": config.get("model_type"),
        "architectures": config.get("architectures"),
    }
