"""Evaluation in the stages of a pipeline: one forward pass at a time, without a schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.parallel.pipeline_pieces import check_inputs, rows_of
from distributed.parallel.staged_model import StagedModel
from distributed.planner.pipeline import PipelineShape
from distributed.training.torch_backend import TorchBackend

__all__ = ["StagedEvaluation"]


class StagedEvaluation:
    """Computes the stages of this rank in turn, and passes their outputs on.

    Args:
        backend: whose model is evaluated.
        staged: the model, which computes one stage at a time.
        shape: of the pipeline.
        rank: of this one along the pipeline.
        group: process group of the ranks of the pipeline.
        inputs: shapes of the tensors of a batch, without their first dimension.
    """

    def __init__(
        self,
        backend: TorchBackend,
        staged: StagedModel,
        shape: PipelineShape,
        rank: int,
        group: Any,
        inputs: tuple[tuple[int, ...], ...],
    ) -> None:
        self._backend, self._staged, self._shape = backend, staged, shape
        self._rank, self._group, self._inputs = rank, group, inputs
        self._sent: list[tuple[Any, Tensor]] = []

    def evaluate(self, batch: Any, forward: Callable[[], Any]) -> Any:
        """What `forward` returns, on the rank that has the last stage; None elsewhere. Collective along the
        pipeline.

        Args:
            batch: what `forward` gives to the model.

        Raises:
            UserError: the tensors of `batch` have other shapes than the first samples.
        """
        check_inputs(batch, self._inputs)
        rows, found = rows_of(batch), None
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
        for stage in self._shape.stages_of(self._rank):
            given = self._receive(stage, rows, found)
            found = self._backend.through(
                f"evaluation of stage {stage}", partial(self._staged.run, stage, given, rows, forward)
            )
            if stage == self._shape.num_stages - 1:
                return found
            self._send(stage, found)
        return None

    def _receive(self, stage: int, rows: int, own: Tensor | None) -> Tensor | None:
        """The input of a stage: `own` if this rank has computed it, None for the first stage."""
        if stage == 0:
            return None
        source, form = self._shape.rank_of(stage - 1), self._staged.form_after(stage - 1)
        if source == self._rank:
            return own
        buffer = torch.empty(form.sized(rows), dtype=form.dtype, device=self._backend.world.device)
        dist.recv(buffer, group=self._group, group_src=source)
        return buffer

    def _send(self, stage: int, output: Tensor) -> None:
        """Start to send the output of a stage, unless this rank has the next one, too."""
        target = self._shape.rank_of(stage + 1)
        if target != self._rank:
            wire = output.detach().contiguous()
            self._sent.append((dist.isend(wire, group=self._group, group_dst=target), wire))
