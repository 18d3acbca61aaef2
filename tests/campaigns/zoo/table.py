"""All entries of the zoo, and their results as a table of docs/zoo.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.campaigns.zoo import loaders, other_models, transformers_models
from tests.campaigns.zoo.entry import Entry, Result

__all__ = ["ENTRIES", "render"]

ENTRIES: dict[str, Entry] = {
    **transformers_models.ENTRIES,
    **other_models.ENTRIES,
    **loaders.ENTRIES,
}


def render(
    found: Mapping[tuple[str, str], Result], entries: Mapping[str, Entry], backends: Sequence[str]
) -> str:
    """A table in Markdown, and below it what was refused with which words."""
    refusals: list[str] = []
    lines = [
        f"| model | library | lines | {' | '.join(backends)} |",
        f"|---|---|---|{'---|' * len(backends)}",
    ]
    for name, entry in entries.items():
        cells = []
        for backend in backends:
            result = found[name, backend]
            if result.refused is None:
                cells.append(f"{result.distance:.0e}" + ("" if result.passes(entry) else " **differs**"))
                continue
            if result.refused not in refusals:
                refusals.append(result.refused)
            cells.append(f"refused ({refusals.index(result.refused) + 1})")
        lines.append(f"| {name} | {entry.library} | {entry.lines} | {' | '.join(cells)} |")
    notes = [f"{number}. {text}" for number, text in enumerate(refusals, 1)]
    return "\n".join([*lines, *([""] if notes else []), *notes])
