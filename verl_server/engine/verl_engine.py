"""`VerlEngine`: the rollout engine's interface for SPMD trainer ranks.

All ranks of a device mesh (under torchrun) construct it, and then call the same methods in the same order. The first
rank of each node owns the processes of that node: an in-process `Engine` or, on rank 0 with `launch_server=True`, a
server process. Rank 0 calls the engine; every rank gets the same result or error (`rank_group`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from operator import methodcaller
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, cast, overload

import torch
from torch.distributed.device_mesh import DeviceMesh

from verl_server.engine.base import EngineBase
from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.engine.options import GenerateOptions, PushOptions
from verl_server.engine.placement import (
    given_settings,
    join_ranks,
    launch_engine,
    place_engine,
    ranks_of_engine,
    seed_of_engine,
)
from verl_server.engine.push import Push, WeightPusher
from verl_server.engine.rank_group import RANK_TIMEOUT, RankGroup
from verl_server.engine.weights import push_request
from verl_server.errors import BadRequestError, ServerUnavailableError
from verl_server.lora import NoAdapters
from verl_server.messages.results import GenerateResult
from verl_server.messages.weight_requests import UpdateMode
from verl_server.server_args import ServerArgs
from verl_server.weight_sync.handles import LocalSerializedTensor
from verl_server.weight_sync.trainer.sender import Mapping, Origin
from verl_server.weight_sync.trainer.shards import TensorShard
from verl_server.weight_version import AnyVersion

P = ParamSpec("P")
T = TypeVar("T")


def _on_all_ranks(method: Callable[Concatenate[EngineBase, P], T]) -> Callable[Concatenate[VerlEngine, P], T]:
    """Return `method` for `VerlEngine`: rank 0's engine runs it, and every rank gets the result or raises the error."""
    is_tuple = method.__annotations__["return"].startswith("tuple")  # which travels between the ranks as a list

    @functools.wraps(method)
    def call(self: VerlEngine, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: Any = self._on_engine(method.__name__, methodcaller(method.__name__, *args, **kwargs))
        return cast(T, tuple(result) if is_tuple else result)

    return call


class VerlEngine(NoAdapters):
    """One policy for all ranks of a trainer. All ranks call the same methods in the same order.

    If ranks pass different arguments, rank 0's arguments are used. Only tensors and registered weights are each rank's
    own.
    """

    def __init__(
        self,
        device_mesh_cpu: DeviceMesh,
        nnodes: int = 1,
        launch_server: bool = False,
        read_all_ranks: bool = False,
        server_args: ServerArgs | None = None,
        server_url: str | None = None,
        rank_timeout: float = RANK_TIMEOUT,
        **kwargs: Any,
    ) -> None:
        """Start the engine. All ranks return when it is ready, or all ranks raise an error.

        `device_mesh_cpu` is 1-D, or has a dimension named "tp". With "tp", each slice along this dimension is an engine
        of its own, which reads the memory of its own ranks.

        With `read_all_ranks`, each engine reads the memory of all ranks of the mesh. This is for parameters that are
        sharded over several engines' ranks (FSDP over all ranks, all on one host). All ranks of the mesh then call the
        methods that push, register, unregister or release weights together.

        Settings are `server_args`, keyword arguments, or both. Defaults that differ from `ServerArgs`: `tp_size` is the
        number of ranks, a server's port is a free port, and the GPUs are the GPUs of the ranks (if `tp_size` is larger
        than the number of ranks: the GPUs from `base_gpu_id` on). If `random_seed` is set, the first engine of a mesh
        uses it and every other engine uses a seed that is derived from it.

        With `server_url`, no server is launched. Rank 0 attaches to the server at this URL, which runs on the host of
        the ranks, with `api_key` and `admin_api_key`. Other settings belong to the server and raise BadRequestError
        here. The URL may be a router's: pushes then reach each of its servers directly (`RoutedCalls`).

        `rank_timeout` is the number of seconds that a rank waits, in any call, for a rank that has not made the call
        yet.
        """
        settings = given_settings(server_args) | kwargs
        if server_url is not None and (launch_server or nnodes > 1 or set(settings) - {"api_key", "admin_api_key"}):
            raise BadRequestError(
                f"server_url={server_url!r} attaches to a running server: it cannot be combined with launch_server, "
                "nnodes and server settings other than api_key and admin_api_key (the settings given are "
                f"{sorted(settings)})."
            )
        ranks = ranks_of_engine(device_mesh_cpu)
        self._group = RankGroup(ranks, rank_timeout, settings.get("sync_timeout", 60.0))
        self._joint = join_ranks(device_mesh_cpu, self._group, rank_timeout) if read_all_ranks else None
        self._pusher = WeightPusher(self._joint or self._group)
        settings.setdefault("tp_size", self._group.size)
        if settings.get("random_seed") is not None:
            settings["random_seed"] = seed_of_engine(settings["random_seed"], ranks[0])
        self._engine: EngineBase | None = None
        self._launch_server = launch_server
        self._server_url = server_url
        self.url: str | None = None
        """Base URL of the server, on every rank. None without `launch_server` and `server_url`."""
        self.admin_api_key: str | None = None
        """Key of the server's control routes, on every rank. A launched server gets a random key unless one is set."""
        self._start(settings, nnodes)

    @property
    def engine(self) -> EngineBase | None:
        """The engine that this rank owns.

        Rank 0 owns the engine that serves. The first rank of another node owns an `Engine` with that node's scheduler
        ranks. For all other ranks it is None.
        """
        return self._engine

    @property
    def _serving(self) -> EngineBase:
        if self._engine is None:
            raise ServerUnavailableError("This VerlEngine has been shut down.")
        return self._engine

    # -- start -------------------------------------------------------------------------------------------------

    def _start(self, settings: dict[str, Any], nnodes: int) -> None:
        group = self._group
        place_engine(group, settings, nnodes)
        try:
            group.gather("VerlEngine", lambda: self._launch(settings))
            self.url, self.admin_api_key = group.call("VerlEngine", lambda _: self._address())
        except BaseException:
            self.shutdown()
            raise

    def _launch(self, settings: dict[str, Any]) -> bytes:
        if self._group.rank % (self._group.size // settings["nnodes"]) == 0:  # the first rank of its node
            self._engine = launch_engine(settings, self._launch_server, self._server_url)
        return b""

    def _address(self) -> tuple[str | None, str | None]:
        """Return (URL, admin key) of the server that this rank launched or attached to."""
        has_url = self._launch_server or self._server_url is not None
        return (self._serving.url, self._serving.admin_api_key) if has_url else (None, None)

    # -- generation --------------------------------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: str | None = None,
        sampling_params: dict[str, Any] | None = None,
        input_ids: list[int] | None = None,
        *,
        stream: Literal[False] = False,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateResult: ...

    @overload
    def generate(
        self,
        prompt: list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[list[int]] | None = None,
        *,
        stream: Literal[False] = False,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[GenerateResult]: ...

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateResult | list[GenerateResult]:
        """Return the result of `EngineBase.generate` on every rank. `stream` is not supported."""
        if stream:
            raise BadRequestError(
                "VerlEngine.generate cannot stream. Call generate(stream=True) of rank 0's `engine`, or send requests "
                "to `url`."
            )

        def generate(engine: EngineBase) -> Any:
            call: Callable[..., Any] = engine.generate  # no single overload accepts every type of prompt
            return call(prompt, sampling_params, input_ids, timeout=timeout, **options)

        result: GenerateResult | list[GenerateResult] = self._on_engine("generate", generate)
        return result

    flush_cache = _on_all_ranks(EngineBase.flush_cache)
    abort_request = _on_all_ranks(EngineBase.abort_request)
    close_session = _on_all_ranks(EngineBase.close_session)
    pause_generation = _on_all_ranks(EngineBase.pause_generation)
    continue_generation = _on_all_ranks(EngineBase.continue_generation)

    # -- weights and memory ------------------------------------------------------------------------------------

    def update_weights_from_tensor(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor | TensorShard | LocalSerializedTensor]],
        load_format: str | None = None,
        flush_cache: bool = True,
        mapping: Mapping | None = None,
        *,
        weight_version: AnyVersion | None = None,
        **options: Unpack[PushOptions],
    ) -> tuple[bool, str]:
        """Copy the tensors of all ranks into the served weights, in one update. Return (True, message).

        Each server rank reads a whole tensor from one trainer rank. It reads a `DTensor` or `TensorShard` shard by
        shard, from the ranks that own the shards. If several ranks pass the same name, they must pass the same tensor.
        When the call returns on any rank, the server has finished reading the tensors of all ranks. See
        `EngineWeights.update_weights_from_tensor`.
        """

        def send(push: Push) -> tuple[bool, str]:
            req = push_request(load_format, flush_cache, weight_version, options)
            return self._serving.send_update(push.for_readers(self._serving.server_args.tp_size), req)

        return _outcome(self._pusher.update(named_tensors, mapping, send))

    def register_weights(self, weights: Origin, mapping: Mapping | None = None, *, strict_dtype: bool = False) -> None:
        """Make the server open the memory of all ranks and plan the copies; see `EngineWeights.register_weights`."""
        self._pusher.register(weights, mapping, lambda push: self._serving.send_registration(push, strict_dtype))

    def push_weights(
        self,
        version: AnyVersion | None = None,
        *,
        flush_cache: bool = True,
        **options: Unpack[PushOptions],
    ) -> tuple[bool, str]:
        """Copy the current values of all ranks' registered weights; see `EngineWeights.push_weights`."""

        def send(push: Push) -> tuple[bool, str]:
            return self._serving.send_update(push, push_request(None, flush_cache, version, options))

        return _outcome(self._pusher.push(send))

    def unregister_weights(self) -> None:
        """Make the server close the memory of all ranks. Afterwards this memory may be freed or offloaded."""
        self._pusher.unregister(lambda ids: self._serving.send_unregistration(ids))

    def heal(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor | TensorShard]] | None = None,
        mapping: Mapping | None = None,
        *,
        version: AnyVersion | None = None,
        partial: bool = False,
        mode: UpdateMode = "wait",
        timeout: float | None = None,
    ) -> tuple[bool, str]:
        """Push the weights to a server that was started again; see `HttpServerEngineAdapter.heal`.

        All ranks of the engine call it (with `read_all_ranks`, all ranks of the mesh), each with its own tensors.
        """
        options = PushOptions(partial=partial, mode=mode)

        def send(push: Push) -> tuple[bool, str]:
            engine = _restartable(self._serving)
            return engine.send_healing(push.for_readers(engine.server_args.tp_size), version, options, timeout)

        if named_tensors is not None:
            return _outcome(self._pusher.update(named_tensors, mapping, send))
        if self._pusher.has_source:
            return _outcome(self._pusher.push(send))
        return _outcome(self._on_engine("heal", lambda engine: _restartable(engine).heal_from_disk(version, timeout)))

    def accept_restart(self) -> None:
        """Accept a server that was started again; see `HttpServerEngineAdapter.accept_restart`."""
        self._on_engine("accept_restart", lambda engine: _restartable(engine).accept_restart())

    begin_weight_update = _on_all_ranks(EngineBase.begin_weight_update)
    end_weight_update = _on_all_ranks(EngineBase.end_weight_update)
    init_weights_update_group = _on_all_ranks(EngineBase.init_weights_update_group)
    destroy_weights_update_group = _on_all_ranks(EngineBase.destroy_weights_update_group)
    update_weights_from_distributed = _on_all_ranks(EngineBase.update_weights_from_distributed)
    update_weights_from_disk = _on_all_ranks(EngineBase.update_weights_from_disk)
    update_weight_version = _on_all_ranks(EngineBase.update_weight_version)
    get_weights_by_name = _on_all_ranks(EngineBase.get_weights_by_name)
    weights_checker = _on_all_ranks(EngineBase.weights_checker)

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Release memory of the server; see `EngineWeights.release_memory_occupation`."""
        self._on_engine("release_memory_occupation", methodcaller("release_memory_occupation", tags))
        if self._joint is not None:  # until the other engines have released too, they may have this rank's memory open
            self._joint.gather("release_memory_occupation", bytes)
        self._pusher.released(tags)

    def memory_released(self, tags: list[str] | None = None) -> None:
        """Record that another process made the server release memory.

        This rank then drops its references to pushed memory.

        Every rank calls this method, after all engines that read this rank's memory have released their memory, and
        before the next push. `tags` are those of `release_memory_occupation`. The call sends no request.
        """
        self._pusher.released(tags)

    resume_memory_occupation = _on_all_ranks(EngineBase.resume_memory_occupation)
    get_server_info = _on_all_ranks(EngineBase.get_server_info)

    # -- end ---------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Shut down the engine that this rank owns. Later calls do nothing.

        It does not wait for other ranks, so it is safe after an error.
        """
        self._pusher.end()
        if self._joint is not None:
            self._joint.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    def __enter__(self) -> VerlEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # -- inside ------------------------------------------------------------------------------------------------

    def _on_engine(self, call: str, act: Callable[[EngineBase], T]) -> T:
        """Run `act` on rank 0's engine. Every rank of this engine gets the same JSON-like result or error."""
        result: T = self._group.call(call, lambda _: act(self._serving))
        return result


def _restartable(engine: EngineBase) -> HttpServerEngineAdapter:
    if not isinstance(engine, HttpServerEngineAdapter):
        raise BadRequestError(
            "This engine has no server that could be started again: it runs in the trainer's processes. Construct "
            "VerlEngine with launch_server=True or server_url for heal() and accept_restart()."
        )
    return engine


def _outcome(result: Sequence[Any]) -> tuple[bool, str]:
    """Return (success, message) as a tuple. Between ranks it is sent as a list."""
    return result[0], result[1]
