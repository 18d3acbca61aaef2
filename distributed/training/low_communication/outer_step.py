"""Outer optimizer steps, the division of a model into fragments, and the schedule of their exchanges.

All of it as functions of tensors and numbers, without communication.

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

__all__ = ["OuterRule", "divide", "is_due", "share_of", "take_outer_step", "wide"]


@dataclass(frozen=True)
class OuterRule:
    """Hyperparameters of local SGD, DiLoCo or streaming DiLoCo.

    Attributes:
        period: optimizer steps between two outer steps of a fragment.
        learning_rate: of the outer optimizer, which is SGD.
        momentum: of the outer optimizer.
        nesterov: whether the outer optimizer uses Nesterov momentum.
        fragments: number of fragments of the model, which are exchanged in turn.
        overlap: number of optimizer steps for which the exchange of a fragment is under way.
        mixing: weight, from 0 to 1, of a rank's own parameters in those after an outer step.
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
        """The hyperparameters in a configuration whose mode has a period. Local SGD is an outer SGD with a
        learning rate of 1 and without momentum."""
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
    """Whether the exchange of a fragment begins after an optimizer step. The fragments follow each other at
    equal distances, the last one at the end of the period.

    Args:
        step: number of optimizer steps since all ranks had the same weights, at least 1.
        fragment: index of the fragment.
    """
    first = rule.period * (fragment + 1) // rule.fragments
    return step >= first and (step - first) % rule.period == 0


def divide(sizes: Mapping[str, int], number: int) -> list[list[str]]:
    """Divide parameters into fragments: lists of consecutive names with about equal numbers of elements.

    Args:
        sizes: number of elements of each parameter, by name.
        number: number of fragments.

    Raises:
        UserError: there are fewer parameters than fragments.
    """
    if number > len(sizes):
        raise UserError(
            "each fragment of the model has at least one parameter, and the model has too few",
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


def share_of(weight: float, total: float, number: int) -> float:
    """Weight of one rank in a mean over the ranks.

    Args:
        weight: samples, or unmasked tokens, that the rank has consumed.
        total: sum of the weights of all ranks; if it is 0, all of them count the same.
        number: number of ranks.
    """
    return weight / total if total else 1.0 / number


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which differences of parameters are computed and added up: at least float32."""
    return dtype if dtype.itemsize > 2 else torch.float32


@torch.no_grad()
def take_outer_step(anchor: Tensor, delta: Tensor, velocity: Tensor | None, rule: OuterRule) -> None:
    """Take a step of the outer optimizer, in place.

    Args:
        anchor: a parameter after the last outer step, equal on all ranks.
        delta: `anchor` less the mean of the ranks' own parameters: the gradient of the outer optimizer.
        velocity: momentum buffer of the outer optimizer; None without momentum.
    """
    if velocity is not None:
        velocity.mul_(rule.momentum).add_(delta)
        delta = delta.add(velocity, alpha=rule.momentum) if rule.nesterov else velocity
    anchor.copy_(anchor.to(delta.dtype).sub(delta, alpha=rule.learning_rate))
