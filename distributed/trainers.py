"""Named trainers: a default backend each, and arguments of other names for our fields."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from distributed.communication.environment import detect
from distributed.config import DistributedConfig
from distributed.config.fsdp1 import fields_of_fsdp1
from distributed.config.load import check_agreement, top_fields
from distributed.errors import UserError, hide_own_frames
from distributed.interfaces.framework import framework_of
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.task import Task
from distributed.registry.catalog import Catalog, get_catalog
from distributed.trainer import Trainer

_ALIASES = {"lr": "learning_rate"}
"""What samples of Ray Tune call our fields."""


class PyTorchDDPTrainer(Trainer):
    """A `Trainer` whose backend is ``pytorch-ddp`` unless the config sets another."""

    default_backend = "pytorch-ddp"


class ShardingStrategy(Enum):
    """The names that FSDP1 has for ways of sharding; `FSDPTrainer` sets the fields of each."""

    NO_SHARD = "NO_SHARD"
    """Every rank holds the whole model: ``backend=pytorch-ddp``."""
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    """Parameters stay gathered from forward to backward (ZeRO 2): ``fsdp.reshard_after_forward=false``."""
    FULL_SHARD = "FULL_SHARD"
    """Parameters are gathered one block at a time (ZeRO 3): ``fsdp.reshard_after_forward=true``."""
    HYBRID_SHARD = "HYBRID_SHARD"
    """As FULL_SHARD within each of ``parallel.data`` copies of the model."""


_STRATEGIES: dict[ShardingStrategy, dict[str, Any]] = {
    ShardingStrategy.NO_SHARD: {"backend": "pytorch-ddp"},
    ShardingStrategy.SHARD_GRAD_OP: {"fsdp.reshard_after_forward": False},
    ShardingStrategy.FULL_SHARD: {"fsdp.reshard_after_forward": True},
    ShardingStrategy.HYBRID_SHARD: {"fsdp.reshard_after_forward": True},
}


class FSDPTrainer(Trainer):
    """A `Trainer` whose backend is ``fsdp`` unless the config sets another.

    Args:
        model: as for `Trainer`, and so is everything that is not named here.
        sharding_strategy: a `ShardingStrategy`, torch's own, or its name. HYBRID_SHARD needs
            ``parallel.data``, the number of copies of the model.
        mixed_precision: besides what the field takes, FSDP1's ``MixedPrecision``: its `param_dtype` is
            `mixed_precision` (autocast; ``fsdp.param_dtype`` gathers in that dtype as well), and its
            `reduce_dtype` is ``fsdp.reduce_dtype``.
        device_id: of FSDP1; a rank has the device of its own, or the CPU.
        use_orig_params: of FSDP1; True is what FSDP2 does.

    Raises:
        UserError: an unknown strategy, fields that contradict it, HYBRID_SHARD without ``parallel.data``, a
            dtype that is no precision, or ``use_orig_params=False``.
    """

    default_backend = "fsdp"

    @hide_own_frames
    def __init__(
        self,
        model: Any,
        config: Any = None,
        *,
        sharding_strategy: Any = None,
        mixed_precision: Any = None,
        device_id: Any = None,
        use_orig_params: bool | None = None,
        **given: Any,
    ) -> None:
        strategy = None if sharding_strategy is None else _strategy(sharding_strategy)
        fields = {} if strategy is None else _STRATEGIES[strategy]
        others, self._left_out = fields_of_fsdp1(mixed_precision, device_id, use_orig_params)
        super().__init__(model, config, **{**fields, **others, **given})
        if strategy is not None:
            check_agreement(self.config, fields, f"sharding_strategy={strategy.name}")
        copies = any(self.config.origin(name) != "default" for name in ("parallel.data", "fsdp.replicate"))
        if strategy is ShardingStrategy.HYBRID_SHARD and not copies:
            raise UserError(
                "sharding_strategy=HYBRID_SHARD needs the number of copies of the model",
                field="parallel.data",
                allowed="2 and more, such as the number of hosts; the ranks of a copy shard it",
                remedy="Set it, or use FULL_SHARD",
            )

    def _plan(self, config: DistributedConfig, catalog: Catalog, task: Task) -> RunPlan:
        plan = super()._plan(config, catalog, task)
        return replace(plan, notes=(*plan.notes, *self._left_out))


def _strategy(given: Any) -> ShardingStrategy:
    """Torch's strategies are other classes of the same names."""
    name = str(getattr(given, "name", given)).rpartition(".")[2].upper()
    if name not in ShardingStrategy.__members__:
        raise UserError(
            "unknown sharding strategy",
            field="sharding_strategy",
            got=name,
            allowed=", ".join(ShardingStrategy.__members__),
            remedy="Or set fsdp.reshard_after_forward and parallel.data",
        )
    return ShardingStrategy[name]


