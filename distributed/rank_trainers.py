"""Trainers for scripts that know their rank, and for models that ranks share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from distributed.communication.environment import detect
from distributed.config import Layer
from distributed.config.load import all_fields, check_agreement
from distributed.errors import UserError, did_you_mean, hide_own_frames
from distributed.interfaces.parallel_dims import AXES, DATA_AXES
from distributed.registry.catalog import get_catalog
from distributed.trainer import Trainer

__all__ = [
    "AdvancedDistributedTrainer",
    "DistributedTrainer",
    "HybridParallelTrainer",
    "OverlappedTrainer",
]


class DistributedTrainer(Trainer):
    """A `Trainer` for scripts that know their rank and the number of ranks.

    Args:
        model, optimizer: as for `Trainer`, and so is everything that is not named here.
        world_size: number of ranks. Under a launcher it has to be the launcher's; otherwise `fit` starts as
            many.
        rank: of this process, to check it. Without a launcher only rank 0 runs the script.

    Raises:
        UserError: the launcher gave this process another rank or another number of ranks, or there is none
            that has started this rank.
    """

    default_backend = "pytorch-ddp"

    @hide_own_frames
    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        world_size: int | None = None,
        rank: int | None = None,
        config: Any = None,
        **given: Any,
    ) -> None:
        super().__init__(model, config, optimizer=optimizer, **{**_num_ranks(rank, world_size), **given})


class OverlappedTrainer(DistributedTrainer):
    """A `DistributedTrainer` for a loop of your own, whose gradients are reduced while backward runs.

    That is what ``pytorch-ddp`` does in every `fit`, too: a bucket of gradients is sent as soon as it is
    complete. ``bucket_cap_mb`` is the size of the buckets, and the metric ``hidden_communication_share`` of a
    record is the share of the communication that was hidden behind backward.
    """

    @hide_own_frames
    def train_step_overlapped(self, data: Any, target: Any) -> float:
        """Take a step with the mean over the samples of all ranks, as `Trainer.train_step`. Collective.

        Args:
            data, target: this rank's inputs and targets, batch first.

        Returns:
            The mean loss of this rank's samples.

        Raises:
            UserError: what `Trainer.train_step` raises.
        """
        return self.train_step(data, target)


class AdvancedDistributedTrainer(Trainer):
    """A `Trainer` for scripts that know their rank and train epoch by epoch.

    Its defaults beside the backend ``pytorch-ddp`` are ``find_unused_parameters``,
    ``gradient_as_bucket_view`` and ``gradient_clipping=1.0``.

    Args:
        model: as for `Trainer`, and so is everything that is not named here.
        rank, world_size: as for `DistributedTrainer`.
    """

    default_backend = "pytorch-ddp"

    @hide_own_frames
    def __init__(
        self,
        model: Any,
        rank: int | None = None,
        world_size: int | None = None,
        config: Any = None,
        **given: Any,
    ) -> None:
        super().__init__(model, config, **{**_num_ranks(rank, world_size), **given})

    def _defaults(self) -> list[Layer]:
        more = {"find_unused_parameters": True, "gradient_as_bucket_view": True, "gradient_clipping": 1.0}
        return [*super()._defaults(), Layer(f"default of {type(self).__name__}", more)]

    @hide_own_frames
    def train_epoch(self, dataloader: Any, optimizer: Any = None, criterion: Any = None) -> float:
        """``fit(dataloader, epochs=1)``; a second call continues with the next epoch.

        Args:
            dataloader: the training data.
            optimizer, criterion: `optimizer` and `loss_fn` of the Trainer, the same in all calls.

        Returns:
            The mean loss of the epoch's samples.

        Raises:
            UserError: another optimizer or criterion than before, or what `fit` raises.
        """
        _adopt(self, optimizer, criterion)
        history = self.fit(dataloader, epochs=1)
        return float(history.epochs[-1]["train_loss"])

    @hide_own_frames
    def synchronize_sketching_matrices(self) -> None:
        """Give all ranks rank 0's buffers, the matrices of sketched layers among them. Collective where the
        script runs on every rank; where `fit` starts the ranks, they have the same from the start.

        Raises:
            UserError: torch.distributed is not initialized.
        """
        place = detect(os.environ)
        if place is None or place.size == 1:
            return
        import torch.distributed as dist

        from distributed.communication.broadcast import broadcast_values

        if not dist.is_initialized():
            raise UserError(
                "torch.distributed is not initialized on this rank",
                field="synchronize_sketching_matrices",
                remedy="Call setup_distributed() first",
            )
        broadcast_values(self.model.buffers())


class HybridParallelTrainer(Trainer):
    """A `Trainer` whose ranks divide samples and model between them (section ``parallel``).

    Args:
        model_config: ``{"layers": [...]}``, layers that are called one after the other; or a model, or a
            function that builds it. A layer is a module, or the arguments of `torch.nn.Linear` (or of the
            class under ``layer``), with ``tensor_parallel=True`` if its outputs are computed in parts.
        parallelism_config: ``tensor_parallel_size``, ``data_parallel_size``, ``pipeline_parallel_size``,
            ``context_parallel_size`` (or ``sequence_parallel_size``) and ``expert_parallel_size``, which are
            ``parallel.tensor`` and so on; or fields of ``parallel`` by their own names.
        config: as for `Trainer`, and so is everything that is not named here.

    Attributes:
        tp_group, tp_rank: after `setup_process_groups`: the ranks that share the model, and this one's index
            among them; the group is None for one rank.
        dp_group, dp_rank: the same of the ranks with different samples and the same part of the model.

    Raises:
        UserError: an unknown size, or arguments that a layer does not take.
    """

    default_backend = "pytorch-ddp"
    tp_group: Any = None
    dp_group: Any = None
    tp_rank = dp_rank = 0

    @hide_own_frames
    def __init__(
        self,
        model_config: Any,
        parallelism_config: Mapping[str, Any] | None = None,
        config: Any = None,
        **given: Any,
    ) -> None:
        self.model_config, self.parallelism_config = model_config, dict(parallelism_config or {})
        fields = _axes(self.parallelism_config)
        super().__init__(self.create_hybrid_model(), config, **{**fields, **given})
        check_agreement(self.config, fields, "parallelism_config")

    def _defaults(self) -> list[Layer]:
        plan = _plan_of_layers(self.model_config)
        layer = Layer("tensor_parallel of model_config", {"parallel.tensor_plan": plan})
        return [*super()._defaults(), *([layer] if plan else [])]

    @hide_own_frames
    def create_hybrid_model(self) -> Any:
        """The whole model of `model_config`, newly built; `fit` cuts it."""
        if not _has_layers(self.model_config):
            return self.model_config
        from torch import nn

        from distributed.parallel.layers import build_layer

        layers = self.model_config["layers"]
        return nn.Sequential(*(build_layer(layer, f"layers[{n}]") for n, layer in enumerate(layers)))

    @hide_own_frames
    def setup_process_groups(self) -> None:
        """Set `tp_group` and the like, for code of your own around `fit`. Collective.

        `fit` needs no call: it makes its groups itself.

        Raises:
            UserError: no launcher started this process, or the sizes do not multiply to the number of ranks.
        """
        plan = self._plan(self._configure({}), get_catalog(), self._bare_task())
        if plan.joined is None:
            raise UserError(
                "the ranks do not exist yet: fit starts them, and makes their groups",
                field="setup_process_groups",
                remedy="Leave the call out, or start the script with torchrun to have groups around fit",
            )
        from distributed.launch.own_loop import setup_distributed
        from distributed.parallel.mesh import Mesh

        config = plan.config
        world = setup_distributed(
            backend=config.communication_backend,
            device=config.device,
            collective_timeout=config.collective_timeout,
        )
        self.tp_rank, self.dp_rank = (plan.dims.index(world.rank, *axes) for axes in (("tensor",), DATA_AXES))
        if world.size > 1:
            mesh = Mesh(plan.dims, world.rank, world.device, config.collective_timeout)
            self.tp_group, self.dp_group = mesh.group("tensor"), mesh.group(*DATA_AXES)

    @hide_own_frames
    def train_step(self, data: Any, target: Any = None, criterion: Any = None) -> float:
        """As `Trainer.train_step`; or ``train_step((data, target), optimizer, criterion)``, with the same
        optimizer and criterion in all calls."""
        if criterion is not None:
            _adopt(self, target, criterion)
            data, target = data
        return super().train_step(data, target)


_AXES = {
    **{f"{axis}_parallel_size": f"parallel.{axis}" for axis in (*AXES, "expert")},
    "sequence_parallel_size": "parallel.context",
}
"""Size in a `parallelism_config` -> field."""


def _axes(sizes: Mapping[str, Any]) -> dict[str, Any]:
    own = {name.removeprefix("parallel."): name for name in all_fields() if name.startswith("parallel.")}
    known = {**own, **_AXES}
    found: dict[str, Any] = {}
    for name, value in sizes.items():
        if name not in known:
            raise UserError(
                f"unknown size '{name}'.{did_you_mean(name, known)}",
                field="parallelism_config",
                allowed=", ".join(_AXES),
                remedy="Or use a field of the section parallel",
            )
        if known[name] in found:
            raise UserError(
                f"two sizes mean {known[name]}",
                field="parallelism_config",
                got=", ".join(n for n in sizes if known.get(n) == known[name]),
                remedy="Leave one of them out",
            )
        found[known[name]] = value
    return found


def _has_layers(model_config: Any) -> bool:
    if isinstance(model_config, Mapping) and "layers" not in model_config:
        raise UserError(
            "it has no layers",
            field="model_config",
            got=", ".join(map(str, model_config)) or "nothing",
            allowed="{'layers': [...]}, a model, or a function that builds it",
        )
    return isinstance(model_config, Mapping)


def _plan_of_layers(model_config: Any) -> dict[str, str]:
    if not _has_layers(model_config):
        return {}
    layers = enumerate(model_config["layers"])
    cut = (n for n, layer in layers if isinstance(layer, Mapping) and layer.get("tensor_parallel"))
    return {str(n): "colwise_gather_output" for n in cut}


def _num_ranks(rank: int | None, world_size: int | None) -> dict[str, int]:
    """The field for the number of ranks that `fit` starts; empty under a launcher, which has started them."""
    place = detect(os.environ)
    if place is not None:
        from distributed.launch.own_loop import check_place

        check_place(place, rank, world_size)
        return {}
    if rank:
        raise UserError(
            "no launcher has started this process, and only rank 0 runs the script: fit starts the others",
            field="rank",
            got=rank,
            allowed="0",
            remedy="Leave it out, start the script with torchrun, or call setup_distributed(rank, world_size)"
            " first",
        )
    return {} if world_size is None else {"num_gpus": world_size}


def _adopt(trainer: Trainer, optimizer: Any, criterion: Any) -> None:
    """Take what a call gives as the trainer's own, which cannot change later."""
    for name, given in (("optimizer", optimizer), ("loss_fn", criterion)):
        if given is None:
            continue
        before = getattr(trainer, name)
        if before is not None and before is not given:
            raise UserError(
                "training continues with the object of the first call, and another is given",
                field=name,
                got=type(given).__name__,
                remedy="Pass the same object in every call, or make another trainer",
            )
        setattr(trainer, name, given)
