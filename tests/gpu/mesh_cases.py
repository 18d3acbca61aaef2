"""The meshes that are compared with one process; imports nothing of torch, for the catalog."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["MESHES", "SECONDS", "Case"]

SECONDS = 90.0
"""Time limit of a row on a GPU."""


@dataclass(frozen=True)
class Case:
    """A mesh.

    Attributes:
        ranks: number of ranks.
        parallel: section ``parallel`` of the configuration.
        model: name in `tests.parallel.models` or `tests.parallel.expert_models`.
        backend: which trains it.
    """

    ranks: int
    parallel: Mapping[str, Any] = field(default_factory=dict)
    model: str = "dilated"
    backend: str = "pytorch-ddp"


MESHES: dict[str, Case] = {
    "tensor-2": Case(2, {"tensor": 2}),
    "tensor-4": Case(4, {"tensor": 4}),
    "pipeline-1f1b": Case(2, {"pipeline": 2, "schedule": "1f1b"}),
    "context-ring": Case(2, {"context": 2, "context_attention": "ring"}, "llama"),
    "context-ulysses": Case(2, {"context": 2, "context_attention": "ulysses"}),
    "expert": Case(2, {"expert": 2}, "moe"),
    "fsdp-2": Case(2, backend="fsdp"),
    "dp2-tp2": Case(4, {"tensor": 2}),
    "pp2-tp2": Case(4, {"pipeline": 2, "tensor": 2}),
    "pipeline-gpipe": Case(2, {"pipeline": 2, "schedule": "gpipe"}),
    "pipeline-zbv": Case(2, {"pipeline": 2, "schedule": "zbv"}),
    "llama-tensor-2": Case(2, {"tensor": 2}, "llama"),
    "llama-fsdp2-tp2": Case(4, {"tensor": 2}, "llama", "fsdp"),
    "ddp-2": Case(2),
}
"""Name -> mesh, the most important first."""
