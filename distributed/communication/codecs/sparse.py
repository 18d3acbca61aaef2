"""Codecs that send a few elements of a gradient: its largest, or random ones.

Sources: Lin et al., Deep Gradient Compression, arXiv 1712.01887 (the largest elements, a threshold from a
sample); Stich et al., Sparsified SGD with Memory, arXiv 1809.07599 (both, with error feedback).
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from distributed.communication.codecs.base import Codec, Gather, Message, Result, Rounds, Sum
from distributed.communication.codecs.sizes import number_sent
from distributed.system.derived_seed import mix
from distributed.system.keyed_permutation import KeyedPermutation

__all__ = ["RandomKCodec", "TopKCodec", "largest_elements", "random_elements"]

_SAMPLE = 1 << 12
"""Elements of the sample that a threshold comes from."""
_MARGIN = 1.5
"""Share of the elements above the threshold of a sample, over the share that is sought: below 1, there would
often be too few."""


def largest_elements(flat: Tensor, count: int) -> Tensor:
    """Indices of the `count` elements of largest magnitude, int64 in rising order; NaN is largest.

    For many elements a threshold from a sample leaves a few candidates, of which the largest are those of
    all. Where there are too few of them, all elements are candidates.
    """
    size = flat.abs()
    if flat.numel() > 4 * _SAMPLE and _MARGIN * count < flat.numel() / 4:
        stride = flat.numel() // _SAMPLE
        sample = size[::stride]
        kept = max(1, ceil(_MARGIN * count / flat.numel() * len(sample)))
        threshold = sample.topk(kept, sorted=False).values.min()
        candidates = torch.nonzero(~(size < threshold)).view(-1)
        if len(candidates) >= count:
            chosen = size[candidates].topk(count, sorted=False).indices
            return candidates[chosen].sort().values
    return size.topk(count, sorted=False).indices.sort().values


class TopKCodec(Codec):
    """The elements of largest magnitude, with their indices (int32 below 2**31 elements), of each rank.

    Each rank chooses its own, so that they are gathered: the bytes that a rank sends grow with the number of
    ranks.
    """

    def rounds(self, values: Tensor, message: Message) -> Rounds:
        flat = values.reshape(-1)
        index = largest_elements(flat, number_sent(flat.numel(), self.options.ratio))
        sent, short = flat[index], index.to(_index_dtype(flat.numel()))
        received = yield Gather(torch.cat([short.view(torch.uint8), sent.view(torch.uint8)]))
        total = torch.zeros_like(flat)
        border = short.numel() * short.element_size()
        for payload in received:  # in the order of the ranks, so that all add up the same bits
            where = payload[:border].clone().view(short.dtype).long()
            total.index_add_(0, where, payload[border:].clone().view(flat.dtype))
        own = torch.zeros_like(flat)
        own[index] = sent
        return Result(total.view(values.shape), own.view(values.shape))


class RandomKCodec(Codec):
    """Random elements, others for each parameter and step, the same on all ranks, so that no index is sent.

    Without error feedback what is sent is divided by the share of the elements, which makes its expectation
    the gradient.
    """

    def rounds(self, values: Tensor, message: Message) -> Rounds:
        flat = values.reshape(-1)
        index = random_elements(flat.numel(), self.options.ratio, message).to(flat.device)
        sent = flat[index] if self.feeds_back else flat[index] * (flat.numel() / len(index))
        # A value that is not finite is noticed at once, and not when it happens to be drawn.
        sent = torch.where(torch.isfinite(flat).all(), sent, torch.full_like(sent, torch.nan))
        summed = yield Sum(sent)
        total, own = torch.zeros_like(flat), torch.zeros_like(flat)
        total[index], own[index] = summed, sent
        return Result(total.view(values.shape), own.view(values.shape))


def random_elements(numel: int, ratio: float, message: Message) -> Tensor:
    """Indices of the elements that are sent of a parameter in a step, int64, all different."""
    order = KeyedPermutation(numel, mix("random-k", message.seed, message.name, message.step))
    return order[: number_sent(numel, ratio)]


def _index_dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel < 2**31 else torch.int64
