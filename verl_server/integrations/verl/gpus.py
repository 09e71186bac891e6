"""UUIDs of this node's GPUs, as nvidia-smi reports them.

`replica` asks for them in the replica's workers. nvidia-smi is used because it creates no CUDA context: that would take
hundreds of MB of the GPU in each worker as long as the worker runs.
"""

from __future__ import annotations

import subprocess

from verl_server.errors import BadRequestError

_TIMEOUT = 120.0
"""Most seconds for nvidia-smi, which initializes the driver if no other process uses the GPUs."""


def uuid_of(gpu_id: str) -> str:
    """Return the UUID of a GPU. `gpu_id`: Ray's id of the GPU, which is a UUID or an index in the order of the PCI bus.

    Raises BadRequestError for a part of a GPU (MIG).
    """
    uuid, mig_mode = ("", "Enabled") if gpu_id.startswith("MIG-") else _query(gpu_id, "uuid,mig.mode.current")
    if mig_mode == "Enabled":
        raise BadRequestError(
            f"GPU {gpu_id} is in MIG mode, which rollout.name=verl_server does not support: processes cannot open each "
            "other's memory there. Use whole GPUs (nvidia-smi -mig 0)."
        )
    return uuid


def _query(gpu_id: str, fields: str) -> list[str]:
    """Return the values of `fields` (comma-separated names) for one GPU."""
    command = ["nvidia-smi", f"--id={gpu_id}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
    except subprocess.CalledProcessError as error:
        raise BadRequestError(f"{' '.join(command)} failed: {error.stdout}{error.stderr}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadRequestError(f"{' '.join(command)} failed, which finds the GPUs of the rollout: {error}") from None
    return [value.strip() for value in done.stdout.split(",")]
