"""DeepSpeed's options from configuration and task, checked before it is imported."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distributed.errors import UserError
from distributed_backends.deepspeed.section import half_of, native_config

if TYPE_CHECKING:
    from distributed.config import DistributedConfig

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# torch's that treat every element by itself. (Of an Adagrad DeepSpeed makes another object, which the
# user's scheduler would not drive.)
_ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adadelta", "RMSprop", "ASGD", "Rprop")
)
_KINDS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}
_LARGEST_BUCKET = 500_000_000
"""Elements; DeepSpeed's own default."""
# Not torch's: options of how DeepSpeed's own kernels run, and the rate, which a schedule sets.
_KERNELS = {"torch_adam", "adam_w_mode", "lr"}


def native_optimizer(config: DistributedConfig, own: Any = None) -> Any:
    """The optimizer that the DeepSpeed configuration describes, or the user's `own` when it describes none.

    Raises:
        UserError: there are both, or it has an option that torch's optimizer lacks.
    """
    section = native_config(config).get("optimizer") or {}
    given = {k: v for k, v in section.get("params", {}).items() if k not in _KERNELS and v != "auto"}
    if section.get("type") in (None, "auto"):
        return own
    if own is not None:
        raise UserError(
            "an optimizer was given, and deepspeed_config describes another",
            field="deepspeed_config.optimizer",
            got=section["type"],
            remedy="Leave out one of them",
        )
    kind, options = _KINDS[config.optimizer], {"weight_decay": config.weight_decay, **given}
    if config.optimizer == "sgd":
        options.setdefault("momentum", config.momentum)
    try:
        kind([nn.Parameter(torch.zeros(1))], **options)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"torch's {kind.__name__} cannot be built with them: {error}",
            field="deepspeed_config.optimizer.params",
            got=sorted(given),
            remedy="Give the Trainer the optimizer's class with what you need",
        ) from None
    return partial(kind, **options)


def bucket_size(given: Any, numel: int) -> Any:
    """Elements of a bucket of gradients: at most the model's, because DeepSpeed allocates all of it.

    Args:
        given: what the DeepSpeed configuration sets, where JSON has 5e8 as a float; None is its default.
        numel: number of elements of the trainable parameters.
    """
    given = _LARGEST_BUCKET if given is None else given
    is_count = isinstance(given, int) or (isinstance(given, float) and given.is_integer())
    return min(int(given), max(1, numel)) if is_count else given  # DeepSpeed refuses others


def weights_dtype(config: DistributedConfig, stage: int, model: nn.Module) -> torch.dtype:
    """Dtype of the parameters that the engine holds: 16 bits where the DeepSpeed configuration sets
    it, else the model's own."""
    own = next(p.dtype for p in model.parameters() if p.requires_grad)
    half = half_of(config)
    return _DTYPES[half] if half and stage else own


def check_weights(
    optimizer: torch.optim.Optimizer, model: nn.Module, stage: int, config: DistributedConfig
) -> None:
    """Refuse parameters and optimizers that ZeRO cannot shard into flat ranges.

    Raises:
        UserError: several dtypes, a group without trainable parameters, or an optimizer that is not
            known to be elementwise.
    """
    dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad}
    sent = native_config(config).get("communication_data_type", "auto")
    if sent != "auto" and "float64" in dtypes:
        raise UserError(
            "gradients of float64 are sent as they are",
            field="deepspeed_config.communication_data_type",
            got=sent,
            remedy="Leave it out",
        )
    summed = native_config(config).get("data_types", {}).get("grad_accum_dtype", "auto")
    weights = weights_dtype(config, stage, model)
    named = _DTYPES.get(summed) or getattr(torch, summed.removeprefix("torch."), None)
    if summed != "auto" and named is not weights:
        raise UserError(
            f"gradients are summed in the dtype of the weights, {str(weights).removeprefix('torch.')}",
            field="deepspeed_config.data_types.grad_accum_dtype",
            got=summed,
            remedy="Leave it out",
        )
    if stage == 0:
        if len(dtypes) > 1 and "float64" in dtypes:
            raise UserError(
                f"DeepSpeed does not reduce float64 beside other dtypes: {', '.join(sorted(dtypes))}",
                field="model",
                got="zero_stage=0",
                remedy="Use one dtype, or backend='pytorch-ddp'",
            )
        return
    trusted = native_config(config).get("zero_allow_untested_optimizer") is True
    if not trusted and not isinstance(optimizer, _ELEMENTWISE):
        raise UserError(
            "ZeRO shards parameters into flat ranges, which only elementwise optimizers can step",
            field="optimizer",
            got=type(optimizer).__name__,
            allowed=", ".join(kind.__name__ for kind in _ELEMENTWISE),
            remedy="Use zero_stage=0 or backend='pytorch-ddp'. If the optimizer is elementwise, set"
            " zero_allow_untested_optimizer: true in deepspeed_config",
        )
    for number, group in enumerate(optimizer.param_groups):
        if group["params"] and not any(p.requires_grad for p in group["params"]):
            raise UserError(
                f"parameter group {number} holds only frozen parameters, which ZeRO cannot step",
                field="optimizer",
                remedy="Leave the group out",
            )
    if len(dtypes) > 1:
        raise UserError(
            f"ZeRO keeps parameters side by side, and these differ in dtype: {', '.join(sorted(dtypes))}",
            field="zero_stage",
            got=stage,
            remedy="Use one dtype, or zero_stage=0",
        )
