"""Choose a rank's devices and the tf.distribute strategy over them.

TensorFlow's devices and other processes can only be set before it has started, and a
process can have one MultiWorkerMirroredStrategy in its life: what was made is kept.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from distributed.errors import UserError
from distributed.interfaces.placement import World
from distributed.interfaces.plan import RunPlan
from distributed.system.addresses import address_among


class _Made(NamedTuple):
    key: tuple[Any, ...]
    strategy: Any


_made: list[_Made] = []


def make_strategy(plan: RunPlan, world: World, gather: Callable[[Any], list[Any]]) -> Any:
    """The strategy of this rank; collective where there are several.

    Args:
        gather: function that gathers every rank's value on every rank.

    Raises:
        UserError: TensorFlow has already started, so devices and processes cannot be set.
    """
    key = (world.rank, world.size, world.num_replicas, plan.device)
    if _made and _made[0].key == key:
        return _made[0].strategy
    if world.size == 1 and world.num_replicas == 1:
        _choose_device(plan, world)
        return tf.distribute.get_strategy()
    try:
        _limit_threads()
        strategy = _multi_worker(plan, world, gather) if world.size > 1 else _mirrored(plan, world)
    except RuntimeError as error:
        if "startup" not in str(error) and "initialized" not in str(error):
            raise
        raise _too_late(error) from error
    _made[:] = [_Made(key, strategy)]
    return strategy


def default_strategy(plan: RunPlan, world: World) -> Any:
    """The strategy of a rank with a single device, whose values other ranks get from elsewhere.

    Raises:
        UserError: TensorFlow has already started with the devices of other ranks.
    """
    if not _started():
        _limit_threads()
        _show(plan, world)
    elif plan.device != "cpu" and len(tf.config.get_visible_devices("GPU")) > 1:
        raise UserError(
            "TensorFlow was started in this process with the GPUs of other ranks",
            field="model, train_loader",
            remedy="Give functions that build the model and the tf.data dataset, or arrays, and call"
            " nothing of TensorFlow before fit; or start the script plainly, once, with num_gpus, and fit"
            " starts the ranks",
        )
    return tf.distribute.get_strategy()


@contextmanager
def strategies_of_factories(strategy: Any) -> Iterator[None]:
    """Within the block, each mirrored strategy that a function of the user makes is `strategy`.

    A model cannot be built in the scope of another strategy, and TensorFlow ends the process (SIGSEGV) where
    a MirroredStrategy is made beside one of several workers.
    """
    kinds = [tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy]
    before = [kind.__init__ for kind in kinds]
    for kind in kinds:
        kind.__new__ = lambda *args, **options: strategy
        kind.__init__ = lambda *args, **options: None
    try:
        yield
    finally:
        for kind, init in zip(kinds, before, strict=True):
            del kind.__new__
            kind.__init__ = init


def _too_late(error: Exception) -> UserError:
    return UserError(
        f"TensorFlow was started in this process before the other ranks were configured ({error})",
        field="model, train_loader",
        remedy="Under torchrun and the like give functions that build the model and the tf.data dataset, or"
        " arrays, and call nothing of TensorFlow before fit; or start the script plainly, once, with"
        " num_processes, and fit starts the ranks",
    )


def _limit_threads() -> None:
    """As many threads as this rank was given, where TensorFlow would take every core."""
    threads = int(os.environ.get("OMP_NUM_THREADS", "0") or 0)
    if threads and not _started():
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))


def _started() -> bool:
    from tensorflow.python.eager import context

    return bool(context.context()._initialized)


def _choose_device(plan: RunPlan, world: World) -> None:
    if plan.device == "cpu" and tf.config.list_physical_devices("GPU") and not _started():
        tf.config.set_visible_devices([], "GPU")


def _show(plan: RunPlan, world: World) -> None:
    """Let TensorFlow see this rank's GPU alone, or none."""
    gpus = tf.config.list_physical_devices("GPU")
    here: list[Any] = []
    if plan.device != "cpu":
        # A launcher may show every rank one device of its own, which is then number 0.
        here = [gpus[0 if len(gpus) == 1 else world.local_rank]]
    tf.config.set_visible_devices(here, "GPU")


def _mirrored(plan: RunPlan, world: World) -> Any:
    number = world.num_replicas
    if plan.device == "cpu":
        tf.config.set_visible_devices([], "GPU")
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * number)
        return tf.distribute.MirroredStrategy(
            [f"CPU:{index}" for index in range(number)],
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )
    return tf.distribute.MirroredStrategy([f"GPU:{index}" for index in range(number)])


def _multi_worker(plan: RunPlan, world: World, gather: Callable[[Any], list[Any]]) -> Any:
    _show(plan, world)
    meeting = plan.joined.master_addr if plan.joined is not None else os.environ["MASTER_ADDR"]
    host = "127.0.0.1" if world.num_nodes == 1 else address_among(meeting)
    holder = _hold_port()
    try:
        workers = gather(f"{host}:{holder.getsockname()[1]}")
    finally:
        holder.close()
    _configure_coordination(workers, plan.config.collective_timeout)
    kinds = tf.distribute.experimental.CommunicationImplementation
    return tf.distribute.MultiWorkerMirroredStrategy(
        # Set here and not in TF_CONFIG, which would mislead later code in this process.
        cluster_resolver=tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": workers}),
            task_type="worker",
            task_id=world.rank,
            rpc_layer="grpc",
        ),
        communication_options=tf.distribute.experimental.CommunicationOptions(
            implementation=kinds.RING if plan.device == "cpu" else kinds.NCCL,
            timeout_seconds=plan.config.collective_timeout,
        ),
    )


def _configure_coordination(workers: Sequence[str], timeout: float) -> None:
    """Give TensorFlow's service between workers the limit of a collective, which is longer than its own.

    A worker that is suspended or busy for longer than that limit would end the run, where the ranks of
    every other backend wait. TensorFlow leaves a service that is already configured as it is.

    Args:
        workers: address of each worker.
        timeout: seconds without a heartbeat after which a worker is treated as lost.
    """
    from tensorflow.python.eager import context

    jobs = tf.compat.v1.ConfigProto().experimental.coordination_config.coordinated_job_list
    jobs.add(name="worker", num_tasks=len(workers))
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        coordinated_jobs=list(jobs),
        heartbeat_timeout_in_ms=round(1000 * timeout),
    )


def _hold_port() -> socket.socket:
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder
