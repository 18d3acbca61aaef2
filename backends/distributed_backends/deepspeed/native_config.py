"""A DeepSpeed configuration beside ours: what ours owns is taken from it, never contradicted."""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, FiniteFloat, PositiveInt, TypeAdapter, ValidationError

from distributed.errors import UserError
from distributed_backends.deepspeed.keys import (
    CHECKPOINTING,
    DEFAULTS,
    FIELDS,
    IGNORED,
    KINDS,
    REFUSED,
    SECTIONS,
)

NATIVE = "deepspeed_config"
"""The field, and the origin of values that come from it."""

AUTO = "auto"
"""A value that is left to the other side."""
HALVES = ("bf16", "fp16")
_OPTIMIZERS = ("adam", "adamw", "sgd")
_EXAMPLES = {"zero_optimization": '{"stage": 2}', "optimizer": '{"type": "AdamW"}'}


def _no_text(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError("DeepSpeed does not convert it here, and takes any text for true")
    return value


_KINDS: dict[str, TypeAdapter[Any]] = {
    "bool": TypeAdapter(bool),
    "flag": TypeAdapter(Annotated[bool, BeforeValidator(_no_text)]),
    "level": TypeAdapter(
        Annotated[
            Literal["debug", "info", "warning", "error", "critical"],
            BeforeValidator(lambda value: str(value).lower()),
        ]
    ),
    "int": TypeAdapter(int),
    "count": TypeAdapter(PositiveInt),
    "power": TypeAdapter(Annotated[int, Field(ge=-126, le=126)]),  # 2 to it is a number in float32
    "number": TypeAdapter(FiniteFloat),
    "pair": TypeAdapter(tuple[FiniteFloat, FiniteFloat]),
    "text": TypeAdapter(str),
    "list": TypeAdapter(list[str] | str),
}
_ACCELERATE = {
    "zero_stage": ", and set the field zero_stage",
    "offload_optimizer_device": ", and set the field zero.offload_optimizer",
    "offload_param_device": ", and set the field zero.offload_parameters",
    "deepspeed_config_file": ", and set the field deepspeed_config to the file",
    "zero3_init_flag": "",
    "zero3_save_16bit_model": "",
}
"""Key of accelerate's section of this name -> what to do beside leaving it out."""
_OLDER = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
_LARGEST_FILE = 1_000_000


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
    given = _read(values.get(NATIVE))
    if given is None:
        return found, {}
    found[NATIVE] = given
    origins: dict[str, str] = {}
    precision = found.get("mixed_precision")
    for path, name, value, explicit in _owned(understood(given, precision), precision):
        if (explicit or _get(found, name) is None) and _settle(found, path, name, value):
            origins[name] = NATIVE
    return found, origins


def _read(value: Any) -> dict[str, Any] | None:
    """A copy of what was given: a mapping, the path of a JSON file, or DeepSpeed's own object."""
    value = getattr(value, "_param_dict", value)
    if value is None:
        return None
    try:
        if isinstance(value, (str, os.PathLike)):
            value = _read_file(Path(value))
        if isinstance(value, Mapping):
            copied: dict[str, Any] = json.loads(json.dumps(dict(value)))
            return copied
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"not a DeepSpeed configuration: {error}", field=NATIVE) from None
    raise UserError(
        "not a DeepSpeed configuration",
        field=NATIVE,
        got=type(value).__name__,
        allowed="a mapping, the path of a JSON file, or a deepspeed.DeepSpeedConfig",
    )


