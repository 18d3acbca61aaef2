"""Command-line flags made from the configuration's schema, so that they cannot go stale."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel

from distributed.commands.parser import add_set
from distributed.config import DistributedConfig, Layer, parse_assignments, read_file
from distributed.config.load import all_fields, top_fields
from distributed.errors import UserError

# Short names that a tired person types, beside the field's own.
_ALIASES = {"resume_from_checkpoint": "--resume", "mlflow_tracking": "--mlflow"}
_FLAGS_ELSEWHERE = {
    "--gpus": "num_gpus",
    "--nproc-per-node": "gpus_per_node",
    "--strategy": "backend",
    "--lr": "learning_rate",
    "--max-epochs": "epochs",
    "--num-epochs": "epochs",
    "--precision": "mixed_precision",
}
"""Flag of other tools -> our field of the same meaning and values."""
_PREFIX = "field:"
_OWN = "own:"
_AMBIGUOUS = "ambiguous:gpus"


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--config``, ``--set``, one flag per flat field, and those that fields of sections declare; a
    flag that is not given sets nothing. Call it after the verb's own flags: these come first."""
    sources = parser.add_argument_group(
        "configuration", "Weakest first: defaults, --config, the flags below, --set."
    )
    sources.add_argument("--config", metavar="FILE", help="YAML file with configuration fields.")
    add_set(
        sources, "Set any field, also in a section (data.per_sample_rng=true); overrides flags. Repeatable."
    )
    group = parser.add_argument_group("configuration fields")
    for name in top_fields():
        schema = schema_of(name)
        if "$ref" not in schema:
            flags = [f"--{name.replace('_', '-')}", *filter(None, [_ALIASES.get(name)])]
            _add_field(group, name, flags, schema)
    for name in all_fields():
        schema = schema_of(name)
        # A plugin's flag that the verb already has is left out: --set reaches its field.
        if "." in name and "flag" in schema and schema["flag"] not in parser._option_string_actions:
            _add_field(group, name, [schema["flag"]], schema)
    for flag, name in _FLAGS_ELSEWHERE.items():
        if flag not in parser._option_string_actions:
            about = f"Same as --{name.replace('_', '-')}."
            metavar = _metavar(schema_of(name).get("anyOf", [schema_of(name)]))
            group.add_argument(flag, dest=_PREFIX + name, action=_Alias, metavar=metavar, help=about)
    group.add_argument(
        "--nnodes",
        action=_NumNodes,
        metavar="N|MIN:MAX",
        help="Number of hosts, as for torchrun: MIN:MAX is --num-nodes MAX with elastic.min_nodes=MIN.",
    )


def collect_layers(args: argparse.Namespace) -> list[Layer]:
    """Layers of the flags of `add_config_flags`: file, then flags, then ``--set``.

    Raises:
        UserError: the file cannot be read, or an assignment names no field, or ``--gpus`` is ambiguous.
    """
    layers = [read_file(args.config)] if args.config is not None else []
    given = {
        name.removeprefix(_PREFIX): value
        for name, value in vars(args).items()
        if name.startswith(_PREFIX) and value is not None
    }
    layers += [Layer("flag", given), Layer("--set", parse_assignments(args.set))]
    _check_gpus(getattr(args, _AMBIGUOUS, None), layers)
    return layers


def _check_gpus(number: str | None, layers: Sequence[Layer]) -> None:
    """Refuse ``--gpus`` for several hosts: other tools count the GPUs of one host by it, or of all."""
    nodes = [layer.values["num_nodes"] for layer in layers if "num_nodes" in layer.values] or [1]
    if number is not None and str(nodes[-1]) != "1":
        raise UserError(
            f"ambiguous on {nodes[-1]} hosts: a number per host, or over all hosts",
            field="--gpus",
            got=number,
            remedy="Use --gpus-per-node for a number per host, or --num-gpus for the number over all hosts",
        )


def add_model_flags(group: argparse._ArgumentGroup, model: type[BaseModel]) -> None:
    """Add one flag per field of `model`, a repeatable one where it holds several values."""
    for name, schema in model.model_json_schema()["properties"].items():
        flag = f"--{name.replace('_', '-')}"
        if schema.get("type") in ("array", "object"):
            metavar = "NAME=VALUE" if schema["type"] == "object" else "TEXT"
            about = f"{_help(schema)} Repeatable."
            group.add_argument(flag, dest=f"{_OWN}{name}", action="append", metavar=metavar, help=about)
        else:
            _add_field(group, name, [flag], schema, prefix=_OWN)


def collect_model(args: argparse.Namespace) -> dict[str, Any]:
    """Values of the flags of `add_model_flags`, by field; a flag not given is left out."""
    own = {name.removeprefix(_OWN): value for name, value in vars(args).items() if name.startswith(_OWN)}
    return {name: value for name, value in own.items() if value is not None}


def field_of(action: argparse.Action) -> str:
    """The field that an argument of `add_config_flags` sets; its own name for another argument."""
    return action.dest.removeprefix(_PREFIX)


def schema_of(name: str) -> dict[str, Any]:
    """The JSON schema of the field `name`, dotted for sections."""
    root = _root_schema()
    current = root
    for part in name.split("."):
        if "$ref" in current:
            current = root["$defs"][current["$ref"].rpartition("/")[2]]
        current = current["properties"][part]
    return current


@cache
def _root_schema() -> dict[str, Any]:
    return DistributedConfig.model_json_schema()


class _Alias(argparse.Action):
    """A flag of other tools; notes ``--gpus``, which is not clear on several hosts."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, values)
        if option == "--gpus":
            setattr(namespace, _AMBIGUOUS, values)


class _NumNodes(argparse.Action):
    """``--nnodes 4`` or ``--nnodes 1:4``; the schema judges the numbers."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        fewest, colon, most = str(values).partition(":")
        setattr(namespace, f"{_PREFIX}num_nodes", most if colon else fewest)
        if colon:
            setattr(namespace, f"{_PREFIX}elastic.min_nodes", fewest)


def _add_field(
    group: argparse._ArgumentGroup, name: str, flags: list[str], schema: dict[str, Any], prefix: str = _PREFIX
) -> None:
    options = schema.get("anyOf", [schema])
    kinds = {option.get("type") for option in options} - {"null"}
    about: dict[str, Any] = {"dest": prefix + name, "default": None, "help": _help(schema)}
    if kinds == {"boolean"}:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **about)
        return
    about["metavar"] = _metavar(options)
    if "boolean" in kinds:
        group.add_argument(*flags, nargs="?", const=True, type=_switch_or_text, **about)
        off = [f"--no-{flag.removeprefix('--')}" for flag in flags]
        group.add_argument(*off, action="store_false", dest=about["dest"], default=None)
        return
    # Values stay text here: the schema alone judges them, with the same words as for a file.
    group.add_argument(*flags, **about)


def _help(schema: dict[str, Any]) -> str:
    default = (
        schema.get("default") or None if schema.get("type") in ("array", "object") else schema.get("default")
    )
    shown = str(default).lower() if isinstance(default, bool) else default
    text = f"{schema.get('description', '')}{'' if default is None else f' Default: {shown}.'}"
    return text.strip().replace("%", "%%")


def _metavar(options: list[dict[str, Any]]) -> str:
    for option in options:
        if "enum" in option:
            return "{" + ",".join(map(str, option["enum"])) + "}"
    kinds = {option.get("type") for option in options}
    return "N" if "integer" in kinds else "X" if "number" in kinds else "TEXT"


def _switch_or_text(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)
