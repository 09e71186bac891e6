"""`WeightInspector`: reads the weights for `get_weights_by_name` and `weights_checker`.

`WeightUpdater` calls it on every rank. Only `reset` changes weights, and the caller of `reset` marks the weights as
torn.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from typing import Any

import msgspec
import torch

from verl_server.errors import BadRequestError
from verl_server.ipc.tp_group import TpGroup
from verl_server.messages.weight_requests import GetWeightsByNameReq, WeightsCheckerReq
from verl_server.models.loader import WeightMap
from verl_server.weight_sync.checksum import tensor_checksums


class _Rows(msgspec.Struct, array_like=True):
    """One rank's part of the requested rows."""

    ranges: list[tuple[int, int]]
    """(start, stop) in each dimension of the full tensor."""
    data: bytes
    """Values as float32, row-major."""


class WeightInspector:
    def __init__(self, weight_map: WeightMap, tp: TpGroup) -> None:
        self._map, self._tp = weight_map, tp
        self._snapshot: dict[str, str] | None = None

    def rows(self, req: GetWeightsByNameReq) -> list[Any]:
        """Return the first `truncate_size` rows of a full tensor as nested lists, combined from all ranks."""
        slot = self._map.slots.get(self._map.canonical(req.name))
        if slot is None:
            raise BadRequestError(f"Get parameter by name failed: the model has no parameter '{req.name}'.")
        self._need_pieces([slot.name], "Ask the trainer for it")
        if req.truncate_size < 1:
            raise BadRequestError(f"truncate_size must be at least 1, not {req.truncate_size}.")
        rows = min(req.truncate_size, slot.shape[0])
        mine = []
        for destination, index in slot.pieces:
            ranges = [part.indices(n)[:2] for part, n in zip(index, slot.shape, strict=True)]
            first, last = ranges[0]
            if first < rows:
                # Copied, because `.numpy()` would make the parameter's own storage non-resizable.
                part = destination[: min(last, rows) - first].detach().to("cpu", torch.float32, copy=True).contiguous()
                mine.append(_Rows([(first, min(last, rows)), *ranges[1:]], part.numpy().tobytes()))
        full = torch.zeros(rows, *slot.shape[1:])
        for encoded in self._tp.gather(msgspec.msgpack.encode(mine)):
            for piece in msgspec.msgpack.decode(encoded, type=list[_Rows]):
                window = full[tuple(slice(a, b) for a, b in piece.ranges)]
                window.copy_(torch.frombuffer(bytearray(piece.data), dtype=torch.float32).view(window.shape))
        values: list[Any] = full.tolist()
        return values

    def check(self, req: WeightsCheckerReq) -> tuple[str, dict[str, Any] | None]:
        """Carry out a read-only action of `/weights_checker`. Return (message, payload) of the reply."""
        if req.allow_quant_error or req.selector not in ("all", "target"):
            raise BadRequestError(
                "Weights are not quantized and there is no draft model: leave allow_quant_error and selector unset."
            )
        skip = req.skip_tensor_list or []
        names = [name for name in self._map.slots if not any(part in name for part in skip)]
        self._need_pieces(names, "Leave them out by skip_tensor_list")
        sums = self._checksums(names)
        if req.action == "checksum":
            return "Success", self._payload(sums)
        if req.action == "snapshot":
            self._snapshot = sums
            return f"Stored the checksums of {len(sums)} parameters.", None
        if req.action == "compare":
            return self._compare(sums), None
        raise BadRequestError(f"Unsupported action={req.action!r}. Use checksum, snapshot, compare or reset_tensors.")

    def reset(self) -> None:
        """Overwrite all weights with random noise."""
        self._need_pieces(self._map.slots, "Push noise instead")
        with torch.no_grad():
            for slot in self._map.slots.values():
                for destination, _ in slot.pieces:
                    destination.normal_()

    def _need_pieces(self, names: Iterable[str], remedy: str) -> None:
        """Raise BadRequestError if the engine stores some of `names` in another layout than the checkpoint."""
        if own := self._map.loaded(names):
            shown = ", ".join(own[:3]) + (", ..." if len(own) > 3 else "")
            raise BadRequestError(
                f"This engine keeps {len(own)} of the parameters in a layout of its own, so they cannot be read or "
                f"reset here ({shown}). {remedy}."
            )

    def _checksums(self, names: list[str]) -> dict[str, str]:
        """Return the checksum of each parameter. For a parameter in several pieces, concatenate their checksums."""
        pieces = {name: [destination for destination, _ in self._map.slots[name].pieces] for name in names}
        found = iter(tensor_checksums(piece for held in pieces.values() for piece in held))
        return {name: "".join(itertools.islice(found, len(held))) for name, held in pieces.items()}

    def _payload(self, sums: dict[str, str]) -> dict[str, Any]:
        """Return the checksums of all ranks in the format of SGLang's reply."""
        ranks: list[dict[str, Any]] = []
        for rank, encoded in enumerate(self._tp.gather(msgspec.msgpack.encode(sums))):
            checksums = msgspec.msgpack.decode(encoded, type=dict[str, str])
            parallel = {"role": "target", "tp_rank": rank, "tp_size": self._tp.size, "rank": rank}
            parallel |= {"dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1, "size": self._tp.size}
            digest = hashlib.sha256("".join(f"{n}{c}" for n, c in checksums.items()).encode()).hexdigest()
            ranks.append({"checksums": checksums, "per_gpu_checksum": digest, "parallelism_info": [parallel]})
        engine = hashlib.sha256("".join(rank["per_gpu_checksum"] for rank in ranks).encode()).hexdigest()
        return {"ranks": ranks, "per_engine_checksum": engine}

    def _compare(self, sums: dict[str, str]) -> str:
        """Return the reply if no rank's checksums differ from the snapshot, else raise BadRequestError."""
        if self._snapshot is None:
            raise BadRequestError("There is no snapshot to compare with. Send action='snapshot' first.")
        mine = [name for name, value in sums.items() if self._snapshot.get(name, value) != value]
        gathered = [msgspec.msgpack.decode(e, type=list[str]) for e in self._tp.gather(msgspec.msgpack.encode(mine))]
        changed = list(dict.fromkeys(name for names in gathered for name in names))
        if changed:
            raise BadRequestError(f"{len(changed)} parameters differ from the snapshot: {', '.join(changed[:8])}.")
        return f"All {len(sums)} parameters equal the snapshot."
