"""torch's pipeline schedules over the stages of this rank, with shapes that are known before.

Shapes are given and never inferred: the inference of torch (2.13) would run the model and the loss once more,
and a shorter message into a larger buffer would leave the values of an earlier one in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from distributed.parallel.pipeline_layout import TensorForm
from distributed.planner.pipeline import PipelineShape

__all__ = ["CLASSES", "Schedule", "StageModule"]

CLASSES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
    "looped-bfs": schedules.ScheduleLoopedBFS,
    "interleaved-zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}

Forward = Callable[[int, int, Tensor | None], Tensor]
"""(stage, micro-batch, received) -> the loss of the last stage, the output of another."""
Note = Callable[[str, int, int, int], None]
"""(action, micro-batch, stage, rank of the other side) of what a rank does next; -1 for no other side."""
FORWARD, BACKWARD = "forward", "backward"
RECEIVE_ACTIVATION, RECEIVE_GRADIENT = "receive activation", "receive gradient"
SEND_ACTIVATION, SEND_GRADIENT = "send activation", "send gradient"


class StageModule(nn.Module):
    """A stage as torch's schedules call it.

    Args:
        stage: its index.
        forward: computes it.
        parameters: those whose gradients it computes.
    """

    def __init__(self, stage: int, forward: Forward, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.stage, self.micro_batch = stage, 0
        self._compute, self._own = forward, list(parameters)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters of the stage, which its module tree does not show."""
        return iter(self._own)

    def forward(self, received: Tensor | None = None) -> Tensor:
        """The loss of the last stage, the output of another."""
        return self._compute(self.stage, self.micro_batch, received)


class _Stage(PipelineStage):
    """Notes its actions, and raises errors as they are."""

    submod: StageModule
    note: Note

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.note(FORWARD, fwd_chunk_id, self.stage_index, -1)
        self.submod.micro_batch = fwd_chunk_id
        with _bare_errors():
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self.note(BACKWARD, bwd_chunk_id, self.stage_index, -1)
        with _bare_errors():
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        # torch 2.11 compares what the last stage returns with `_LOSS`, too, but its dtype is the loss's.
        if not self.is_last:
            super()._validate_fwd_outputs(outputs)  # type: ignore[misc]  # torch 2.13 has none

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        operations = super().get_fwd_recv_ops(fwd_chunk_id)
        self._note_peer(operations, RECEIVE_ACTIVATION, fwd_chunk_id, self.stage_index - 1)
        return operations

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        operations = super().get_bwd_recv_ops(bwd_chunk_id)
        self._note_peer(operations, RECEIVE_GRADIENT, bwd_chunk_id, self.stage_index + 1)
        return operations

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        self._note_peer(operations, SEND_ACTIVATION, fwd_chunk_id, self.stage_index + 1)
        return operations

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        operations = super().get_bwd_send_ops(bwd_chunk_id)
        self._note_peer(operations, SEND_GRADIENT, bwd_chunk_id, self.stage_index - 1)
        return operations

    def _note_peer(self, operations: Sequence[Any], action: str, micro_batch: int, stage: int) -> None:
        if operations:
            peer = self.stage_index_to_group_rank[stage]
            peer = dist.get_global_rank(self.group, peer) if self.group else peer
            self.note(action, micro_batch, stage, peer)


class Schedule:
    """Runs the micro-batches of a step.

    Args:
        shape: of the pipeline.
        rank: of this process along the axis.
        group: the ranks of the pipeline.
        device: of this rank.
        forms: what each stage but the last gives to the next.
        forward: computes a stage.
        parameters: of a stage, whose gradients it computes.
        note: takes each action as it begins.
    """

    def __init__(
        self,
        shape: PipelineShape,
        rank: int,
        group: Any,
        device: str,
        forms: Sequence[TensorForm],
        forward: Forward,
        parameters: Callable[[int], Sequence[nn.Parameter]],
        note: Note,
    ) -> None:
        self._count = shape.num_microbatches
        self._stages = []
        for index in shape.stages_of(rank):
            stage = _Stage(
                StageModule(index, forward, parameters(index)),
                index,
                shape.num_stages,
                torch.device(device),
                input_args=() if index == 0 else (_meta(forms[index - 1], shape.piece_rows),),
                output_args=(_meta(forms[index], shape.piece_rows) if index < len(forms) else _LOSS,),
                group=group,
            )
            stage.note = note
            self._stages.append(stage)
        several = len(self._stages) > 1
        self._schedule: Any = CLASSES[shape.schedule](
            self._stages if several else self._stages[0], self._count, loss_fn=_as_it_is, scale_grads=False
        )

    def run(self) -> None:
        """Forward and backward of all micro-batches. Collective along the pipeline."""
        for stage in self._stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        with _without_log():
            self._schedule._step_microbatches(
                [()] * self._count, [{}] * self._count, [None] * self._count, return_outputs=False
            )


_LOSS = torch.empty((), device="meta")


def _meta(form: TensorForm, rows: int) -> Tensor:
    # It requires a gradient in any case: behind frozen stages, schedules without bubbles would lose the
    # gradients of the stage that receives it (torch 2.13).
    return torch.empty(form.sized(rows), dtype=form.dtype, device="meta", requires_grad=True)


def _as_it_is(output: Tensor, target: None) -> Tensor:
    return output


@contextmanager
def _bare_errors() -> Iterator[None]:
    """torch puts an error of its own around each, which would hide what failed."""
    try:
        yield
    except RuntimeError as error:
        raise (error.__cause__ or error) from None


@contextmanager
def _without_log() -> Iterator[None]:
    """torch logs the whole schedule when an action fails, and the error is raised anyway."""
    level = schedules.logger.level
    schedules.logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        schedules.logger.setLevel(level)
