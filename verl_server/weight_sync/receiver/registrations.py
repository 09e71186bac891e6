"""Registrations: plans that later pushes use by id. Each rank's `WeightReceiver` has one `Registrations`.

The registrations are a cache. A plan may be removed at any time: because weights were released, because newer plans
took its place, or because its owner died. If a push uses an id that is not registered, the reply is "unknown", and the
sender describes the memory again.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable

import torch

from verl_server.errors import WeightUpdateError
from verl_server.weight_sync.receiver.plan import UpdatePlan


class Registrations:
    """The most recently used `UpdatePlan`s by id. Thread-safe."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._capacity, self._device = capacity, device
        self._plans: OrderedDict[str, UpdatePlan] = OrderedDict()
        self._watched: dict[int, threading.Thread] = {}
        """One thread for each owner process, until that process exits."""
        self._lock = threading.Lock()

    @property
    def ids(self) -> list[str]:
        with self._lock:
            return list(self._plans)

    def get(self, id: str) -> UpdatePlan | None:
        with self._lock:
            plan = self._plans.get(id)
            if plan is not None:
                self._plans.move_to_end(id)
            return plan

    def put(self, id: str, plan: UpdatePlan) -> None:
        """Keep `plan`, and drop an earlier plan of the same id.

        Raise WeightUpdateError if an owner cannot be watched.
        """
        owners = plan.owners
        for pid in owners:
            self._watch(pid)
        dropped: list[UpdatePlan] = []  # freed when this returns, without the lock: closing CUDA memory takes time
        with self._lock:
            for pid in owners:
                if pid not in self._watched:
                    raise _gone(pid)
            if id in self._plans:
                dropped.append(self._drop(id))
            self._plans[id] = plan
            plan.keep()
            while len(self._plans) > self._capacity:
                dropped.append(self._drop(next(iter(self._plans))))

    def forget(self, ids: list[str] | None) -> None:
        """Drop some registrations, or all.

        Their memory is closed when this returns, even if a caller still has a plan.
        """
        with self._lock:
            dropped = [self._plans.pop(id, None) for id in (list(self._plans) if ids is None else ids)]
        for plan in dropped:
            if plan is not None:
                plan.close()

    def _drop(self, id: str) -> UpdatePlan:
        """Remove a plan without closing it. A push in progress uses the plan to the end, and then closes it."""
        plan = self._plans.pop(id)
        plan.is_registered = False
        return plan

    def _watch(self, pid: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, ValueError, OverflowError):
            raise _gone(pid) from None
        with self._lock:
            if pid in self._watched:
                os.close(pidfd)
                return
            # A weak reference: a thread that waits for a trainer to end must not keep a closed server's plans.
            watch = threading.Thread(
                target=_wait_for_end,
                args=(pid, pidfd, weakref.WeakMethod(self._owner_ended)),
                name=f"weights-of-{pid}",
                daemon=True,
            )
            self._watched[pid] = watch
        watch.start()

    def _owner_ended(self, pid: int) -> None:
        """Remove the plans that read the memory of a process which ended.

        Otherwise the memory would stay mapped until the next update.

        The plans are not closed: a plan that the loop is about to commit still writes exactly the new weights.
        """
        with self._lock:
            del self._watched[pid]
            dropped = [self._drop(id) for id, plan in list(self._plans.items()) if pid in plan.owners]
        if self._device.type == "cuda" and dropped:
            torch.cuda.set_device(self._device)  # closing waits for a stream, in a thread that has no device yet
        dropped.clear()


def _wait_for_end(pid: int, pidfd: int, ended: weakref.WeakMethod[Callable[[int], None]]) -> None:
    exited = select.poll()
    exited.register(pidfd, select.POLLIN)
    exited.poll()
    os.close(pidfd)
    call = ended()
    if call is not None:
        call(pid)


def _gone(pid: int) -> WeightUpdateError:
    return WeightUpdateError(
        f"Process {pid}, whose memory should stay registered, cannot be watched. Is it alive, and in the same PID "
        "namespace (container) as the server?"
    )
