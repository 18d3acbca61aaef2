"""A DeepSpeed configuration beside ours: what ours owns is taken from it, never contradicted."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from distributed.errors import UserError, did_you_mean

NATIVE = "deepspeed_config"
"""The field, and the origin of values that come from it."""

CHECKPOINTING = "activation_checkpointing"
"""DeepSpeed's section, and our field."""

IDLE_IN_FP16 = ("hysteresis", "min_loss_scale", "auto_cast")
"""Options of fp16 that DeepSpeed's loss scaler has, and torch's, which the loop uses, lacks."""

_AUTO = "auto"
_CHECKPOINTING_SWITCHES = ("partition_activations", "cpu_checkpointing")
_FIELDS = {
    "train_micro_batch_size_per_gpu": "batch_size",
    "train_batch_size": "global_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer.device": "zero.offload_optimizer",
    "zero_optimization.offload_param.device": "zero.offload_parameters",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.momentum": "momentum",
    "fp16.loss_scale_window": "scaler_growth_interval",
}
_PASSED = {
    *("zero_optimization", "optimizer", "fp16", "bf16", "gradient_clipping", "communication_data_type"),
    *("prescale_gradients", "gradient_predivide_factor", "steps_per_print", "wall_clock_breakdown"),
    *("memory_breakdown", "dump_state", "flops_profiler", "comms_logger", "activation_checkpointing"),
    *("tensorboard", "wandb", "csv_monitor", "comet", "log_level", "disable_python_gc"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
}
_OPTIMIZERS = {"adam": "adam", "adamw": "adamw", "sgd": "sgd"}
_REMEDIES = {
    "scheduler": "Set scheduler, warmup_steps and min_lr_ratio, or give the Trainer a scheduler",
    "amp": "Set mixed_precision=fp16",
    "torch_autocast": "Set mixed_precision=bf16 or fp16, which is autocast",
    "data_efficiency": "Give the Trainer a DataLoader with your own sampler",
    "checkpoint": "Checkpoints are written in the portable format; see the section checkpoint",
    "managed_gradient_accumulation": "Leave it out: the loop determines where a window ends",
    "gradient_allreduce_op": "Leave it out: the loop makes the mean over the global batch",
    "elasticity": "Set global_batch_size; it is kept on any number of ranks",
}
_CHANGES, _CUTS = "it changes the training", "its partitions are not in the portable checkpoints"
# Name -> (values that change nothing, why not another).
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "zero_optimization.compute_grad_norm": ((True,), "clipping and the log need the norm of the gradient"),
    "zero_optimization.zenflow": ((), _CHANGES),
    "zero_optimization.zero_quantized_weights": ((False,), _CHANGES),
    "zero_optimization.zero_quantized_gradients": ((False,), _CHANGES),
    "zero_optimization.zero_quantized_nontrainable_weights": ((False,), _CHANGES),
    "zero_optimization.round_robin_gradients": ((False,), _CUTS),
    "zero_optimization.zero_hpz_partition_size": ((1,), _CUTS),
    "zero_optimization.mics_shard_size": ((-1,), _CUTS),
    "zero_optimization.cpu_offload": ((False,), "DeepSpeed replaced it by offload_optimizer"),
    "zero_optimization.cpu_offload_param": ((False,), "DeepSpeed replaced it by offload_param"),
    "zero_optimization.offload_optimizer.ratio": ((1,), "it takes DeepSpeed's own Adam"),
    "zero_optimization.offload_optimizer.super_offload": ((False,), "it takes DeepSpeed's own Adam"),
    "fp16.loss_scale": ((0,), "the loop's scaler finds its own scale"),
    "fp16.hysteresis": ((2,), "the loop's scaler, torch's, has none"),
    "fp16.consecutive_hysteresis": ((False,), "the loop's scaler, torch's, has none"),
    "fp16.min_loss_scale": ((1,), "the loop's scaler, torch's, has none"),
    "fp16.auto_cast": ((False, True), "autocast casts the inputs"),
    "fp16.fp16_master_weights_and_grads": ((False,), "it takes DeepSpeed's own Adam"),
    "bf16.bf16_master_weights_and_grads": ((False,), _CHANGES),
    "bf16.bf16_optimizer_states": ((False,), _CHANGES),
    "bf16.check_grad_overflow": ((True, False), "it is always checked"),
    **{
        f"{CHECKPOINTING}.{name}": (
            (False, None),
            "DeepSpeed applies it only where the model calls deepspeed.checkpointing",
        )
        for name in (
            *("contiguous_memory_optimization", "synchronize_checkpoint_boundary"),
            *("number_checkpoints", "profile"),
        )
    },
    **{f"{CHECKPOINTING}.{name}": ((False, True), "it is a switch") for name in _CHECKPOINTING_SWITCHES},
    "bf16.immediate_grad_update": ((True, False), "there is nothing to choose with ZeRO"),
}
_REPLACED = {
    CHECKPOINTING: "Leave it out and set activation_checkpointing=full, selective or offload",
}
_NAMED_IN_FULL = ("fp16", "bf16", CHECKPOINTING)