def _read_file(path: Path) -> Any:
    """JSON, or what DeepSpeed itself also reads: with comments and without the last comma, by hjson."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_LARGEST_FILE)
    except OSError as error:
        raise UserError(
            f"the file cannot be read: {error.strerror}",
            field=NATIVE,
            got=str(path),
            remedy="Check the path",
        ) from None
    try:
        return json.loads(text, object_pairs_hook=_without_twins)
    except ValueError as error:
        with suppress(ImportError, ValueError):
            found = import_module("hjson").loads(text, object_pairs_hook=_without_twins)
            if isinstance(found, dict):
                return found
        raise UserError(f"the file is not JSON: {error}", field=NATIVE, got=str(path)) from None


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twin = next((name for name in names if names.count(name) > 1), None)
    if twin is not None:
        raise UserError(
            "the key is set twice", field=f"{NATIVE}: {twin}", remedy="Keep one, as for DeepSpeed"
        )
    return dict(pairs)


# -- what it says ------------------------------------------------------------------------


def understood(given: Mapping[str, Any], precision: Any = None) -> dict[str, Any]:
    """The configuration as DeepSpeed reads it: newest names, values of their kind, nothing without effect.

    Args:
        precision: our `mixed_precision`. Where it may ask for bf16 or fp16, that section without
            ``enabled`` is left to it, instead of switched off, so that its values act.

    Raises:
        UserError: a value of another kind, or a key that is unknown or refused.
    """
    tree = deepcopy(dict(given))
    older = tree.pop("bfloat16", None)
    if tree.get("bf16") is None:  # DeepSpeed looks at the older name only then
        tree["bf16"] = older
    if tree.get("steps_per_print") == math.inf:  # never
        del tree["steps_per_print"]
    zero = tree.get("zero_optimization")
    if isinstance(zero, bool):
        size = tree.pop("allgather_size", None)
        tree["zero_optimization"] = {"stage": int(zero), "allgather_bucket_size": size if zero else None}
    elif isinstance(zero, dict):
        zero.pop("cpu_offload_use_pin_memory", None)  # DeepSpeed does nothing with it
        for name, newer in _OLDER.items():
            asked = zero.pop(name, None)
            if asked in (None, AUTO):
                continue
            if zero.get(newer) is not None:
                raise UserError(
                    f"{newer} is set, too, which DeepSpeed does not accept",
                    field=f"{NATIVE}.zero_optimization.{name}",
                    got=asked,
                    remedy=f"Leave it out: it is the older name of {newer}",
                )
            if _typed(asked, "bool", f"zero_optimization.{name}"):
                zero[newer] = {"device": "cpu"}
    read = _section(tree, "")
    for name in HALVES:
        if read.get(name) and "enabled" not in read[name]:
            mine = _is_true(precision) or precision == name
            read[name] = {**read[name], "enabled": AUTO} if mine else {}
    return read


def ignored(given: Mapping[str, Any]) -> Iterator[str]:
    """Notes on keys that are accepted and have no effect here."""
    for path, why in IGNORED.items():
        value = _get(given, path)
        if value not in (None, AUTO) and not _means(value, False):
            yield f"{NATIVE}.{path} is not used: {why}"


def _section(values: Any, path: str) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        switched = '{"enabled": true}' if f"{path}.enabled" in KINDS else "{}"
        raise UserError(
            "it is a section of options",
            field=f"{NATIVE}.{path}",
            got=values,
            allowed=f"a mapping, such as {_EXAMPLES.get(path, switched)}",
        )
    found: dict[str, Any] = {}
    switch = f"{path}.enabled" if f"{path}.enabled" in KINDS and path != "timers.throughput" else ""
    if switch and _means(values.get("enabled"), False):
        return {"enabled": False}
    for name, value in values.items():
        where = f"{path}.{name}" if path else name
        if value is None or name[:1] in tuple("_#/"):  # nothing, or a remark
            continue
        if where in SECTIONS:
            found[name] = _section(value, where)
        elif where in REFUSED:
            _refuse(where, value)
        elif where in IGNORED:
            if value != AUTO and not isinstance(value, Mapping):
                _typed(value, "bool", where)
        elif where in KINDS or path == "optimizer.params":
            kind = KINDS.get(where)
            found[name] = value if kind is None or value == AUTO else _typed(value, kind, where)
        else:
            _refuse_unknown(name, path)
    return {} if switch and "enabled" not in found and path not in HALVES else found


def _typed(value: Any, kind: str, path: str) -> Any:
    """The value as DeepSpeed's classes would convert it: true for "true", 0.001 for "1e-3"."""
    try:
        return _KINDS[kind].validate_python(value)
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(
            f"not a value of it: {said}",
            field=f"{NATIVE}.{path}",
            got=value,
            remedy="Change it, or leave it out",
        ) from None


def _refuse(path: str, value: Any) -> None:
    switch, harmless, reason, instead = REFUSED[path]
    inner = value.get(switch) if isinstance(value, Mapping) else value
    if value == {} or any(_means(inner, one) for one in (AUTO, *harmless)):
        return
    raise UserError(
        f"not supported: {reason}",
        field=f"{NATIVE}.{path}",
        got=value,
        allowed=None if switch else " or ".join(map(repr, harmless)),
        remedy=f"Leave it out{'. ' * bool(instead)}{instead}",
    )


def _means(value: Any, other: Any) -> bool:
    """True if DeepSpeed reads `value` as `other`."""
    if other is None or isinstance(other, str):
        return bool(value == other or str(value).lower() == other)
    try:
        return bool(_KINDS["bool" if isinstance(other, bool) else "number"].validate_python(value) == other)
    except ValidationError:
        return False


def _refuse_unknown(name: str, path: str) -> None:
    below = f"{path}." if path else ""
    every = {*KINDS, *REFUSED, *IGNORED, *SECTIONS}
    known = {p.removeprefix(below).partition(".")[0] for p in every if p.startswith(below)}
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    places = [p.removesuffix(name) for p in sorted(every) if p.split(".")[-1] == name]
    place = next((p for p in places if p.startswith(below) or below.startswith(p)), None)
    remedy = "Leave it out"
    if not path and name in _ACCELERATE:
        near, hint, place = [], "", None
        remedy = f"It is a key of accelerate: leave it out here{_ACCELERATE[name]}"
    if place is not None:
        remedy = f"It belongs in {place[:-1]}" if place else "It belongs at the top"
    known -= {one for one in known if below + one in (*REFUSED, *IGNORED)}
    raise UserError(
        f"'{name}' is not among what this backend hands to DeepSpeed.{hint}",
        field=f"{NATIVE}.{below}{name}",
        allowed=", ".join(sorted(known)),
        remedy=None if near else remedy,
    )


