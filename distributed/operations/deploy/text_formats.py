"""Shell words and YAML from which every string comes back as it was."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_BREAKS = re.compile(r"[\r\x85\u2028\u2029\ufeff]")


def quote(text: str) -> str:
    """`text` as one word of bash, on one line: sbatch refuses scripts with carriage returns, and reads
    lines that begin with ``#SBATCH``.
    """
    if not _CONTROL.search(text):
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", escaped) + "'"


def dump(documents: Iterable[Mapping[str, Any]]) -> str:
    """`documents` as YAML in which every string comes back as it was."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        # Other breaks than a line feed, a block or a plain word would turn into one.
        style = '"' if _BREAKS.search(value) else "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    found: str = yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)
    return found
