"""TensorBoard: scalars and parameters of a run as an event file.

TensorBoard's own record writer is used on a plain local file. Its `EventFileWriter` and
PyTorch's `SummaryWriter` import TensorFlow where that is installed (seconds, hundreds of
MiB) and take up to eight times as long per record.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.tracker import LOCAL_LIMIT, Tracker, TrackerSpec, with_common_names
from distributed.registry.hookspecs import hookimpl

__all__ = ["TensorBoardTracker", "register_trackers", "tag"]

MARK = ".training"
PREFIXES = {"val_": "val/", "memory_": "memory/", "gpu_": "gpu/", "time_": "time/", "train_": "train/epoch_"}


@hookimpl
def register_trackers() -> list[TrackerSpec]:
    """TensorBoard, when `tensorboard` or `tensorboard_dir` asks for it."""
    return [
        TrackerSpec(
            name="tensorboard",
            target="distributed_plugins.tensorboard:TensorBoardTracker",
            enabled=lambda config: config.wants_tensorboard,
            requires=("tensorboard",),
            install_hint="pip install 'distributed-trainer[tensorboard]'",
        )
    ]


def tag(name: str) -> str:
    """The TensorBoard tag of a metric, so that its pages group what belongs together.

    ``loss`` -> ``train/loss``, ``train_loss`` (an epoch's mean) -> ``train/epoch_loss``,
    ``val_loss`` -> ``val/loss``, ``samples_per_second`` -> ``throughput/samples_per_second``,
    ``time_data`` -> ``time/data``; a name with a slash stays as it is.
    """
    if "/" in name:
        return name
    if name.endswith("_per_second") or name in ("throughput", "speedup"):
        return f"throughput/{name}"
    for prefix, group in PREFIXES.items():
        if name.startswith(prefix):
            return group + name.removeprefix(prefix)
    return f"train/{name}"


class TensorBoardTracker(Tracker):
    """Writes one event file to `tensorboard_dir` (or ``./runs``) / run name (or start time).

    Every record is on disk when `log_metrics` returns. A file `MARK` in the folder names the training, which
    continues there; another of the same name gets a folder with a number.

    Attributes:
        folder: folder of the event file; known after `start`.
    """

    folder: Path
    limit = LOCAL_LIMIT

    def __init__(self, config: DistributedConfig) -> None:
        self.config = config
        self.context = {}
        self._written: set[tuple[str, int]] = set()

    def target(self) -> str:
        """The folder of all runs."""
        root = self.config.tensorboard_dir or str(self.context.get("root", "./runs"))
        return root if "://" in root else os.path.abspath(root)

    def kept(self) -> dict[str, Any]:
        """The folder of all runs."""
        return {"root": self.target()}

    def start(self, params: Mapping[str, Any]) -> None:
        """Open the event file and write `params` as a text table.

        Raises:
            UserError: the folder is not a local one.
            OSError: it cannot be written.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.folder = self._make_folder()
        if self.uncertain:
            self._written = _read_written(self.folder)
        stamp = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        name = f"events.out.tfevents.{stamp}"
        descriptor = os.open(self.folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        self._writer = RecordWriter(os.fdopen(descriptor, "wb"))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._write(_params_event(params))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write all of `metrics` as one event."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        named = with_common_names(metrics, self.config)
        fresh = {n: value for n, value in named.items() if (tag(n), step) not in self._written}
        values = [Summary.Value(tag=tag(name), simple_value=value) for name, value in fresh.items()]
        self._write(Event(wall_time=self.moment or time.time(), step=step, summary=Summary(value=values)))

    def finish(self, status: str) -> None:
        """Close the file."""
        self._writer.close()

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()

    def _make_folder(self) -> Path:
        root = self.target()
        if "://" in root:
            raise UserError(
                "TensorBoard events are written to a local folder only",
                field="tensorboard_dir",
                got=root,
                remedy="Write locally and copy the folder after the run",
            )
        training, name = self.training, self.config.tracking.run_name
        if training:
            found = next((m for m in Path(root).glob(f"**/{MARK}") if m.read_text() == training), None)
            if found is not None:
                return found.parent
        return _new_folder(Path(root), name, training)


def _new_folder(root: Path, name: str | None, training: str) -> Path:
    """A folder of its own for this run, with its name or after the time."""
    start = name or time.strftime("%Y-%m-%d_%H-%M-%S")
    attempt = 0
    while True:
        attempt += 1
        folder = root / (start if attempt == 1 else f"{start}_{attempt}")
        # Without a name of the training, a run with a name of its own continues where there is one.
        free = name is not None and not (folder / MARK).exists() and (not training or not _has_events(folder))
        try:
            folder.mkdir(parents=True, exist_ok=free, mode=0o700)
        except FileExistsError:
            continue
        if training:
            (folder / MARK).write_text(training)
        return folder


def _has_events(folder: Path) -> bool:
    return any(folder.glob("events.out.tfevents.*"))


def _read_written(folder: Path) -> set[tuple[str, int]]:
    """Tag and step of each number that an earlier attempt has written to `folder`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {(tag, event.step) for tag in found.Tags()["scalars"] for event in found.Scalars(tag)}


def _params_event(params: Mapping[str, Any]) -> Any:
    """The parameters as one Markdown table in the text plugin, under the tag ``params``."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    rows = [f"| {name} | {str(value).replace('|', '&#124;')} |" for name, value in params.items()]
    text = "\n".join(["| parameter | value |", "| --- | --- |", *rows])
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    value = Summary.Value(
        tag="params",
        metadata=SummaryMetadata(plugin_data=plugin),
        tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()]),
    )
    return Event(wall_time=time.time(), step=0, summary=Summary(value=[value]))
