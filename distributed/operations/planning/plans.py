"""Plans: the table of a search, and the configuration of each of its rows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distributed.config import Layer, load_layers
from distributed.config.load import leaves, nested, value_of
from distributed.errors import UserError
from distributed.planner.estimates.candidates import SearchSpace
from distributed.planner.estimates.configuration import plan_fields
from distributed.planner.estimates.hardware import HardwareProfile
from distributed.planner.estimates.search import Ranked, Table
from distributed.planner.estimates.split import describe
from distributed.registry.catalog import get_catalog
from distributed.system.private_files import write_private

__all__ = ["Plans", "names_in"]

_MEMORY_LINE = re.compile(r"^  memory_bytes: \d+$", re.MULTILINE)


def names_in(layers: Sequence[Layer]) -> set[str]:
    """Dotted names of the fields that `layers` set."""
    return {name for layer in layers for name, _ in leaves(layer.values)}


@dataclass(frozen=True)
class Plans:
    """What `plan` returns: plans that fit, the fastest first, and why others are not among them.

    Attributes:
        subject: the model, in words.
        space: what the search chose from.
        profile: the hardware.
        table: plans and rejected candidates.
        base: layers of the configuration that a plan overrides, such as a script's.
        kept: dotted names of their fields that every plan has as they are.
        written: layers whose fields the file of a plan repeats.
        memory_spread: relative half-width of the interval around predicted memory.
        whence: where the profile is from.
        notes: what else decided which plans there are.
        memory_spread_bytes: what is added to the half-width of `memory_spread`.
        weights: precision of the model's parameters, such as ``fp64``, if it is not ``fp32``.
    """

    subject: str
    space: SearchSpace
    profile: HardwareProfile
    table: Table
    base: tuple[Layer, ...] = ()
    kept: frozenset[str] = frozenset()
    written: tuple[Layer, ...] = ()
    memory_spread: float = 0.0
    whence: str = ""
    notes: tuple[str, ...] = ()
    memory_spread_bytes: int = 0
    weights: str = ""

    @property
    def precision(self) -> str:
        """Of the computation, and of the parameters if these are not float32."""
        if not self.weights:
            return self.space.precision
        autocast = "" if self.space.precision == "fp32" else f"{self.space.precision}, "
        return f"{autocast}{self.weights} parameters"

    @property
    def uncertain(self) -> list[int]:
        """Numbers of the plans that may not fit: the upper end of their memory is above the device's."""
        limit = self.profile.memory
        return [number for number, row in enumerate(self.rows, 1) if self.intervals(row)["memory"][1] > limit]

    @property
    def rows(self) -> Sequence[Ranked]:
        """The plans."""
        return self.table.plans

    def __getitem__(self, index: int) -> Ranked:
        return self.table.plans[index]

    def __len__(self) -> int:
        return len(self.table.plans)

    def check(self, index: int) -> None:
        """Check that there is a plan with this index.

        Raises:
            UserError: there is none.
        """
        if not 0 <= index < len(self):
            raise UserError(
                "there is no plan with this number",
                field="number",
                got=index + 1,
                allowed=f"1 to {len(self)}",
                remedy="Choose a row of the table",
            )

    def fields(self, index: int = 0) -> dict[str, Any]:
        """Configuration fields of a plan, with dotted names, its predictions included.

        Raises:
            UserError: there is no such plan.
        """
        self.check(index)
        row, profile, given = self[index], self.profile, load_layers(self.base)
        fields = plan_fields(
            row.split, given, self.kept, get_catalog(), profile.device, profile.devices_of_host
        )
        fields = {name: value_of(given, name) for name in sorted(names_in(self.written))} | fields
        predicted = {
            "split": describe(row.split),
            "hardware": profile.name,
            "step_seconds": float(f"{row.time.total:.6g}"),
            "spread": profile.achievable.spread,
            "memory_bytes": row.memory.live,
        }
        return fields | {f"planned.{name}": value for name, value in predicted.items()}

    def yaml(self, index: int = 0) -> str:
        """A configuration file that ``train --config`` reads."""
        import yaml

        fields, row = self.fields(index), self[index]
        # The field is compared with what an allocator counts, the table's figure with the memory of a device.
        tensors = f"  # tensors alone; {row.memory.total} with framework and fragmentation, as in the table"
        head = (
            f"# Plan {index + 1} of {len(self)} for {self.subject} on {self.space.world_size} x"
            f" {self.profile.name}:\n# {describe(row.split)}\n"
        )
        body = yaml.safe_dump(nested(json.loads(json.dumps(fields, default=str))), sort_keys=False)
        return head + _MEMORY_LINE.sub(rf"\g<0>{tensors}", body)

    def save(self, path: str | Path, index: int = 0) -> None:
        """Write `yaml`, whole or not at all, readable by this user only.

        Raises:
            UserError: it cannot be written there.
        """
        text = self.yaml(index)
        try:
            write_private(path, text.encode())
        except OSError as error:
            raise UserError(
                f"the plan cannot be written: {error.strerror or error}",
                field="--output",
                got=str(path),
                remedy="Choose a file in a folder that exists",
            ) from None

    def intervals(self, row: Ranked) -> dict[str, tuple[float, float]]:
        """Lower and upper end of what is predicted of a plan: ``time`` in seconds, ``mfu``, ``memory`` in
        bytes."""
        low, high = row.time.interval(self.profile.achievable.spread)
        spread, more, memory = 1.0 + self.memory_spread, self.memory_spread_bytes, row.memory.total
        model = row.mfu * row.time.total
        return {
            "time": (low, high),
            "mfu": (model / high, min(model / low, max(1.0, row.mfu))),
            "memory": (max(0.0, memory / spread - more), memory * spread + more),
        }

    def to_dict(self) -> dict[str, Any]:
        """All plans and reasons, for JSON."""
        plans = [
            {
                "split": describe(row.split),
                "seconds": row.time.total,
                "intervals": self.intervals(row),
                "mfu": row.mfu,
                "time": asdict(row.time),
                "memory": {**asdict(row.memory), "total": row.memory.total},
                "fields": self.fields(index),
            }
            for index, row in enumerate(self.rows)
        ]
        found = {
            "model": self.subject,
            "hardware": self.profile.name,
            "devices": self.space.world_size,
            "precision": self.precision,
            "notes": list(self.notes),
            "uncertain_memory": self.uncertain,
            "plans": plans,
            "reasons": dict(self.table.reasons().most_common()),
            "rejected": [asdict(entry) for entry in self.table.rejected],
        }
        return json.loads(json.dumps(found))  # type: ignore[no-any-return]
