"""Published step times as rows for the planner; ``planner_rows/README.md`` has the sources."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from distributed.interfaces.parallel_dims import ParallelDims
from distributed.planner.estimates.engine import OURS, Engine
from distributed.planner.estimates.hardware import Achievable, HardwareProfile, load_profile
from distributed.planner.estimates.numbers import ModelNumbers, model_numbers
from distributed.planner.estimates.split import Split
from distributed.planner.estimates.time import StepTimer

__all__ = ["Row", "published", "vtrain"]

_FOLDER = Path(__file__).with_name("planner_rows")

_MEGATRON = Engine(weight_bytes=2, gradient_bytes=2, overlap=0.0)
ENGINES = {
    "megatron": _MEGATRON,
    # Selective recomputation computes attention again, which the paper gives as 2.7 % of the operations.
    "megatron-selective": replace(_MEGATRON, sequence_parallel=True, recomputed=0.05),
    # Its selective policy stores every second matrix product.
    "torchtitan": Engine(sequence_parallel=True, recomputed=0.5, elementwise=OURS.elementwise),
    "torchtitan-full": Engine(sequence_parallel=True, elementwise=OURS.elementwise),
    "torchtitan-compile": Engine(sequence_parallel=True, recomputed=0.5),
    "torchtitan-full-compile": Engine(sequence_parallel=True),
    # Its stages have one block each; nothing is computed again.
    "llama3": Engine(weight_bytes=2, sequence_parallel=True, recomputed=0.0, stages_per_rank=8),
}
"""Programs behind the rows."""

_NETWORKS = {"A100": {}, "H100": {}, "H100-96": {"memory": 96e9, "memory_bandwidth": 2.4e12}}
_VTRAIN = {"link_between_nodes": 12.5e9}
"""The nodes of vTrain's runs have 800 Gb/s for eight devices."""


@dataclass(frozen=True)
class Row:
    """One published run.

    Attributes:
        group: runs of the same model, batch and number of devices, among which a planner chooses.
        splits: what was run; several where the micro-batch was not published, of which the fastest counts.
        seconds: published time of a step, or the time that a published rate stands for.
    """

    source: str
    name: str
    group: tuple[int, ...]
    numbers: ModelNumbers
    splits: tuple[Split, ...]
    profile: HardwareProfile
    engine: Engine
    seconds: float

    def predict(self, achievable: Achievable, latency: float) -> float:
        """Predicted seconds of a step with other fitted parameters."""
        values = {
            "achievable": achievable,
            "latency_within_node": latency,
            "latency_between_nodes": latency,
        }
        timer = StepTimer(self.numbers, self.profile.model_copy(update=values), self.engine)
        return min(timer.parts(split).total for split in self.splits)


def vtrain(name: str) -> list[Row]:
    """Rows of one of the files of vTrain's runs."""
    profile = load_profile("A100").model_copy(update=_VTRAIN)
    with (_FOLDER / f"{name}.csv").open(newline="") as file:
        return [_vtrain_row(name, row, profile) for row in csv.DictReader(file)]


def _vtrain_row(source: str, row: Mapping[str, str], profile: HardwareProfile) -> Row:
    sizes = {key: int(value) for key, value in row.items() if key != "milliseconds"}
    numbers = model_numbers(
        layers=sizes["layers"],
        hidden=sizes["hidden"],
        heads=sizes["heads"],
        vocabulary=51200,
        sequence=sizes["sequence"],
        global_batch=sizes["global_batch"],
        family="gpt",
        fused_attention=False,
    )
    dims = ParallelDims(data=sizes["data"], tensor=sizes["tensor"], pipeline=sizes["pipeline"])
    split = next(_splits(numbers, dims, "1f1b", "fp16", sizes["micro_batch"]))
    name = f"tensor {dims.tensor} data {dims.data} pipeline {dims.pipeline} micro {sizes['micro_batch']}"
    group = tuple(sizes[key] for key in ("layers", "hidden", "gpus", "global_batch"))
    seconds = float(row["milliseconds"]) / 1e3
    return Row(source, name, group, numbers, (split,), profile, _MEGATRON, seconds)


def _splits(
    numbers: ModelNumbers, dims: ParallelDims, schedule: str, precision: str, micro_batch: int
) -> Iterator[Split]:
    share = numbers.global_batch // dims.data_parallel_size
    for size in [micro_batch] if micro_batch else [1, 2, 4, 8, 16]:
        if share % size == 0:
            yield Split(
                dims,
                "published",
                micro_batch=size,
                num_micro_batches=share // size,
                schedule=schedule,
                activation_checkpointing=True,
                precision=precision,
            )


def published() -> list[Row]:
    """Rows of the tables of papers and projects."""
    with (_FOLDER / "published.csv").open(newline="") as file:
        return [_published_row(row) for row in csv.DictReader(file)]


def _published_row(row: Mapping[str, str]) -> Row:
    def size(key: str) -> int:
        return int(row[key])

    engine = ENGINES[row["engine"]]
    numbers = model_numbers(
        **{key: size(key) for key in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary")},
        sequence=size("sequence"),
        global_batch=size("global_batch"),
        family=row["family"],
        fused_attention=row["family"] == "llama",
    )
    axes = ("shard", "data", "context", "tensor", "pipeline")
    dims = ParallelDims(**{axis: size(axis) for axis in axes})
    profile = load_profile(row["device"].partition("-")[0]).model_copy(update=_NETWORKS[row["device"]])
    splits = tuple(_splits(numbers, dims, row["schedule"], row["precision"], size("micro_batch")))
    group = (numbers.layers, numbers.hidden, dims.world_size, numbers.global_batch)
    seconds = _seconds(float(row["value"]), row["unit"], numbers, dims.world_size)
    return Row(row["set"], row["name"], group, numbers, splits, profile, engine, seconds)


def _seconds(value: float, unit: str, numbers: ModelNumbers, devices: int) -> float:
    tokens = numbers.sequence * numbers.global_batch
    if unit == "seconds":
        return value
    if unit == "tokens":
        return tokens / (value * devices)
    operations = numbers.step_flops
    if unit == "tflops-recomputed":  # equation 3 of arXiv:2104.04473: four passes, three of the output layer
        operations += numbers.step_flops / 3.0 - tokens * numbers.output_flops
    if unit == "tflops-causal":  # a causal mask halves the attention; the paper does not state its count
        operations -= 1.5 * tokens * numbers.layers * numbers.attention_flops
    return operations / (value * 1e12 * devices)
