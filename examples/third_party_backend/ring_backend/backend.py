"""RingBackend: every rank holds the whole model; gradients are summed around a ring.

`ProcessGroupBackend` connects the ranks and does what all data-parallel backends have in common:
windows of micro-batches, the loss's scale, unscaling, clipping, state. What is left is the one thing
that makes a backend: how gradients are exchanged.
"""

from __future__ import annotations

from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed import ProcessGroupBackend, StepModule, StepResult
from distributed.communication.broadcast import broadcast_values
from distributed.training.torch_backend import group_by_dtype
from ring_backend.section import RingSection

__all__ = ["RingBackend", "ring_all_reduce"]


class RingBackend(ProcessGroupBackend):
    """Averages gradients once per optimizer step, after the last micro-batch's backward.

    Nothing overlaps with backward here, as it does under DDP: that is what its hooks and buckets are
    for. BatchNorm statistics stay per rank while training; before validation all take rank 0's.
    """

    _waited = 0.0

    def wrap(self, step: StepModule) -> nn.Module:
        """Broadcast rank 0's weights: ranks that a launcher started may have built different ones."""
        if self.world.size > 1:
            broadcast_values([*step.parameters(), *step.buffers()])
        return step

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        """Average first: the norm that clipping uses is that of the whole global batch (C6), and
        a value that is not finite on one rank is finite on none, so all skip the step (C8)."""
        start = perf_counter()
        if self.world.size > 1:
            self._average()
        self._waited = perf_counter() - start
        return super().optimizer_step(max_norm, want_norm)

    def _average(self) -> None:
        # `step_module` holds the model and, where only the ranks together know how many tokens
        # counted, a parameter whose gradient is that count: it has to be reduced too (C2).
        parameters = [p for p in self.step_module.parameters() if p.requires_grad]
        options = RingSection.of(self.config)
        step = 1 if options.direction == "right" else -1
        used = torch.tensor([float(p.grad is not None) for p in parameters], device=self.world.device)
        ring_all_reduce(used, self.world.rank, self.world.size, step)
        # Not zeros where no rank has a gradient: weight decay and momentum would move the parameter (C11).
        parameters = [p for p, ranks in zip(parameters, used.tolist(), strict=True) if ranks]
        for parameter in parameters:
            if parameter.grad is None:  # a rank that sent less than its neighbours expect would hang
                parameter.grad = torch.zeros_like(parameter)
        for gradients in group_by_dtype([p.grad for p in parameters if p.grad is not None]):
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            for chunk in flat.split(options.chunk_size or max(1, flat.numel())):
                ring_all_reduce(chunk, self.world.rank, self.world.size, step)
            flat /= self.world.size
            sizes = [gradient.numel() for gradient in gradients]
            for gradient, part in zip(gradients, flat.split(sizes), strict=True):
                gradient.copy_(part.view_as(gradient))

    def set_training(self, training: bool) -> None:
        """Validate with rank 0's buffers, which are those that are saved."""
        super().set_training(training)
        if not training and self.world.size > 1:
            broadcast_values(self.module.buffers())

    def communication_seconds(self) -> float:
        """What the last step's exchange took; it is waited for in full."""
        return self._waited


def ring_all_reduce(flat: Tensor, rank: int, size: int, step: int = 1) -> None:
    """Sum `flat`, 1-dimensional, over all ranks, in place; `step` is 1 to send to the right, -1 to the left.

    Two rounds of ``size - 1`` messages to one neighbour, a `size`-th of the tensor each: in the first a
    piece gathers the sum as it goes round, in the second the finished pieces go round. Every rank
    sends ``2 (size - 1) / size`` of the tensor, however many there are, and all end with the same
    bits, for each piece was summed in one place (Patarasuk and Yuan, 2009).
    """
    position = rank * step % size
    pieces = flat.tensor_split(size)
    inbox = torch.empty_like(pieces[0])  # the first is of the largest
    for turn in range(size - 1):
        mine, theirs = pieces[(position - turn) % size], pieces[(position - turn - 1) % size]
        received = inbox[: theirs.numel()]
        _pass_on(mine, received, rank, size, step)
        theirs += received
    for turn in range(size - 1):
        mine, theirs = pieces[(position + 1 - turn) % size], pieces[(position - turn) % size]
        _pass_on(mine, theirs, rank, size, step)


def _pass_on(outgoing: Tensor, incoming: Tensor, rank: int, size: int, step: int) -> None:
    """Send to one neighbour and receive from the other at the same time: a ring in which every rank
    sends before it receives would deadlock."""
    messages = []
    if outgoing.numel():
        messages.append(dist.P2POp(dist.isend, outgoing, (rank + step) % size))
    if incoming.numel():
        messages.append(dist.P2POp(dist.irecv, incoming, (rank - step) % size))
    for work in dist.batch_isend_irecv(messages) if messages else []:
        work.wait()