class DeepSpeedTrainer(Trainer):
    """A `Trainer` whose backend is ``deepspeed`` unless the config sets another."""

    default_backend = "deepspeed"


class TensorFlowDistributedTrainer(Trainer):
    """A `Trainer` of Keras models, whose backend is ``tensorflow`` unless the config sets another."""

    default_backend = "tensorflow"


class HorovodTrainer(Trainer):
    """A `Trainer` whose backend is ``horovod`` unless the config sets another.

    Args:
        model: as for `Trainer`, and so is everything that is not named here.
        config: as for `Trainer`, or the optimizer, as in ``HorovodTrainer(model, optimizer)``.
        verbose: False shows no progress bar. Only rank 0 shows one in any case.
        compression: ``none``, ``fp16`` or the class of ``hvd.Compression``: `horovod.compression`.
    """

    default_backend = "horovod"

    @hide_own_frames
    def __init__(
        self, model: Any, config: Any = None, *, verbose: bool = True, compression: Any = None, **given: Any
    ) -> None:
        if not verbose:
            given = {"tracking.progress": "off", **given}
        if compression is not None:
            given["horovod.compression"] = compression
        if callable(config) or hasattr(config, "param_groups") or framework_of(config) is not None:
            if given.get("optimizer") is not None:
                raise UserError(
                    "two optimizers are given, one by position and one by name",
                    field="optimizer",
                    got=type(given["optimizer"]).__name__,
                    remedy="Leave one of them out",
                )
            given["optimizer"], config = config, None
        super().__init__(model, config, **given)

    @hide_own_frames
    def metric_average(self, value: Any, name: str | None = None) -> float:
        """The mean of `value` over all ranks. Collective where code around `fit` runs on every
        rank (horovodrun, torchrun); where `fit` starts the ranks it is `value`.

        Args:
            value: a number or a tensor of one element, this rank's.
            name: of the metric, the same on all ranks.

        Raises:
            UserError: there are several ranks and Horovod has not started.
        """
        place = detect(os.environ)
        if place is None or place.size == 1:
            return float(value)
        catalog = get_catalog()
        backend = catalog.load_backend(catalog.backend(self.default_backend))
        return backend.average_outside_fit(float(value), name or "metric")


class RayTrainer(Trainer):
    """A `Trainer` whose backend is ``ray`` unless the config sets another.

    Args:
        model: as for `Trainer`, and so is everything that is not named here.
        config: besides what `Trainer` takes, a mapping that holds more than our fields, as a
            sample of Ray Tune does: what is not ours is kept in `hyperparameters`, and ``lr``
            means ``learning_rate``. Its ``batch_size`` takes precedence over that of a DataLoader.

    Attributes:
        hyperparameters: what in `config` is not a field of `DistributedConfig`.
    """

    default_backend = "ray"

    @hide_own_frames
    def __init__(self, model: Any, config: Any = None, **given: Any) -> None:
        self.hyperparameters: dict[str, Any] = {}
        self._samples_batch_size = False
        if isinstance(config, Mapping):
            named: dict[Any, Any] = {_ALIASES.get(name, name): value for name, value in config.items()}
            if len(named) < len(config):
                raise UserError(
                    "lr and learning_rate are the same, and both are given",
                    field="lr",
                    got=config["lr"],
                    remedy="Leave one of them out",
                )
            fields = top_fields()
            config = {n: v for n, v in named.items() if str(n).partition(".")[0] in fields}
            self.hyperparameters = {n: v for n, v in named.items() if n not in config}
            self._samples_batch_size = bool(self.hyperparameters) and "batch_size" in config
        super().__init__(model, config, **given)

    def _loader_batch_size(self, task: Task) -> int | None:
        return None if self._samples_batch_size else super()._loader_batch_size(task)

    def _plan(self, config: DistributedConfig, catalog: Catalog, task: Task) -> RunPlan:
        plan = super()._plan(config, catalog, task)
        if self.hyperparameters:
            names = ", ".join(map(str, self.hyperparameters))
            note = f"not fields of the configuration, kept in hyperparameters: {names}"
            return replace(plan, notes=(*plan.notes, note))
        return plan
