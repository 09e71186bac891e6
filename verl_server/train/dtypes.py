"""The check that the server, which samples, and the trainer's passes compute in the same dtype.

`run.py` checks the options before it starts anything, and the server when it is up.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from verl_server.errors import BadRequestError
from verl_server.train.options import TrainArgs, WrongOptionsError
from verl_server.train.ranks import device_type

logger = logging.getLogger(__name__)

_NAMES = {
    "float": "float32",
    "fp32": "float32",
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
}


def passes_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of `--compute-dtype`. "auto" is bfloat16 on CUDA and float32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def served_dtype(server_info: Mapping[str, Any]) -> str | None:
    """Return torch's name of the dtype that a server reports in its `/server_info`, or None if it reports none.

    verl-server reports it in `scheduler_info`. SGLang reports its setting, which may be "auto".
    """
    places = (server_info.get("scheduler_info"), server_info, server_info.get("model_config"))
    for place in places:
        if isinstance(place, Mapping) and isinstance(name := place.get("dtype"), str):
            name = name.removeprefix("torch.")
            name = _NAMES.get(name, name)
            if name in ("float32", "float16", "bfloat16"):
                return name
    return None


def check_dtype_options(args: TrainArgs) -> torch.dtype:
    """Return the dtype of the passes. Raise WrongOptionsError if the options set another one for the launched server.

    Rank 0 logs a difference that is allowed when the server is up.
    """
    dtype = passes_dtype(args.compute_dtype, torch.device(device_type(args.device)))
    given = args.server_settings.get("dtype")
    if given is not None and not args.allow_dtype_mismatch:
        try:
            check_dtypes(dtype, given, "The server to launch (--server.dtype)", allow=False)
        except BadRequestError as error:
            raise WrongOptionsError(str(error)) from None
    return dtype


def check_dtypes(trainer: torch.dtype, server: str | None, where: str, allow: bool) -> None:
    """Raise BadRequestError if the server computes in another dtype than the trainer, unless `allow` is set.

    `where` names the server in messages. An unknown dtype (None) is logged as not checked.
    """
    passes = dtype_name(trainer)
    if server is None:
        logger.warning("%s does not report its dtype, so it is not checked. The trainer computes in %s.", where, passes)
        return
    if server == passes:
        return
    text = (
        f"{where} computes in {server}, and the trainer's passes in {passes}. A policy would be trained that nobody "
        "samples from: updates that are smaller than a rounding step of one dtype are seen by the other one."
    )
    if allow:
        logger.warning("%s It is allowed by --allow-dtype-mismatch.", text)
        return
    raise BadRequestError(
        f"{text} Use one dtype: set --server.dtype {passes} (or start the server with --dtype {passes}), or "
        f"--compute-dtype {server}. --allow-dtype-mismatch trains nevertheless."
    )
