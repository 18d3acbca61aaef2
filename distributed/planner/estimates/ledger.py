"""Ledger: what is live on a rank, by part, and the moment at which it was most."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from distributed.planner.estimates.device_memory import DeviceMemory

__all__ = ["Ledger", "MemoryParts"]


@dataclass(frozen=True)
class MemoryParts:
    """Bytes of a rank at its peak, by what they hold.

    Attributes:
        parameters: the shard or copy that the rank keeps, and gathered parameters.
        gradients: of parameters, buckets of a reduction included.
        optimizer: state of the optimizer, and its temporary memory while it steps.
        activations: what forward keeps for backward, temporary memory of both, and the batch.
        buffers: of the model.
        framework: staging memory of collectives, and what libraries take whatever the model.
        fragmentation: what the allocator adds by rounding sizes.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    buffers: int = 0
    framework: int = 0
    fragmentation: int = 0

    @property
    def total(self) -> int:
        """Predicted peak."""
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def live(self) -> int:
        """Bytes of tensors, which an allocator counts as allocated."""
        return self.total - self.framework - self.fragmentation

    def with_reserved(self, share: float) -> MemoryParts:
        """With `share` of all live bytes, libraries left out, as fragmentation."""
        live = self.total - self.framework
        return replace(self, fragmentation=self.fragmentation + round(share * live)) if share else self


_FRAGMENTATION = "fragmentation"


class Ledger:
    """Adds up allocations.

    Args:
        device: rounds their sizes.
    """

    def __init__(self, device: DeviceMemory) -> None:
        self._device = device
        self._live = {part.name: 0 for part in fields(MemoryParts)}
        self._total = self._most = 0
        self._peak = dict(self._live)

    def take(self, part: str, nbytes: int) -> None:
        """A tensor of `nbytes` is allocated."""
        taken = self._add(part, nbytes, 1)
        self._total += taken
        if self._total >= self._most:
            self._most, self._peak = self._total, dict(self._live)

    def give(self, part: str, nbytes: int) -> None:
        """A tensor of `nbytes` is freed."""
        self._total -= self._add(part, nbytes, -1)

    def move(self, source: str, target: str, nbytes: int) -> None:
        """A tensor becomes one of another part."""
        self.give(source, nbytes)
        self.take(target, nbytes)

    @property
    def peak(self) -> MemoryParts:
        """The moment at which most was live."""
        return MemoryParts(**self._peak)

    def _add(self, part: str, nbytes: int, sign: int) -> int:
        taken = self._device.taken(nbytes)
        counted = nbytes if taken else 0
        self._live[part] += sign * counted
        self._live[_FRAGMENTATION] += sign * (taken - counted)
        return taken
