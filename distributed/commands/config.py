"""``config``: the origin of each value, the list of fields, and YAML to start from."""

from __future__ import annotations

import argparse
from typing import Any

from distributed.commands.flags import add_config_flags, collect_layers, schema_of
from distributed.commands.tables import print_table
from distributed.config import DistributedConfig, explain, load_layers
from distributed.config.load import all_fields
from distributed.config.validation_errors import allowed_values
from distributed.errors import UserError

_FIELD_COLUMNS = ["field", "values", "default", "description"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``config``."""
    actions = {"explain": _explain, "fields": _fields, "show": _show}
    parser.add_argument(
        "action",
        choices=actions,
        help="explain: every value and its source; fields: every field; show: YAML that can be loaded again.",
    )
    parser.add_argument("--markdown", action="store_true", help="fields: as a Markdown table.")
    parser.set_defaults(actions=actions)
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the action and print its result.

    Raises:
        UserError: a value is wrong.
    """
    if args.markdown and args.action != "fields":
        raise UserError(
            "only `config fields` can be printed as Markdown", field="--markdown", allowed="config fields"
        )
    action = _markdown_fields if args.markdown else args.actions[args.action]
    action(load_layers(collect_layers(args)))
    return 0


def to_yaml(config: DistributedConfig) -> str:
    """YAML from which `config` can be loaded.

    Only explicitly set values are live; defaults are comments, because an explicit value
    may conflict with others where a default gives way.
    """
    lines: list[str] = []
    for name, value, origin in explain(config):
        section, _, leaf = name.rpartition(".")
        live = origin != "default"
        if section and f"{section}:" not in lines and f"# {section}:" not in lines:
            lines.append(f"{section}:" if _has_live(config, section) else f"# {section}:")
        lines.append(f"{'' if live else '# '}{'  ' if section else ''}{leaf}: {_scalar(value)}")
    return "\n".join(lines) + "\n"


def _explain(config: DistributedConfig) -> None:
    rows = [[name, _word(value), origin, _about(name)] for name, value, origin in explain(config)]
    styles = ["dim" if origin == "default" else "bold" for _, _, origin, _ in rows]
    print_table(["field", "value", "from", "description"], rows, styles)


def _field_rows() -> list[list[str]]:
    return [
        [
            name,
            allowed_values(name, DistributedConfig) or "",
            _word(schema_of(name).get("default")),
            _about(name),
        ]
        for name in all_fields()
    ]


def _fields(config: DistributedConfig) -> None:
    print_table(_FIELD_COLUMNS, _field_rows())


def _markdown_fields(config: DistributedConfig) -> None:
    rows = [[f"`{name}`", *(cell.replace("|", "\\|") for cell in rest)] for name, *rest in _field_rows()]
    for row in [_FIELD_COLUMNS, ["---"] * len(_FIELD_COLUMNS), *rows]:
        print(f"| {' | '.join(row)} |")


def _show(config: DistributedConfig) -> None:
    print(to_yaml(config), end="")


def _about(name: str) -> str:
    return str(schema_of(name).get("description", ""))


def _has_live(config: DistributedConfig, section: str) -> bool:
    return any(name.startswith(f"{section}.") and origin != "default" for name, _, origin in explain(config))


def _word(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _scalar(value: Any) -> str:
    import yaml

    return (
        str(yaml.safe_dump(value, width=float("inf"), default_flow_style=True))
        .removesuffix("...\n")
        .rstrip("\n")
    )
