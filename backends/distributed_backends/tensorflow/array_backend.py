"""ArrayBackend: Keras models on the ranks of another backend, which sums their gradients as arrays."""

from __future__ import annotations

import distributed_backends.tensorflow.import_tensorflow  # noqa: F401 - before TensorFlow itself

# isort: split
from collections.abc import Callable, Sequence
from copy import copy
from time import perf_counter
from typing import Any

import numpy as np
import tensorflow as tf

from distributed.errors import UserError
from distributed.interfaces.backend import Backend, CommunicationTimes
from distributed.interfaces.collectives import Collectives
from distributed.interfaces.placement import World
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.task import Task
from distributed.registry.catalog import load_target
from distributed_backends.tensorflow.backend import TensorFlowBackend
from distributed_backends.tensorflow.step import Finished, StepFunctions
from distributed_backends.tensorflow.strategy import default_strategy
from distributed_backends.tensorflow.values import to_array


class ArrayBackend(TensorFlowBackend):
    """One replica of TensorFlow per rank, without a cluster; `Collectives` connect the ranks.

    TensorFlow's own ranks must meet before it starts. These need not: a model may exist before.
    """

    _ranks: Collectives
    _steps: ArraySteps | None = None

    def join(self, plan: RunPlan, device: str) -> World:
        ranks: Collectives = load_target(plan.spec.collectives)()
        world = ranks.join(plan, device)
        self._ranks, self.store = ranks, ranks.store
        return world

    def make_strategy(self, plan: RunPlan) -> Any:
        return default_strategy(plan, self.world)

    def make_functions(self) -> StepFunctions:
        if self.world.size == 1:
            return super().make_functions()
        parts = self.strategy, self.module, self.optimizer.keras, self.objective, self._seed_states
        self._steps = ArraySteps(self._ranks.sum_arrays, *parts)
        return self._steps

    def prepare(self, task: Task) -> None:
        super().prepare(task)
        if self.world.size > 1:
            self._take_first_ranks_values()

    def _take_first_ranks_values(self) -> None:
        """Begin with rank 0's weights, statistics and optimizer."""
        seeds = {id(state) for state in self._seed_states}
        variables = [v for v in self.module.variables if id(v) not in seeds] + self.optimizer.keras.variables
        forms = [(v.path.rpartition("/")[2], tuple(v.shape), str(v.dtype)) for v in variables]
        theirs, arrays = self.broadcast_object((forms, [to_array(v) for v in variables]))
        if theirs != forms:
            raise UserError(
                "ranks have built different models or optimizers",
                field="model",
                got=f"{len(forms)} variables on rank {self.world.rank}, {_first_difference(forms, theirs)}",
                allowed=f"the {len(theirs)} of rank 0",
                remedy="Build the same on every rank, whatever its number",
            )
        for variable, array in zip(variables, arrays, strict=True):
            variable.assign(array)

    # -- cooperation -----------------------------------------------------------------

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        return self._ranks.all_reduce(values)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return self._ranks.broadcast_object(value, root)

    def gather_objects(self, value: Any) -> list[Any]:
        return self._ranks.gather_objects(value)

    def barrier(self) -> None:
        self._ranks.barrier()

    def communication_times(self) -> CommunicationTimes | None:
        return super().communication_times() if self._steps is None else self._steps.times_per_step()

    def alone(self) -> Backend:
        single = super().alone()
        assert isinstance(single, ArrayBackend)
        single._ranks = copy(self._ranks)
        single._ranks.world = single.world
        return single

    def teardown(self) -> None:
        self._ranks.leave()


class ArraySteps(StepFunctions):
    """A step in two compiled parts: before and after the sum over the ranks, which is not TensorFlow's.

    Args:
        sum_arrays: as in `Collectives`.
        parts: arguments of `StepFunctions`.
    """

    def __init__(self, sum_arrays: Callable[[Sequence[Any]], list[Any]], *parts: Any) -> None:
        super().__init__(*parts)
        self.alone = False  # other ranks have a part in a step
        self._sum_arrays = sum_arrays
        self._seconds, self._number = 0.0, 0

    def finish(self, scale: float, max_norm: float | None, apply: bool) -> Finished:
        """As in `StepFunctions`. A weight that any rank has used moves on all."""
        gradients, count = self._compiled("pack")()
        counts = np.zeros(1 + len(self.variables))
        counts[0] = float(count)
        counts[[1 + index for index in self._used]] = 1.0
        with tf.device("CPU:0"):
            gradients = [tf.identity(gradient) for gradient in gradients]  # copied from a GPU alone
        start = perf_counter()
        *wholes, summed = self._sum_arrays([*gradients, counts])
        self._seconds, self._number = self._seconds + perf_counter() - start, self._number + 1
        counts = np.asarray(np.from_dlpack(summed))
        self._used.update(np.flatnonzero(counts[1:]).tolist())
        result: tuple[Any, Any] = self._compiled("finish_summed", max_norm is not None, apply)(
            [tf.experimental.dlpack.from_dlpack(whole.__dlpack__()) for whole in wholes],
            tf.constant(counts[0], tf.float64),
            tf.constant(scale, tf.float64),
            tf.constant(max_norm or 0.0, tf.float64),
        )
        return Finished(*result)

    def times_per_step(self) -> CommunicationTimes | None:
        """Mean since the last call; None without a step. Nothing is computed meanwhile."""
        seconds, steps = self._seconds, self._number
        self._seconds, self._number = 0.0, 0
        return CommunicationTimes(seconds / steps, seconds / steps) if steps else None

    def _by_dtype(self) -> list[list[int]]:
        """Indices of the weights that one array carries."""
        dtypes = [variable.dtype for variable in self.variables]
        return [[i for i, dtype in enumerate(dtypes) if dtype == name] for name in sorted(set(dtypes))]

    def _pack(self, used: tuple[int, ...]) -> tuple[list[Any], Any]:
        """This rank's sums, one array per dtype with all weights in it, and its count."""
        flat = [tf.reshape(total.read_value(), [-1]) for total in self._sums]
        return [tf.concat([flat[i] for i in part], 0) for part in self._by_dtype()], self._count.read_value()

    def _finish_summed(
        self, wholes: Any, count: Any, scale: Any, max_norm: Any, clip: bool, apply: bool, used: Any
    ) -> Any:
        """Clip and update by what the ranks' `_pack` adds up to."""
        found: dict[int, Any] = {}
        for part, whole in zip(self._by_dtype(), wholes, strict=True):
            shapes = [self.variables[i].shape for i in part]
            pieces = tf.split(whole, [int(np.prod(shape, dtype=np.int64)) for shape in shapes])
            for i, piece, shape in zip(part, pieces, shapes, strict=True):
                found[i] = tf.reshape(piece, shape)
        return self._finish_with([found[i] for i in used], count, scale, max_norm, clip, apply, used)


def _first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> str:
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return f"{mine} where rank 0 has {other}"
    return "more than rank 0's" if len(ours) > len(theirs) else "fewer than rank 0's"
