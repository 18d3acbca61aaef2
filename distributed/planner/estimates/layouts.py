"""The layout that a backend declares for predictions of its memory (`BackendSpec.memory`)."""

from __future__ import annotations

from distributed.errors import UserError
from distributed.planner.estimates.layout import Layout
from distributed.planner.estimates.split import Split
from distributed.registry.catalog import get_catalog, load_target

__all__ = ["layout_of", "predicted_backends"]


def predicted_backends() -> list[str]:
    """Names of the installed backends whose memory is predicted."""
    return sorted(name for name, spec in get_catalog().backends.items() if spec.memory)


def layout_of(split: Split) -> type[Layout]:
    """How the backend of `split` divides a model.

    Raises:
        UserError: its memory is not predicted.
    """
    spec = get_catalog().backend(split.backend)
    if not spec.memory:
        others = spec.inner is not None
        raise UserError(
            "the memory of a rank is not predicted for this backend"
            + (", whose ranks are those of another" if others else ""),
            field="backend",
            got=split.backend,
            allowed=", ".join(predicted_backends()),
            remedy=f"{'Name the one that its ranks run' if others else 'Choose one of these'}, or measure a"
            " run",
        )
    declared: type[Layout] = load_target(spec.memory)
    return declared.of(split)
