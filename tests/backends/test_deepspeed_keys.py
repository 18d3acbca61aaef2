"""The table of DeepSpeed's keys against DeepSpeed's own classes: none is missing, and all are read alike."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from distributed_backends.deepspeed.keys import (
    CHECKPOINTING,
    DEFAULTS,
    FIELDS,
    HANDED,
    IGNORED,
    KINDS,
    OWNED,
    REFUSED,
    SECTIONS,
)
from distributed_backends.deepspeed.loss_scale import EngineScaler, NativeScaler, native_rule
from distributed_backends.deepspeed.native_config import take_native, understood
from pydantic import BaseModel
from torch import nn

from distributed import PyTorchDDPTrainer, UserError
from docs.site.deepspeed_keys import keys_table

PAGE = Path(__file__).parents[2] / "docs" / "deepspeed.md"
OLDER = {"bfloat16", "allgather_size"} | {
    f"zero_optimization.{name}" for name in ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory")
}
"""Names that are read as newer ones."""
READ_BY_OPTIMIZERS = "optimizer.params."


class Asked(dict[str, Any]):
    """A mapping that notes the keys that are looked up in it, and below it."""

    seen: set[str]
    path: str

    def note(self, key: Any) -> None:
        self.seen.add(f"{self.path}.{key}".lstrip("."))

    def __contains__(self, key: object) -> bool:
        self.note(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.note(key)
        return super().get(key, default)

    def keys(self) -> Any:  # which DeepSpeed asks with `in`
        return self


def asked(path: str, seen: set[str], **values: Any) -> Asked:
    found = Asked(values)
    found.seen, found.path = seen, path
    return found


def fields(model: type[BaseModel], path: str) -> Iterator[str]:
    """Keys of a class of DeepSpeed's, with their second names, and of those inside."""
    for name, field in model.model_fields.items():
        yield f"{path}.{name}"
        if field.alias:
            yield f"{path}.{field.alias}"
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from fields(kind, f"{path}.{name}")


def keys_of_deepspeed() -> set[str]:
    """Every key that DeepSpeed's configuration looks up, at every level."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    seen: set[str] = set()
    inner = ("flops_profiler", "activation_checkpointing", "aio", "data_types", "zero_optimization")
    below: dict[str, Any] = {name: asked(name, seen) for name in inner}
    writes = asked("checkpoint.parallel_write", seen)
    below["checkpoint"] = asked("checkpoint", seen, parallel_write=writes)
    below["optimizer"] = asked("optimizer", seen, type="AdamW", params={})
    below["timers"] = asked("timers", seen, throughput={})
    with mock.patch(
        "deepspeed.runtime.config.dist", SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1)
    ):
        DeepSpeedConfig(asked("", seen, train_batch_size=1, **below))
    classes = {
        "zero_optimization": DeepSpeedZeroConfig, "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config, "tensorboard": TensorBoardConfig, "wandb": WandbConfig,
        "csv_monitor": CSVConfig, "comet": CometConfig,
        "comms_logger": CommsLoggerConfig, "timers.throughput": DeepSpeedThroughputTimerConfig,
    }  # fmt: skip
    for path, model in classes.items():
        seen |= set(fields(model, path))
    return {key for key in seen if key not in SECTIONS}


def refused_with_its_section(key: str) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:n]) in REFUSED for n in range(1, len(parts)))


def test_every_key_of_deepspeed_is_in_the_table() -> None:
    known = {*KINDS, *REFUSED, *IGNORED} | OLDER
    found = keys_of_deepspeed()
    assert {"fp16.hysteresis", "zero_optimization.stage3_prefetch_bucket_size", "aio.queue_depth"} <= found
    assert {"checkpoint.use_node_local_storage", "nebula", "sequence_parallel_size", "compile"} <= found
    assert {key for key in found - known if not refused_with_its_section(key)} == set()


def test_every_key_of_the_table_is_deepspeeds() -> None:
    own = {
        key
        for key in {*KINDS, *REFUSED, *IGNORED} - {"comms_config", "monitor_config"}
        if not key.startswith(READ_BY_OPTIMIZERS)
    }
    assert own - keys_of_deepspeed() == set()


def test_a_key_is_in_one_place() -> None:
    handed = {
        f"{section}.{key.partition(':')[0]}".lstrip(".")
        for section in HANDED
        for key in HANDED[section].split()
    }
    assert not handed & set(OWNED)
    assert not (handed | set(OWNED)) & set(REFUSED)
    assert not (handed | set(OWNED) | set(REFUSED)) & set(IGNORED)
    assert handed | set(OWNED) == set(KINDS)
    names = PyTorchDDPTrainer(nn.Linear(2, 2)).config
    for field in FIELDS.values():
        inner: Any = names
        for part in field.split("."):
            inner = getattr(inner, part)


def test_a_default_of_deepspeed_is_accepted() -> None:
    """Of every key that is refused and of which DeepSpeed's configuration holds the default."""
    from deepspeed.runtime.config import DeepSpeedConfig

    read, tried = DeepSpeedConfig({"train_batch_size": 1}), 0
    places = {"zero_optimization": read.zero_config, "fp16": read.float16_config, "": read,
              "bf16": read.bfloat16_config, CHECKPOINTING: read.activation_checkpointing_config}  # fmt: skip
    for key in REFUSED:
        section, _, name = key.rpartition(".")
        default = getattr(places.get(section), name, None)
        if isinstance(default, (bool, int, float, str)):
            tried += 1
            understood({section: {"enabled": True, name: default}} if section in ("fp16", "bf16") else
                       {section: {name: default}} if section else {name: default})  # fmt: skip
    assert tried > 15


