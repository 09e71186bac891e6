"""UUIDs and memory of this node's GPUs, as nvidia-smi reports them.

`replica` asks for the UUIDs in the replica's workers, and `server_actor` for the memory before it starts the server.
nvidia-smi is used because it creates no CUDA context. A context would take hundreds of MB of the GPU in each of these
processes as long as they run.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterable

from verl_server.errors import BadRequestError

logger = logging.getLogger(__name__)

_TIMEOUT = 120.0
"""Most seconds for nvidia-smi, which initializes the driver if no other process uses the GPUs."""


def uuid_of(gpu_id: str) -> str:
    """Return the UUID of a GPU. `gpu_id` is Ray's id of the GPU: a UUID, or an index in the order of the PCI bus.

    Raise BadRequestError for a part of a GPU (MIG).
    """
    uuid, mig_mode = ("", "Enabled") if gpu_id.startswith("MIG-") else _query(gpu_id, "uuid,mig.mode.current")
    if mig_mode == "Enabled":
        raise BadRequestError(
            f"GPU {gpu_id} is in MIG mode, which rollout.name=verl_server does not support: processes cannot open each "
            "other's memory there. Use whole GPUs (nvidia-smi -mig 0)."
        )
    return uuid


def share_of_free_memory(gpu_uuids: Iterable[str], utilization: float) -> float:
    """Return the share of the free memory that equals the share `utilization` of the whole memory.

    The shares of several GPUs differ; the smallest is returned. If less than `utilization` of a GPU is free, a warning
    is logged, and the share for this GPU is 1.
    """
    shares = []
    for gpu_uuid in gpu_uuids:
        total, free = (int(mib) for mib in _query(gpu_uuid, "memory.total,memory.free"))
        if utilization * total > free:
            logger.warning(
                "rollout.gpu_memory_utilization=%g is %d MiB of GPU %s, but only %d MiB are free when the server "
                "starts. The server uses these.",
                utilization,
                utilization * total,
                gpu_uuid,
                free,
            )
        shares.append(min(1.0, utilization * total / max(free, 1)))
    return min(shares)


def _query(gpu_id: str, fields: str) -> list[str]:
    """Return the values of `fields` (comma-separated names) for one GPU. Memory is in MiB."""
    command = ["nvidia-smi", f"--id={gpu_id}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
    except subprocess.CalledProcessError as error:
        raise BadRequestError(f"{' '.join(command)} failed: {error.stdout}{error.stderr}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadRequestError(f"{' '.join(command)} failed, which finds the GPUs of the rollout: {error}") from None
    return [value.strip() for value in done.stdout.split(",")]
