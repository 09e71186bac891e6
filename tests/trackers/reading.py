"""What the trackers' packages have written of a run, read back: `tensorboard`, `wandb`, `mlflow` and `trackio`.

Each returns name -> [(step, value), ...] in the order of writing, where one name has one series.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

Series = list[tuple[int, float]]


@dataclass
class Written:
    series: dict[str, Series] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    """Names of the run, of which there should be one."""
    ids: set[str] = field(default_factory=set)
    """The tracker's ids of the run, of which there should be one."""
    end: str = ""

    def add(self, name: str, step: int, value: float) -> None:
        self.series.setdefault(name, []).append((step, value))


def tensorboard(out: Path) -> Written:
    """Read event files as TensorBoard does, which forgets steps that a later start replaces."""
    written = Written()
    for folder in filter(Path.exists, (out / "tensorboard", out / "tensorboard" / "evaluation")):
        events = EventAccumulator(str(folder))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            written.series[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
        if "settings" in events.Tags()["tensors"]:
            written.settings = json.loads(events.Tensors("settings")[-1].tensor_proto.string_val[0])
    return written


def wandb(out: Path) -> Written:
    """Read the files of wandb's offline mode, one of each start, in their order."""
    written = Written()
    for file in sorted(out.glob("wandb/offline-run-*/*.wandb")):
        for record in _records(file):
            if record.HasField("run"):
                written.ids.add(record.run.run_id)
                written.names.add(record.run.display_name)
                config = {update.key: json.loads(update.value_json) for update in record.run.config.update}
                written.settings |= {key: value for key, value in config.items() if not key.startswith("_")}
            if record.HasField("history"):
                row = {"/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                for name in row.keys() - {"_step", "_timestamp", "_runtime", "evaluation/step"}:
                    # What W&B draws as the x axis of the figure.
                    step = row["evaluation/step"] if name.startswith("evaluation/") else row["_step"]
                    written.add(name, step, float(row[name]))
            if record.HasField("exit"):
                written.end = str(record.exit.exit_code)
    return written


def _records(file: Path) -> Iterator[Record]:
    """Yield the records of a .wandb file: LevelDB's log format after a header of 7 bytes."""
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block is too short for the head of a chunk
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last chunk
            yield Record.FromString(record)
            record = b""


def mlflow(out: Path) -> Written:
    """Read all runs of MLflow's store that have the name of the folder."""
    client, written = MlflowClient(), Written()
    experiment = client.get_experiment_by_name("verl-server")
    for run in client.search_runs([experiment.experiment_id], f"attributes.run_name = '{out.name}'"):
        written.ids.add(run.info.run_id)
        written.names.add(run.info.run_name)
        written.settings, written.end = run.data.params, run.info.status
        for name in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, name)
            written.series[name] = [(metric.step, metric.value) for metric in history]
    return written


def trackio(out: Path) -> Written:
    """Read all runs of Trackio's local database that have the name of the folder."""
    from trackio.sqlite_storage import SQLiteStorage  # reads TRACKIO_DIR when it is imported

    written = Written()
    for run in SQLiteStorage.get_run_records("verl-server"):
        if run["name"] != out.name:
            continue
        written.ids.add(run["id"])
        written.names.add(run["name"])
        written.settings = SQLiteStorage.get_run_config("verl-server", run["name"], run_id=run["id"])
        for row in SQLiteStorage.get_logs("verl-server", run["name"], run_id=run["id"]):
            for name in row.keys() - {"step", "timestamp"}:
                written.add(name, row["step"], float(row[name]))
    return written


READERS = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow, "trackio": trackio}


def in_fp32(value: float) -> float:
    """Return a figure as TensorBoard stores it."""
    stored: float = struct.unpack("f", struct.pack("f", value))[0]
    return stored
