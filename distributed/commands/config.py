"""``config``: where each value comes from, which fields there are, and YAML to start from."""

from __future__ import annotations

import argparse
from typing import Any

from distributed.commands.flags import add_config_flags, collect_layers, schema_of
from distributed.commands.tables import print_table
from distributed.config import DistributedConfig, explain, load_layers
from distributed.config.problems import allowed_values, field_names

__all__ = ["add_arguments", "run", "to_yaml"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``config``."""
    actions = {"explain": _explain, "fields": _fields, "show": _show}
    parser.add_argument(
        "action",
        choices=actions,
        help="explain: every value and who set it; fields: every field; show: YAML that loads back.",
    )
    parser.set_defaults(actions=actions)
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print what the action asks.

    Raises:
        UserError: a value is wrong.
    """
    args.actions[args.action](load_layers(collect_layers(args)))
    return 0


def to_yaml(config: DistributedConfig) -> str:
    """YAML that loads back to `config`.

    Only values that somebody set are live; defaults are comments, since an explicit value
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


def _fields(config: DistributedConfig) -> None:
    names = field_names(DistributedConfig)
    rows = [
        [
            name,
            allowed_values(name, DistributedConfig) or "",
            _word(schema_of(name).get("default")),
            _about(name),
        ]
        for name in names
    ]
    print_table(["field", "values", "default", "description"], rows)


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

    return str(yaml.safe_dump(value, width=float("inf"))).removesuffix("...\n").rstrip("\n")
