"""The algorithm, as functions of tensors and numbers: outer steps, and which part of a model is due when.

Sources: local SGD, Stich 2019 (arXiv 1805.09767); DiLoCo, Douillard et al. 2023 (arXiv 2311.08105),
algorithm 1; streaming DiLoCo, Douillard et al. 2025 (arXiv 2501.18512), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from distributed.config.low_communication import LowCommunicationSection
from distributed.errors import UserError

__all__ = ["OuterRule", "divide", "is_due", "take_outer_step", "wide"]


@dataclass(frozen=True)
class OuterRule:
    """The numbers of an algorithm.

    Attributes:
        period: optimizer steps between two outer steps of a part.
        learning_rate, momentum, nesterov: of the outer optimizer, which is SGD.
        fragments: number of parts that are exchanged in turn.
        overlap: optimizer steps during which a part is exchanged.
        mixing: share of a rank's own parameters that it keeps at an outer step.
    """

    period: int
    learning_rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    fragments: int = 1
    overlap: int = 0
    mixing: float = 0.0

    @classmethod
    def of(cls, section: LowCommunicationSection) -> OuterRule:
        """The numbers that a configuration sets for a mode with a period. Local SGD is an outer SGD of rate 1
        without momentum."""
        assert section.period is not None
        if section.mode == "local-sgd":
            return cls(section.period)
        outer = section.outer_learning_rate, section.outer_momentum, section.nesterov
        if section.mode == "diloco":
            return cls(section.period, *outer)
        return cls(section.period, *outer, section.fragments, section.overlap_steps, section.mixing)

    @property
    def merges_all(self) -> bool:
        """Whether all ranks have the same weights after each outer step."""
        return self.fragments == 1 and self.overlap == 0 and self.mixing == 0.0


def is_due(step: int, fragment: int, rule: OuterRule) -> bool:
    """Whether the exchange of part `fragment` begins after `step`, counted from 1 since all ranks had equal
    weights. The parts follow each other at equal distances, the last one at the end of the period."""
    first = rule.period * (fragment + 1) // rule.fragments
    return step >= first and (step - first) % rule.period == 0


def divide(sizes: Mapping[str, int], number: int) -> list[list[str]]:
    """Names in `number` parts of consecutive ones, with about as many elements each.

    Args:
        sizes: number of elements by name.

    Raises:
        UserError: there are fewer names than parts.
    """
    if number > len(sizes):
        raise UserError(
            "a part of the model that is exchanged has at least one parameter, and there are too few",
            field="low_communication.fragments",
            got=number,
            allowed=f"1 to {len(sizes)}",
            remedy="Use fewer fragments, or mode=diloco",
        )
    total, reached = sum(sizes.values()), 0
    parts: list[list[str]] = [[]]
    left = len(sizes)
    for name, size in sizes.items():
        full = reached * number >= total * len(parts)
        if parts[-1] and len(parts) < number and (full or left == number - len(parts)):
            parts.append([])
        parts[-1].append(name)
        reached, left = reached + size, left - 1
    return parts


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which changes of parameters are computed and added up: at least float32."""
    return dtype if dtype.itemsize > 2 else torch.float32


@torch.no_grad()
def take_outer_step(anchor: Tensor, delta: Tensor, velocity: Tensor | None, rule: OuterRule) -> None:
    """Step with the outer optimizer, in place.

    Args:
        anchor: the parameter that all ranks know.
        delta: by how much it is above the mean of the ranks' own; the gradient of the outer optimizer.
        velocity: its momentum; None if the rule has none.
    """
    if velocity is not None:
        velocity.mul_(rule.momentum).add_(delta)
        delta = delta.add(velocity, alpha=rule.momentum) if rule.nesterov else velocity
    anchor.copy_(anchor.to(delta.dtype).sub(delta, alpha=rule.learning_rate))