# -- what becomes ours -------------------------------------------------------------------


def _owned(native: dict[str, Any], precision: Any) -> Iterator[tuple[str, str, Any, bool]]:
    """(key, our name, value in our terms, said explicitly and no default) of what is ours to decide."""
    for path in FIELDS:
        if (value := _get(native, path)) not in (None, AUTO):
            yield _field(path, value)
    if _get(native, "zero_optimization.stage") is None:
        yield _field("zero_optimization.stage")
    yield from _precision(native, precision)
    if mode := recomputation(native):
        yield CHECKPOINTING, CHECKPOINTING, mode, True
    yield from _optimizer(native.get("optimizer") or {})


def _field(path: str, value: Any = None) -> tuple[str, str, Any, bool]:
    """Entry of `_owned` for a key of `FIELDS`, with DeepSpeed's default where no value is given."""
    explicit, value = value is not None, DEFAULTS[path] if value is None else value
    if path == "fp16.initial_scale_power":
        value = 2.0**value
    return path, FIELDS[path], None if path == "gradient_clipping" and not value else value, explicit


def recomputation(native: Mapping[str, Any]) -> str | None:
    """The mode of `activation_checkpointing` for DeepSpeed's section of that name; None if it asks for none.

    DeepSpeed applies the section where the model calls deepspeed.checkpointing; here it recomputes the
    model's blocks.
    """
    partitioned, on_host = (
        _get(native, f"{CHECKPOINTING}.{name}") is True
        for name in ("partition_activations", "cpu_checkpointing")
    )
    return "offload" if on_host else "full" if partitioned else None


def _precision(native: Mapping[str, Any], given: Any) -> Iterator[tuple[str, str, Any, bool]]:
    said = {name: _get(native, f"{name}.enabled") for name in HALVES}
    on = [name for name, enabled in said.items() if enabled is True]
    auto = [name for name, enabled in said.items() if enabled == AUTO and _is_true(given)]
    left = on or auto or [name for name, enabled in said.items() if enabled is not False]
    if len(on) == 2:
        raise UserError("bf16 is enabled, too", field=f"{NATIVE}.fp16.enabled", remedy="Enable one of them")
    if len(left) == len(auto) == 2:
        raise UserError(
            f"{NATIVE} leaves the choice between bf16 and fp16 to it",
            field="mixed_precision",
            got=given,
            allowed="bf16, fp16",
            remedy="Set one of them",
        )
    half = left[0] if on or (_is_true(given) and len(left) == 1) else given
    if half != given:
        yield f"{half}.enabled", "mixed_precision", half, True
    elif (half in said and half not in left) or (_is_true(given) and not left):
        off = half if half in said else "fp16"
        yield f"{off}.enabled", "mixed_precision", f"not {off}", True
    if on == ["fp16"] or (said["fp16"] == AUTO and half == "fp16"):
        yield _field("fp16.loss_scale_window")
        yield _field("fp16.initial_scale_power")


def _is_true(given: Any) -> bool:
    return given is not None and str(given).lower() in ("true", "1")


def _optimizer(section: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, bool]]:
    kind, params = section.get("type"), section.get("params") or {}
    if kind in (None, AUTO):
        if any(value != AUTO for value in params.values()):
            raise UserError(
                "without a type DeepSpeed builds no optimizer, and the params have no effect",
                field=f"{NATIVE}.optimizer.type",
                got=kind,
                allowed="Adam, AdamW, SGD",
                remedy="Name the type, or leave the section optimizer out",
            )
        return
    name = kind.lower()
    if name not in _OPTIMIZERS:
        raise UserError(
            "not an optimizer that a configuration can build here",
            field=f"{NATIVE}.optimizer.type",
            got=kind,
            allowed="Adam, AdamW, SGD",
            remedy="Leave the section out. Give the Trainer the optimizer itself, its class, or a function"
            " from the model to it",
        )
    # DeepSpeed's Adam decouples the weight decay by default.
    name = "adamw" if name == "adam" and params.get("adam_w_mode", True) else name
    yield "optimizer.type", "optimizer", name, True
    if name == "adamw" and params.get("torch_adam") is True and "weight_decay" not in params:
        yield _field("optimizer.params.weight_decay")


def _settle(found: dict[str, Any], path: str, name: str, value: Any) -> bool:
    """Take the native value if none was given, and return True then. Equal ones are accepted."""
    given = _get(found, name)
    if given is None or (value in ("bf16", "fp16") and _is_true(given)):
        _put(found, name, value)
        return True
    if _same(given, value) or (name == CHECKPOINTING and given != "none"):
        return False
    raise UserError(
        f"{NATIVE} contradicts it: {path} says {value!r}",
        field=name,
        got=given,
        allowed=f"the same in both, or '{AUTO}' in {NATIVE}",
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