def take_native(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Read ``deepspeed_config`` among the values of a configuration.

    Args:
        values: nested, as they were given.

    Returns:
        (the values with those that the native configuration alone gives, native as a plain
        dict; the dotted names of these -> ``deepspeed_config``).

    Raises:
        UserError: it cannot be read, sets what we do not support, or contradicts `values`.
    """
    found = dict(values)
    native = _read(values.get(NATIVE))
    if native is None:
        return found, {}
    if "bfloat16" in native:  # an older name of it
        native["bf16"] = native.pop("bfloat16")
    _check_names(native)
    found[NATIVE] = native
    origins: dict[str, str] = {}
    for path, name, value in _owned(native):
        if _settle(found, path, name, value):
            origins[name] = NATIVE
    return found, origins


def _read(value: Any) -> dict[str, Any] | None:
    """A copy of what was given: a mapping, the path of a JSON file, or DeepSpeed's own object."""
    value = getattr(value, "_param_dict", value)
    if value is None:
        return None
    if isinstance(value, (str, os.PathLike)):
        value = _read_file(Path(value))
    if isinstance(value, Mapping):
        try:
            copied: dict[str, Any] = json.loads(json.dumps(dict(value)))
        except TypeError as error:
            raise UserError(f"not a DeepSpeed configuration: {error}", field=NATIVE) from None
        return copied
    raise UserError(
        "not a DeepSpeed configuration",
        field=NATIVE,
        got=type(value).__name__,
        allowed="a mapping, the path of a JSON file, or a deepspeed.DeepSpeedConfig",
    )


def _read_file(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"the file cannot be read: {error.strerror}",
            field=NATIVE,
            got=str(path),
            remedy="Check the path",
        ) from None
    except ValueError as error:
        raise UserError(f"the file is not JSON: {error}", field=NATIVE, got=str(path)) from None


def _check_names(native: Mapping[str, Any]) -> None:
    known = _PASSED | {name.partition(".")[0] for name in _FIELDS}
    _refuse_others(native, known, NATIVE, _REMEDIES)
    for path, (harmless, reason) in _REFUSED.items():
        value = _get(native, path)
        if value not in (None, _AUTO, *harmless):
            raise UserError(
                f"not supported: {reason}",
                field=f"{NATIVE}.{path}",
                got=value,
                allowed=" or ".join(map(repr, harmless)) or None,
                remedy=_REPLACED.get(path.partition(".")[0], "Leave it out"),
            )
    for section in _NAMED_IN_FULL:
        _check_section(native, section)


def _check_section(native: Mapping[str, Any], section: str) -> None:
    own = [name.partition(".")[2] for name in (*_REFUSED, *_FIELDS) if name.startswith(f"{section}.")]
    more = {"fp16": ["enabled", "initial_scale_power"], "bf16": ["enabled"]}
    known = [*more.get(section, []), *own]
    _refuse_others(native.get(section) or {}, known, f"{NATIVE}.{section}", {})


def _refuse_others(names: Iterable[str], known: Collection[str], path: str, remedies: dict[str, str]) -> None:
    for name in names:
        if name not in known:
            raise UserError(
                f"'{name}' is not among what this backend hands to DeepSpeed.{did_you_mean(name, known)}",
                field=f"{path}.{name}",
                allowed=", ".join(sorted(known)),
                remedy=remedies.get(name),
            )


def _owned(native: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(native name, our name, value in our terms) of everything that is ours to decide."""
    for path, name in _FIELDS.items():
        value = _get(native, path)
        if value not in (None, _AUTO):
            yield path, name, value
    if _get(native, "zero_optimization.stage") is None:
        yield "zero_optimization.stage", "zero_stage", None
    clipping = native.get("gradient_clipping")
    if clipping not in (None, _AUTO):
        yield "gradient_clipping", "gradient_clipping", clipping or None
    yield from _precision(native)
    if mode := recomputation(native):
        yield CHECKPOINTING, CHECKPOINTING, mode
    kind = _get(native, "optimizer.type")
    if kind not in (None, _AUTO):
        yield "optimizer.type", "optimizer", _optimizer(kind, _get(native, "optimizer.params") or {})


def recomputation(native: Mapping[str, Any]) -> str | None:
    """The mode of `activation_checkpointing` for DeepSpeed's section of that name; None if it asks for none.

    DeepSpeed applies the section where the model calls deepspeed.checkpointing; here it recomputes the
    model's blocks.
    """
    switches = [_get(native, f"{CHECKPOINTING}.{name}") for name in _CHECKPOINTING_SWITCHES]
    partitioned, on_host = (value not in (None, _AUTO, False) for value in switches)
    return "offload" if on_host else "full" if partitioned else None


def _precision(native: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for name in ("bf16", "fp16"):
        enabled = _get(native, f"{name}.enabled")
        if enabled not in (None, _AUTO):
            yield f"{name}.enabled", "mixed_precision", (name, bool(enabled))
    power = _get(native, "fp16.initial_scale_power")
    if power not in (None, _AUTO):
        yield "fp16.initial_scale_power", "scaler_init_scale", 2.0**power


def _optimizer(kind: Any, parameters: Mapping[str, Any]) -> str:
    name = _OPTIMIZERS.get(str(kind).lower())
    if name is None:
        raise UserError(
            "not an optimizer that a configuration can build here",
            field=f"{NATIVE}.optimizer.type",
            got=kind,
            allowed="Adam, AdamW, SGD",
            remedy="Give the Trainer the optimizer itself, its class, or a function from the model to it",
        )
    # DeepSpeed's Adam decouples the weight decay by default.
    return "adamw" if name == "adam" and parameters.get("adam_w_mode", True) else name


def _settle(found: dict[str, Any], path: str, name: str, value: Any) -> bool:
    """Whether the native value becomes ours, because none was given; equal ones are accepted."""
    given = _get(found, name)
    if name == "mixed_precision":
        precision, enabled = value
        if given is None:
            if enabled:
                found[name] = precision
            return bool(enabled)
        if (enabled and given in (True, precision)) or (not enabled and given != precision):
            return False
        value = precision if enabled else f"not {precision}"
    elif name == "zero_stage" and value is None:
        if given is None:
            found[name] = 0
        return given is None
    elif given is None:
        _put(found, name, value)
        return True
    elif _same(given, value) or (name == CHECKPOINTING and given != "none"):
        return False
    raise UserError(
        f"{NATIVE} contradicts it: {path} says {value!r}",
        field=name,
        got=given,
        allowed=f"the same in both, or '{_AUTO}' in {NATIVE}",
        remedy=f"Set it once: leave {path} out of {NATIVE}, or {name} out here",
    )


def _same(given: Any, value: Any) -> bool:
    try:
        return bool(given == value or float(given) == float(value))
    except (TypeError, ValueError):
        return False


def _get(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else getattr(tree, part, None)
    return tree


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    for part in parents:
        inner = tree.get(part)
        if inner is not None and not isinstance(inner, dict):
            inner = inner.model_dump(exclude_unset=True)
        tree[part] = tree = dict(inner or {})
    tree[leaf] = value