def test_the_defaults_are_deepspeeds() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    read = DeepSpeedConfig({"train_batch_size": 1})
    places = {"zero_optimization": read.zero_config, "fp16": read.float16_config}
    torchs = torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).defaults
    for key, value in DEFAULTS.items():
        section, _, name = key.rpartition(".")
        assert value == (getattr(places[section], name) if section in places else torchs[name]), key


SPELLED = {"bool": ("true", "off", 1), "int": ("7", 7.0), "count": ("7",), "power": ("7",),
           "number": ("0.5", 1), "text": ("x",), "list": (["x"],)}  # fmt: skip
CONVERTED = ("zero_optimization", "fp16", "bf16", "tensorboard", "wandb", "csv_monitor", "comet", "timers")


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_a_value_of_another_kind_is_converted_as_deepspeed_converts_it(turn: int) -> None:
    """Every key that DeepSpeed's classes convert: the whole configuration is equal either way."""
    from deepspeed.runtime.config import DeepSpeedConfig

    raw: dict[str, Any] = {"train_batch_size": 1}
    for key, kind in KINDS.items():
        section, _, name = key.rpartition(".")
        # With two names of one key DeepSpeed stops.
        twin = name == "stage3_gather_fp16_weights_on_model_save" or f"{section}.stage3_{name}" in KINDS
        if section.partition(".")[0] in CONVERTED and not twin and kind in SPELLED:
            values = SPELLED[kind]
            inner: Any = raw
            for part in section.split("."):
                inner = inner.setdefault(part, {})
            inner[name] = {"device": "cpu", "stage": "3", "output_path": "x"}.get(
                name, values[turn % len(values)]
            )
    raw["bf16"]["enabled"] = "false"
    for name in ("fp16", "tensorboard", "wandb", "csv_monitor", "comet"):
        raw[name]["enabled"] = "true"
    theirs, ours = (DeepSpeedConfig(values) for values in (raw, understood(raw)))
    for name in ("zero_config", "float16_config", "bfloat16_config", "monitor_config", "timers_config"):
        assert getattr(theirs, name).model_dump() == getattr(ours, name).model_dump(), name


def test_no_value_ends_in_an_error_of_python() -> None:
    """Values of all kinds for every key: each is accepted or a UserError."""
    accepted = 0
    for key in sorted({*KINDS, *REFUSED, *IGNORED, *SECTIONS, *OLDER, "unknown", "fp16.unknown"}):
        for value in (
            None,
            True,
            "true",
            "x",
            "auto",
            [],
            [1, 2],
            {},
            -1,
            10**400,
            math.inf,
            {"a": {"b": [1]}},
        ):
            native: Any = value
            for part in reversed(key.split(".")):
                native = {part: native}
            with suppress(UserError):
                taken, _ = take_native({"deepspeed_config": native})
                accepted += understood(taken["deepspeed_config"]) is not None
    assert accepted > 500


def test_the_page_names_every_key_and_is_current() -> None:
    table = keys_table()
    for key in {*KINDS, *REFUSED, *IGNORED}:
        assert f"`{key.rpartition('.')[2]}`" in table or f"`{key}`" in table, key
    assert table in PAGE.read_text(encoding="utf-8"), "run `python -m docs.site.generate`"


# -- the loss scale --------------------------------------------------------------------------

RULES = [
    {"hysteresis": 2},
    {"hysteresis": 1, "loss_scale_window": 2},
    {"hysteresis": 3, "loss_scale_window": 4, "consecutive_hysteresis": True},
    {"hysteresis": "2", "loss_scale_window": "3", "min_loss_scale": 4, "initial_scale_power": 5},
    {"loss_scale": 128},
]


def scaler_of(fp16: dict[str, Any], stage: int) -> NativeScaler:
    native = {"fp16": {"enabled": True, **fp16}, "zero_optimization": {"stage": stage}}
    config = PyTorchDDPTrainer(nn.Linear(2, 2), deepspeed_config=native).config
    kind = EngineScaler if stage else NativeScaler
    scaler = kind("cpu", init_scale=config.scaler_init_scale, growth_interval=config.scaler_growth_interval)
    scaler.follow(native_rule(config, stage))
    scaler.scale(torch.ones(()))
    return scaler


