"""The servers of a training run: those that its command line names, those of a router, or one that it launches.

`run.train` calls the functions in their order, on all ranks. `servers.RolloutServers` then pushes to the engines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import torch

from verl_server.engine.rank_group import RankGroup
from verl_server.engine.router_client import RouterClient
from verl_server.engine.verl_engine import VerlEngine
from verl_server.errors import BadRequestError
from verl_server.rollout.server_check import check_server, routed_servers
from verl_server.train.dtypes import check_dtypes, dtype_name, served_dtype
from verl_server.train.options import TrainArgs
from verl_server.train.ranks import attach_engine, launch_engine

Args = TypeVar("Args", bound=TrainArgs)


def with_routed_servers(args: Args, ranks: RankGroup) -> Args:
    """Return the options with the servers of `--router` as `server_urls`. Without a router, return them as they are."""
    if (router := args.router) is None:
        return args
    urls = ranks.call("routed_servers", lambda _: list(routed_servers(router, args.server_urls)))
    return dataclasses.replace(args, server_urls=tuple(urls))


def check_servers(args: TrainArgs) -> None:
    """Raise BadRequestError, with the option, if a running server of the run does not answer."""
    option = "--server" if args.router is None else f"--router {args.router}, server"
    for url in args.server_urls:
        try:
            check_server(url, *_keys_of_servers(args), option=option)
        except BadRequestError as error:
            if args.router is None:
                raise
            retire = f"""curl {args.router}/fleet/retire -H 'content-type: application/json' -d '{{"url": "{url}"}}'"""
            raise BadRequestError(f"{error} Or take the server out of the router: {retire}") from error


def router_of(args: TrainArgs, stack: contextlib.ExitStack) -> RouterClient | None:
    """Return a client of the run's router, which ends with `stack`."""
    if args.router is None:
        return None
    key = args.server.admin_api_key or args.server.api_key
    return stack.enter_context(contextlib.closing(RouterClient.at(args.router, key)))


@contextlib.contextmanager
def serving(
    args: TrainArgs, device: torch.device, dtype: torch.dtype, ranks: RankGroup
) -> Iterator[tuple[list[VerlEngine], list[str], list[str | None]]]:
    """Launch a rollout server, or attach to those that run. Yield (engines, URLs for episodes, API key for each URL).

    The servers compute in `dtype`, that of the trainer's passes. A server that is launched for an agent has an API key,
    because its routes would else be open to the agent, and it stores the agent's sessions, which a server that is
    launched again in this start of the run continues.
    """
    settings = args.server_settings
    with contextlib.ExitStack() as stack:
        if args.attaches:
            keys, urls = _keys_of_servers(args), args.server_urls
            engines = [stack.enter_context(attach_engine(url, *keys, rank_timeout=args.rank_timeout)) for url in urls]
        else:
            if args.is_played_by_agent:
                settings.setdefault("api_key", ranks.call("api_key", lambda _: secrets.token_urlsafe(32)))
                if "session_store" not in settings:
                    settings["session_store"] = ranks.call("sessions", lambda _: _empty_store(args.out))
            settings.setdefault("dtype", dtype_name(dtype))
            launched = launch_engine(args.model_path, device, rank_timeout=args.rank_timeout, **settings)
            engines = [stack.enter_context(launched)]
        for engine in engines:
            where = f"The server at {engine.url}"
            check_dtypes(dtype, served_dtype(engine.get_server_info()), where, args.allow_dtype_mismatch)
        places = [str(engine.url) for engine in engines] if args.router is None else [args.router]
        key, is_agent = settings.get("api_key"), args.is_played_by_agent
        yield engines, places, [key or (e.admin_api_key if is_agent else None) for e in engines[: len(places)]]


def _keys_of_servers(args: TrainArgs) -> tuple[str | None, str | None]:
    """Return (API key, admin key) for running servers. Behind a router, the API key may be the router's own."""
    api_key, admin_key = args.server.api_key, args.server.admin_api_key
    return (None if args.router is not None and admin_key is not None else api_key), admin_key


def _empty_store(out: Path) -> str:
    """Return the folder of a launched server's sessions, without those that a killed start left: they play again."""
    store = out / "sessions"
    shutil.rmtree(store, ignore_errors=True)
    return str(store)
