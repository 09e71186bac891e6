"""`check_memory` refuses an engine that does not fit its GPU, and `log_capacity` warns of a small KV cache.

`ModelRunner` calls `check_memory` before weights are allocated and read, which takes minutes for a large model, and
`log_capacity` after the KV pool was allocated. All sums are those of the `MemoryAccount`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from verl_server.errors import BadRequestError
from verl_server.server_args import ServerArgs
from verl_server.worker.kv_cache import KVCache
from verl_server.worker.memory_account import MemoryAccount, Needs, gib

logger = logging.getLogger(__name__)

_LEAST_PAGES = 2
"""Pages of the smallest pool: one for tokens, one for padding."""
_USEFUL_TOKENS = 4096
"""Tokens of KV cache that an engine with advised settings has, or one context if that is shorter."""


def check_memory(
    args: ServerArgs,
    account: MemoryAccount,
    page_bytes: int,
    context_length: int,
    needs_with: Callable[[ServerArgs], Needs],
    device: torch.device,
) -> None:
    """Raise BadRequestError if the free memory cannot hold the weights, all other parts and the smallest KV pool.

    The message has what is needed, what is there, who holds the rest, and settings with which the engine starts.
    `page_bytes` are the bytes of one KV page, and `needs_with` returns the `Needs` of other settings.
    """
    least = _LEAST_PAGES * page_bytes
    useful = (math.ceil(min(context_length, _USEFUL_TOKENS) / args.page_size) + 1) * page_bytes
    free, needs, fraction = account.free_at_start, account.needs, args.mem_fraction_static
    if (needed := account.needed(needs) + least) > free:
        raise _refusal(
            f"The model does not fit this GPU ({device}): {gib(needed)} are needed ({_parts(account, least)}), and "
            f"{gib(free)} were free at the start.",
            account.holders(),
            _smaller(args, account, useful, needs_with),
        )
    static = round(free * fraction)
    if needs.weights + least > static:
        raise _refusal(
            f"mem_fraction_static={fraction:g} is too small: weights and KV cache may take {gib(static)} of the "
            f"{gib(free)} that were free at the start, and the weights alone take {gib(needs.weights)}.",
            account.holders(),
            f"Raise mem_fraction_static to {_fraction(needs.weights + useful, free):g} or more.",
        )


def _refusal(*sentences: str) -> BadRequestError:
    return BadRequestError(" ".join(filter(None, sentences)))


def _parts(account: MemoryAccount, kv_cache: int) -> str:
    """Return the parts of the sum as text, the largest ones by name."""
    needs = account.needs
    named = {"weights": needs.weights, "the largest step": needs.step, "CUDA graphs": needs.graphs}
    other = account.needed(needs) + kv_cache - sum(named.values())
    return ", ".join(f"{name} {gib(count)}" for name, count in (named | {"other parts": other}).items())


def _smaller(args: ServerArgs, account: MemoryAccount, kv_cache: int, needs_with: Callable[[ServerArgs], Needs]) -> str:
    """Return sentences about settings with which the engine fits with `kv_cache` bytes of KV pool."""
    free = account.free_at_start
    for changes in _candidates(args):
        needs = needs_with(args.replace(**changes))
        needed = account.needed(needs) + kv_cache
        if needed <= free:
            if needs.weights + kv_cache > round(free * args.mem_fraction_static):
                changes["mem_fraction_static"] = _fraction(needs.weights + kv_cache, free)
            advice = "Or use a smaller model or a larger tp_size, or free memory."
            return f"It fits with {_text(changes)} ({gib(needed)}). {advice}"
    smallest = f"With the smallest settings ({_text(changes)}) and" if changes else "With"
    return (
        f"{smallest} a small KV cache {gib(needed)} are needed. Use a smaller model or a larger tp_size, or free "
        "memory of this GPU."
    )


def _text(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _candidates(args: ServerArgs) -> list[dict[str, Any]]:
    """Return changes of settings that need less memory, those that cost the least speed first."""
    chunk, rows = args.prefill_chunk("cuda"), args.max_running_requests
    found: list[dict[str, Any]] = []
    for most_chunk, most_rows, graphs in ((2048, rows, True), (2048, 64, True), (512, 16, True), (512, 16, False)):
        changes: dict[str, Any] = {}
        if chunk > most_chunk:
            changes["chunked_prefill_size"] = most_chunk
        if rows > most_rows:
            changes["max_running_requests"] = most_rows
        if not graphs and not args.disable_cuda_graph:
            changes["disable_cuda_graph"] = True
        found.append(changes)
    return found


def _fraction(nbytes: int, free: int) -> float:
    """Return the smallest share of `free` with two decimals that holds `nbytes`, at most 1."""
    return min(1.0, math.ceil(100 * nbytes / free) / 100)


def log_capacity(args: ServerArgs, kv: KVCache, context_length: int, remedy: str) -> None:
    """Log how many tokens the KV pool holds, as a warning if requests that the settings permit do not fit.

    `remedy` is a sentence that says how the pool's memory is raised.
    """
    tokens = kv.num_pages * kv.page_size
    if args.max_total_tokens is not None and kv.num_pages == args.max_total_tokens // kv.page_size:
        remedy = "Raise max_total_tokens."
    if tokens < context_length:
        logger.warning(
            "The KV cache holds %d tokens. So a request may have at most %d tokens, prompt and output together, not "
            "context_length=%d. %s",
            *(tokens, tokens, context_length, remedy),
        )
    else:
        logger.info("The KV cache holds %d tokens: %.1f requests of context_length.", tokens, tokens / context_length)
    if kv.num_pages < kv.max_rows:
        logger.warning(
            "The KV cache has %d pages of %d tokens, so at most %d requests run at once, not "
            "max_running_requests=%d. %s",
            *(kv.num_pages, kv.page_size, kv.num_pages, kv.max_rows, remedy),
        )
