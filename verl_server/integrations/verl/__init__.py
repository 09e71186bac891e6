"""verl's extension: `rollout.name=verl_server` after `VERL_USE_EXTERNAL_MODULES=verl_server.integrations.verl`.

verl imports this module in every process of a job, before its own submodules. The module checks the version of verl and
registers names. The classes behind most names are imported by the processes that need them; verl's registry of
checkpoint engines, and that of training engines, take classes.
"""

from __future__ import annotations

import os
from typing import Any

from verl_server.integrations.verl.versions import check_version

check_version()

from verl.workers.rollout.base import _ROLLOUT_REGISTRY  # noqa: E402
from verl.workers.rollout.replica import RolloutReplicaRegistry  # noqa: E402

ROLLOUT_NAME = "verl_server"
"""Value of `actor_rollout_ref.rollout.name` that selects this server."""


def _replica_class() -> type[Any]:
    from verl_server.integrations.verl.replica import VerlServerReplica

    return VerlServerReplica


RolloutReplicaRegistry.register(ROLLOUT_NAME, _replica_class)
_ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = "verl_server.integrations.verl.adapter.ServerAdapter"

import verl_server.integrations.verl.checkpoint_engine  # noqa: E402  # registers itself

if os.environ.get("VERL_ENGINE_VENDOR") == "verl_server":
    # Registers itself as verl's engine of this vendor. The import takes a second, so only jobs that use it pay it.
    import verl_server.integrations.verl.fsdp_engine  # noqa: F401
