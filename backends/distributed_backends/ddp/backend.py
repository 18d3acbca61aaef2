"""DDPBackend: a replica per rank, gradients averaged in buckets while backward runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from inspect import signature
from time import perf_counter
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distributed.communication.broadcast import broadcast_values
from distributed.errors import UserError
from distributed.interfaces.backend import CommunicationTimes, Window
from distributed.interfaces.placement import World
from distributed.interfaces.plan import RunPlan
from distributed.parallel.gradient_reducer import GradientReducer
from distributed.parallel.mesh_backend import MeshBackend
from distributed.training.mixins.accumulation import NO_CONTEXT
from distributed.training.torch_backend import StepModule

# Buffers are not broadcast in every forward; torch renamed the argument.
_NEW_NAME = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}


_UNFINISHED = "Expected to have finished reduction in the prior iteration"
"""Start of DDP's message about parameters without a gradient (torch 2.13)."""


class DDPBackend(MeshBackend):
    """torch's DistributedDataParallel around the whole step, loss included. A single
    rank runs without it.

    BatchNorm statistics stay per rank while training, unless `sync_batchnorm`; before
    validation every rank takes rank 0's, so that what is validated is what is saved.

    Where ranks share a model, or send gradients by a codec, they are added by `GradientReducer` instead,
    which takes parts of parameters.
    """

    follows_requires_grad = False
    _reducer: GradientReducer | None = None

    def setup(self, plan: RunPlan) -> World:
        world = super().setup(plan)
        self.sums_gradients = self.shares_model or self.compression is not None
        return world

    def wrap(self, step: StepModule) -> nn.Module:
        if self.world.size == 1:
            return step
        if self.placeholders == "zeros":
            step.met_collectives = self.last_batch.run_collectives
        step.model = self.module = self.with_shared_statistics(self.module)
        if self.sums_gradients:
            if self.original is None:  # what is cut or in stages was sent before
                broadcast_values([*step.parameters(), *step.buffers()])
        else:
            # DDP would send them too, but cannot send every dtype.
            broadcast_values([*step.parameters(), *step.buffers()])
        return self._reduced(step)

    def _reduced(self, step: StepModule) -> nn.Module:
        """`step` with the gradients of what is trainable now reduced."""
        if self.sums_gradients:
            counts = [("", step.count)] if step.reduced_count else []
            self._reducer = self.reducer_of([*self.module.named_parameters(), *counts])
            return step
        return DistributedDataParallel(
            step,
            init_sync=False,
            **_NO_BUFFER_SYNC,
            find_unused_parameters=self.config.find_unused_parameters,
            gradient_as_bucket_view=self.config.gradient_as_bucket_view,
            bucket_cap_mb=self.config.bucket_cap_mb,
        )

    def follow_trainable(self) -> None:
        if self.shares_model:
            super().follow_trainable()
        elif self._reducer is not None:
            self._reducer.remove()
            if self.compression is not None:
                self.compression.begin_again()
            self._reduced(self.step_module)
        elif self.world.size > 1:
            self.model._remove_autograd_hooks()
            self.model = self._reduced(self.step_module)

    @property
    def placeholders(self) -> str:
        collective = self.shares_model or self.last_batch.synchronized is not None
        return super().placeholders if collective or self.world.size == 1 else "zeros"

    def run_window(self, window: Window) -> tuple[Any, Any]:
        try:
            result = super().run_window(window)
            if self.world.size > 1 and self._reducer is None:
                # Otherwise the next collective of this rank would meet a reduction of the others.
                self.model._check_reducer_finalized()
            return result
        except RuntimeError as error:
            if _UNFINISHED not in str(error):
                raise
            raise self._unused_parameters() from error

    def sync_when(self, last: bool) -> AbstractContextManager[Any]:
        if self._reducer is None:
            return super().sync_when(last)
        self._reducer.active = last
        return NO_CONTEXT

    def reduce_gradients(self) -> None:
        if self._reducer is not None:
            start = perf_counter()
            self._reducer.finish()
            self.timers.add("backward", perf_counter() - start)

    def _unused_parameters(self) -> UserError:
        idle = [name for name, p in self.module.named_parameters() if p.requires_grad and p.grad is None]
        named = f", such as '{idle[0]}'" if idle else ""
        return UserError(
            f"rank {self.world.rank}: the loss of a step did not depend on all trainable parameters, and"
            " DDP waits for the gradients of all",
            field="find_unused_parameters",
            got=self.config.find_unused_parameters,
            allowed="true, if some steps leave parameters out" + named,
            remedy="Set find_unused_parameters=true, or freeze the unused parameters with"
            " requires_grad_(False)",
        )

    def warm_up(self, windows: Iterator[Window]) -> None:
        """Run one backward, so that DDP rebuilds its buckets before the first step and not the second
        (torch 2.13: ``Reducer::rebuild_buckets``, called by ``_pre_forward``). The bucket layout decides
        the order in which gloo and NCCL add the values of three or more ranks, hence the bits."""
        if self.world.size < 3 or self._reducer is not None:
            return
        if self.config.find_unused_parameters:  # which never rebuilds
            return
        window = next(windows, None)
        if window is None:
            return
        assert self._watch is not None
        before, watch, self._watch = self._watch.state(whole=True), self._watch, None
        self.set_training(True)
        self.run_window(Window(window.micro_batches[-1:], window.num_samples))
        self.clear_gradients()
        before.put()
        self._watch = watch

    def set_training(self, training: bool) -> None:
        super().set_training(training)
        if not training and self.world.size > 1:
            self.share_buffers()

    def communication_times(self) -> CommunicationTimes | None:
        if self.world.size == 1:
            return CommunicationTimes(0.0)
        if self._reducer is not None:
            return self._reducer.times_per_step()
        # DDP times a sample of its own iterations, by events on a GPU; nanoseconds, means of the whole run.
        timed: dict[str, Any] = self.model._get_ddp_logging_data()
        total, overlap, compute = (
            timed.get(f"avg_backward_{name}_time", 0) * 1e-9
            for name in ("comm", "compute_comm_overlap", "compute")
        )
        return CommunicationTimes(max(0.0, total - overlap), total, compute) if total > 0 else None

    def release(self) -> None:
        if self._reducer is not None:
            self._reducer.remove()
            self._reducer = None
        super().release()
