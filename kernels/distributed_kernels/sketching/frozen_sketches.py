"""A layer's frozen halves: generated from a seed, or given by hand."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from distributed_kernels.errors import KernelError
from distributed_kernels.sketching.random_signs import SIGN_ALGORITHM, sketch_signs

__all__ = ["GivenSketch", "SignSketch", "Sketch"]

Range = tuple[int, int]


class Sketch(nn.Module):
    """The frozen halves of a layer in -> out: `frozen_in` (num_in, in) and `frozen_out` (out, num_out).

    Args:
        in_features, out_features: sizes of the layer.
        num_in, num_out: rows of `frozen_in`, columns of `frozen_out`.

    Attributes:
        in_range, out_range: which columns of `frozen_in` and rows of `frozen_out` this rank uses, as
            (first, end): all of them, unless the layer is cut over a group (`tensor_parallel`).
    """

    def __init__(self, in_features: int, out_features: int, num_in: int, num_out: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.num_in, self.num_out = num_in, num_out
        self.in_range, self.out_range = (0, in_features), (0, out_features)

    def matrices(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(frozen_in, frozen_out) of this rank's ranges, contiguous."""
        return self.part(self.in_range, self.out_range, device, dtype)

    def whole(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(frozen_in, frozen_out) of all columns and rows."""
        return self.part((0, self.in_features), (0, self.out_features), device, dtype)

    @abstractmethod
    def part(
        self, columns: Range, rows: Range, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """(frozen_in[:, columns], frozen_out[rows])."""

    @abstractmethod
    def checksum(self) -> int:
        """A number that two equal sketches share, on any device and whatever their ranges."""

    @abstractmethod
    def export_sketch(self) -> Any:
        """Export the sketch for `import_sketch` on another rank, as plain data or CPU tensors."""

    @abstractmethod
    def import_sketch(self, state: Any) -> None:
        """Become the sketch that `export_sketch` described."""

    def extra_repr(self) -> str:
        return f"{self.num_in}+{self.num_out}"


class SignSketch(Sketch):
    """Entries +-1/sqrt(num) from `sketch_signs`: a seed is all that is saved or sent.

    The matrices are made when first used and kept outside the module's buffers: there is nothing
    for a wrapper to broadcast at every forward, and nothing that could get out of step.

    Args:
        seed: 0 to 2**62 - 1. Layers of equal shape and seed have equal sketches.
    """

    def __init__(self, in_features: int, out_features: int, num_in: int, num_out: int, seed: int) -> None:
        super().__init__(in_features, out_features, num_in, num_out)
        if not 0 <= seed < 2**62:
            raise KernelError(
                "seed: not in range", got=seed, allowed="0 to 2**62 - 1", remedy="Choose another seed"
            )
        self.seed = seed
        self._made: tuple[Any, tuple[Tensor, Tensor]] | None = None

    def matrices(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key = (device, dtype, self.seed, self.in_range, self.out_range)
        if self._made is not None and self._made[0] == key:
            return self._made[1]
        with torch.inference_mode(False):  # what is kept has to serve training, too
            made = super().matrices(device, dtype)
        if type(made[0]) is Tensor and device.type != "meta":
            self._made = (key, made)
        return made

    def part(
        self, columns: Range, rows: Range, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        into, out = (self.num_in, columns[1] - columns[0]), (rows[1] - rows[0], self.num_out)
        frozen_in = sketch_signs(2 * self.seed, into, offset=(0, columns[0]), device=device, dtype=dtype)
        frozen_out = sketch_signs(2 * self.seed + 1, out, offset=(rows[0], 0), device=device, dtype=dtype)
        return frozen_in.mul_(self.num_in**-0.5), frozen_out.mul_(self.num_out**-0.5)

    def checksum(self) -> int:
        made = None if self._made is None else self._made[0]
        device = torch.device("cpu") if made is None else made[0]
        whole = made is not None and made[3:] == ((0, self.in_features), (0, self.out_features))
        # What training uses, where it is there; its dtype may differ between ranks, its signs may not.
        pair = self._made[1] if self._made is not None and whole else self.whole(device, torch.float32)
        return _combine(self.seed, *SIGN_ALGORITHM.encode(), *(_digest(m > 0) for m in pair))

    def export_sketch(self) -> Any:
        return self.get_extra_state()

    def import_sketch(self, state: Any) -> None:
        self.set_extra_state(state)

    def get_extra_state(self) -> dict[str, Any]:
        """The seed and the name of the function that makes signs of it."""
        return {"seed": self.seed, "algorithm": SIGN_ALGORITHM}

    def set_extra_state(self, state: Any) -> None:
        """Take over a saved seed.

        Raises:
            KernelError: the signs were made by another function.
        """
        if state["algorithm"] != SIGN_ALGORITHM:
            raise KernelError(
                "sketch: saved by a version that generates other signs",
                got=state["algorithm"],
                allowed=SIGN_ALGORITHM,
                remedy="Load it with the version that saved it, and save the layer's dense_weight()",
            )
        self.seed, self._made = int(state["seed"]), None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, seed={self.seed}"


class GivenSketch(Sketch):
    """Matrices given by hand, kept as buffers: they are saved, and every rank has to hold the same.

    Args:
        u1: (r1, out).
        u2: (in, r2).
    """

    frozen_in: Tensor
    frozen_out: Tensor

    def __init__(self, u1: Tensor, u2: Tensor, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(u2.shape[0], u1.shape[1], u2.shape[1], u1.shape[0])
        for name, tensor in (("frozen_in", u2.mT), ("frozen_out", u1.mT)):
            kept = tensor.detach().to(device=device, dtype=dtype).contiguous()
            self.register_buffer(name, kept.clone() if kept.data_ptr() == tensor.data_ptr() else kept)

    def part(
        self, columns: Range, rows: Range, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        frozen_in = self.frozen_in[:, slice(*columns)].to(device, dtype)
        return frozen_in.contiguous(), self.frozen_out[slice(*rows)].to(device, dtype)

    def checksum(self) -> int:
        return _combine(1, _digest(self.frozen_in), _digest(self.frozen_out))

    def export_sketch(self) -> Any:
        return [self.frozen_in.cpu(), self.frozen_out.cpu()]

    def import_sketch(self, state: Any) -> None:
        with torch.no_grad():
            self.frozen_in.copy_(state[0])
            self.frozen_out.copy_(state[1])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _digest(matrix: Tensor) -> int:
    """A position-weighted sum of the elements' bits, modulo 2**64: exact, in any order of adding."""
    bits = matrix.detach().contiguous().reshape(-1).view(_INTEGERS[matrix.element_size()]).long()
    weights = torch.arange(1, 2 * bits.numel() + 1, 2, device=bits.device)
    return int((bits * weights).sum()) ^ (matrix.shape[0] << 32)


def _combine(*numbers: int) -> int:
    total = 0
    for number in numbers:
        total = (total * 0x9E3779B97F4A7C15 + number) % 2**64
    return total
