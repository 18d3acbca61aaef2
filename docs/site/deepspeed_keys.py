"""The table of every key of DeepSpeed's configuration on its page."""

from __future__ import annotations

import json
from collections.abc import Iterable

from distributed_backends.deepspeed.keys import HANDED, IGNORED, OWNED, REFUSED

from docs.site.markdown import table

__all__ = ["keys_table"]


def keys_table() -> str:
    """Keys by what becomes of them: handed to DeepSpeed, owned by the configuration, ignored, refused."""
    rows = [
        [_keys(section, (key.partition(":")[0] for key in keys.split())), "handed to DeepSpeed", ""]
        for section, keys in HANDED.items()
    ]
    for ours in dict.fromkeys(OWNED.values()):
        rows.append([_keys("", (key for key, place in OWNED.items() if place == ours)), "owned", ours])
    for why in dict.fromkeys(IGNORED.values()):
        rows.append([_keys("", (key for key, reason in IGNORED.items() if reason == why)), "not used", why])
    groups: dict[tuple[str, str], list[str]] = {}
    for key, (switch, harmless, reason, instead) in REFUSED.items():
        accepted = "" if switch else " or ".join(f"`{json.dumps(value)}`" for value in harmless)
        groups.setdefault((reason, instead), []).append(
            f"`{key}`" + (f" (but {accepted})" if accepted else "")
        )
    rows += [
        [", ".join(keys), "refused", f"{why}. {instead}" if instead else why]
        for (why, instead), keys in groups.items()
    ]
    return table(rows, "DeepSpeed's key", "here", "")


def _keys(section: str, keys: Iterable[str]) -> str:
    return (f"`{section}`: " if section else "") + ", ".join(f"`{key}`" for key in keys)
