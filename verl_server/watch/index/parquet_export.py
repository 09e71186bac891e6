"""`export_parquet`: the trajectories of a run as a Parquet file, one row a trajectory (a branch of an agent's episode).

The columns are those of `COLUMNS`. Rows are written in groups, so that a large run takes little memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from verl_server.errors import BadRequestError
from verl_server.watch.index.run_index import RunIndex

_GROUP_BYTES = 32 * 2**20
"""Bytes of lines whose rows are written together."""
COLUMNS = {
    "row": ("string", "id of the trajectory: FILE:OFFSET:DIGEST"),
    "step": ("int64", "step that used the episode; null if there is none"),
    "start_step": ("int64", "step of the line: in an asynchronous run, the one in which the group started"),
    "fate": (
        "string",
        "fate of the group in an asynchronous run: trained, skipped, dropped, no_spread or playing; or untrained, "
        "held-out",
    ),
    "phase": ("string", "before, training or after in the demo's file"),
    "incarnation": ("string", "incarnation of the start that wrote the line"),
    "rank": ("int64", "rank that played the episode"),
    "time": ("double", "wall time of the line, in seconds since 1970"),
    "seed": ("string", "seed of the environment's episode, in decimal digits"),
    "episode_id": ("string", "argument of the environment's reset"),
    "group": ("int64", "number of the group"),
    "member": ("int64", "number of the episode in its group"),
    "attempt": ("int64", "number of episodes that were replaced before"),
    "is_replaced": ("bool", "true if another attempt took its place"),
    "session": ("string", "session of the agent"),
    "parent": ("string", "session of the agent whose sub-agent this is"),
    "branch": ("int64", "number of the branch in the episode"),
    "fork_of": ("int64", "branch from which this one departs"),
    "shared": ("int64", "leading tokens that the branch fork_of has, too"),
    "reward": ("double", "reward of the episode"),
    "stop_reason": ("string", "reason for the end"),
    "fault": ("string", "party that caused the end"),
    "error": ("string", "cause of a failure"),
    "began": ("double", "wall time of the begin of the first wait"),
    "ended": ("double", "wall time of the end of the last wait"),
    "generate_seconds": ("double", "time in which the episode waited for the server"),
    "env_seconds": ("double", "time in which the episode waited for its environment"),
    "queue_seconds": ("double", "time in which the episode waited for a place"),
    "tools": ("list<string>", "names of the tools that the policy called"),
    "tokens": ("list<int32>", "token ids"),
    "loss_mask": ("list<int8>", "1 for a token that the policy sampled"),
    "logprobs": ("list<double>", "log-probability of each sampled token, 0 for tokens that were read"),
    "weight_versions": ("list<string>", "version of the weights that sampled each token"),
    "turns": ("string", "the turns as JSON: observations, actions, messages, spans"),
    "advantage": ("double", "advantage in the step that trained it; null as the next ones if none did"),
    "age": ("int64", "trained version minus that of the oldest token"),
    "gap_mean": ("double", "mean difference of the trainer's log-probabilities"),
    "gap_max": ("double", "largest difference of the trainer's log-probabilities"),
    "trained_positions": ("list<int32>", "positions of the trained tokens in tokens"),
    "trained_logprobs": ("list<double>", "the trainer's log-probability of each trained token"),
}
"""Column -> (type, meaning)."""


def export_parquet(
    index: RunIndex,
    file: Path,
    *,
    step: int | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write the trajectories of an index that was filled, without lost ones. Return their number.

    With `step`, write those that the step used. `report` is called with the bytes that were read, and those of all.
    Raise BadRequestError if pyarrow is missing, or if the file cannot be written.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise BadRequestError(
            f"Parquet files are written with pyarrow, which cannot be imported ({error}). Install verl-server[parquet]."
        ) from None
    schema = pa.schema([(name, _type(pa, kind)) for name, (kind, _) in COLUMNS.items()])
    lines = list(index.line_ids(step))
    total = sum(length for _, length in lines)
    count = done = size = 0
    new = file.with_name(f".{file.name}.partial")
    try:
        with pq.ParquetWriter(new, schema, compression="zstd") as writer:
            rows: list[dict[str, Any]] = []
            for number, (line, length) in enumerate(lines, 1):
                rows.append(_row(index, line))
                size += length
                if size >= _GROUP_BYTES or number == len(lines):
                    writer.write_table(pa.Table.from_pylist(rows, schema))
                    count, done, size, rows = count + len(rows), done + size, 0, []
                    report(done, total)
        new.replace(file)
    except OSError as error:
        raise BadRequestError(f"The file {file} cannot be written: {error.strerror or error}.") from None
    finally:
        new.unlink(missing_ok=True)
    return count


def _row(index: RunIndex, line: int) -> dict[str, Any]:
    row = index.line(line)
    name = str(row.pop("row"))
    trajectory, trained = index.trajectory(name), index.trained(name)
    values: dict[str, Any] = {key: row.get(key) for key in COLUMNS} | {
        "row": name,
        "step": row["used"],
        "start_step": row["step"],
        "group": row["grp"],
        "is_replaced": bool(row["is_replaced"]),
        "error": trajectory.error,
        "generate_seconds": row["generate_s"],
        "env_seconds": row["env_s"],
        "queue_seconds": row["queue_s"],
        "tools": (row["tools"] or "").split("\n") if row["tools"] else [],
        "tokens": trajectory.tokens,
        "loss_mask": trajectory.loss_mask,
        "logprobs": trajectory.logprobs,
        "weight_versions": trajectory.weight_versions,
        "turns": msgspec.json.encode(trajectory.turns).decode(),
    }
    if trained is not None:
        values |= {name: getattr(trained, name) for name in ("advantage", "age", "gap_mean", "gap_max")}
        values |= {"trained_positions": trained.positions, "trained_logprobs": trained.logprobs}
    return values


def _type(pa: Any, kind: str) -> Any:
    """Return pyarrow's type of a column."""
    if kind.startswith("list<"):
        return pa.list_(_type(pa, kind[5:-1]))
    return getattr(pa, {"double": "float64", "bool": "bool_"}.get(kind, kind))()