@pytest.mark.parametrize("fp16", RULES, ids=str)
def test_under_zero_the_loss_scale_moves_as_deepspeeds(
    fp16: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step by step beside DeepSpeed's own object, and saved and loaded on the way."""
    from deepspeed.runtime.fp16 import loss_scaler
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config

    monkeypatch.setattr(loss_scaler, "dist", SimpleNamespace(get_rank=lambda: 1))
    read = DeepSpeedFP16Config(enabled=True, **fp16)
    theirs = loss_scaler.CreateLossScaler(
        torch.float16, read.loss_scale, read.loss_scale == 0, read.dynamic_loss_scale_args()
    )
    scaler, draw = scaler_of(fp16, 2), random.Random(0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    assert isinstance(scaler, EngineScaler)
    seen = set()
    for step in range(1100):
        overflowed = draw.random() < (0.1 if step < 60 else 0.0)
        if theirs.loss_scale == read.min_loss_scale and read.loss_scale == 0:
            overflowed = False  # where both would stop
        scaler.after_step(optimizer, overflowed)
        theirs.update_scale(overflowed)
        assert scaler.get_scale() == theirs.loss_scale, step
        seen.add(theirs.loss_scale)
        if step < 80 and step % 7 == 3:
            saved = copy.deepcopy(scaler.state_dict())
            scaler = scaler_of(fp16, 2)
            scaler.load_state_dict(saved)
            assert isinstance(scaler, EngineScaler)
            scaler.scale(torch.ones(()))
        if theirs.loss_scale > 2.0**100:
            break
    assert (len(seen) > 1) == ("loss_scale" not in fp16)


def test_another_backend_continues_from_the_saved_scale() -> None:
    """Torch's scaler grows at the step at which DeepSpeed's would have."""
    scaler = scaler_of({"loss_scale_window": 4}, 2)
    assert isinstance(scaler, EngineScaler)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    for _ in range(2):
        scaler.after_step(optimizer, False)
    plain = torch.amp.GradScaler("cpu")
    plain.load_state_dict(scaler.state_dict())
    plain.scale(torch.ones(()))
    for _ in range(3):
        scaler.after_step(optimizer, False)
        plain._per_optimizer_states[0] = {
            "stage": None,
            "found_inf_per_device": {torch.device("cpu"): torch.zeros(())},
        }
        plain.update()
        assert plain.get_scale() == scaler.get_scale()
    assert scaler.get_scale() == 2.0**17


@pytest.mark.parametrize("stage", [0, 2])
def test_a_saved_scale_continues_under_another_rule(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The overflows that are left are those of the rule that continues, and so is the least scale."""
    from deepspeed.runtime.fp16 import loss_scaler

    monkeypatch.setattr(loss_scaler, "dist", SimpleNamespace(get_rank=lambda: 1))
    saved = scaler_of({"hysteresis": 4}, 0).state_dict() | {"scale": 2.0}
    scaler = scaler_of({"hysteresis": 2, "min_loss_scale": 8}, stage)
    scaler.load_state_dict(saved)
    assert scaler.get_scale() == 8.0
    below = scaler_of({"initial_scale_power": 1, "min_loss_scale": 8}, stage)  # as DeepSpeed starts
    below.load_state_dict(below.state_dict())
    assert below.get_scale() == 2.0
    for earlier in (scaler_of({"hysteresis": 3}, 2), scaler_of({"hysteresis": 2}, 0)):
        scaler.load_state_dict(earlier.state_dict() | {"scale": 64.0})
        scales = []
        for _ in range(3):
            overflow(scaler)
            scales.append(scaler.get_scale())
        assert scales == ([32.0, 16.0, 8.0] if stage == 0 else [64.0, 32.0, 16.0])


def overflow(scaler: NativeScaler) -> None:
    scaler._per_optimizer_states[0] = {
        "stage": None,
        "found_inf_per_device": {torch.device("cpu"): torch.ones(())},
    }
    scaler.update()


def test_a_reading_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of DeepSpeed with another default."""
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config
    from distributed_backends.deepspeed.engine import check_reading

    native = {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    config = PyTorchDDPTrainer(nn.Linear(2, 2), deepspeed_config=native).config
    check_reading(config, 2)
    field = DeepSpeedFP16Config.model_fields["loss_scale_window"]
    monkeypatch.setattr(field, "default", 500)
    DeepSpeedFP16Config.model_rebuild(force=True)
    try:
        with pytest.raises(
            UserError, match=r"loss_scale_window: DeepSpeed reads 500, and this run 1000.*Set it"
        ):
            check_reading(config, 2)
        native["fp16"]["loss_scale_window"] = 1000  # the remedy
        check_reading(PyTorchDDPTrainer(nn.Linear(2, 2), deepspeed_config=native).config, 2)
    finally:
        monkeypatch.undo()
        DeepSpeedFP16Config.model_rebuild(force=True)
