"""Step time of a backend beside a hand-written loop of the same framework.

    OMP_NUM_THREADS=1 python tests/benchmarks/backend_step.py [--backend NAME]
    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 tests/benchmarks/backend_step.py --backend fsdp

Both loops live in one process and take turns (see step_overhead.py), so that whatever else the
machine does hits both alike. The hand-written loop is what that framework's own tutorial shows:
its wrapper or engine, the DataLoader (or ``tf.data``), forward, backward, step; no logging. Ours
runs with all default callbacks. The ratio is the median over pairs of blocks, with a 95 % bootstrap
interval; "cpu" is the same for the processor time of the thread that trains, and under TensorFlow for that of
all threads.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from step_overhead import BATCH, RANK, Turns, compare, make_data, make_model, report, torch_loop

RATE = 1e-3
Arguments = argparse.Namespace
Tick = Callable[[], bool]


# -- hand-written loops: what each framework's own tutorial shows ------------------------------


def pytorch_ddp(args: Arguments, ready: Callable[[], Tick]) -> None:
    model = nn.parallel.DistributedDataParallel(make_model(args.width, args.depth))
    torch_loop(model, torch.optim.AdamW(model.parameters(), lr=RATE), args, ready())


def serial(args: Arguments, ready: Callable[[], Tick]) -> None:
    model = make_model(args.width, args.depth)
    torch_loop(model, torch.optim.AdamW(model.parameters(), lr=RATE), args, ready())


def fsdp(args: Arguments, ready: Callable[[], Tick]) -> None:
    from torch.distributed.fsdp import fully_shard

    model = make_model(args.width, args.depth)
    fully_shard(model)
    torch_loop(model, torch.optim.AdamW(model.parameters(), lr=RATE), args, ready())


def horovod(args: Arguments, ready: Callable[[], Tick]) -> None:
    import horovod.torch as hvd

    hvd.init()
    model = make_model(args.width, args.depth)
    inner = torch.optim.AdamW(model.parameters(), lr=RATE)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    torch_loop(model, optimizer, args, ready())


def deepspeed(args: Arguments, ready: Callable[[], Tick]) -> None:
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed as ds

    model = make_model(args.width, args.depth)
    stage = int(dict(args.set)["zero_stage"])
    engine, *_ = ds.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=RATE),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    loader = make_data(args.data, args.width)
    tick = ready()
    while True:
        for x, y in loader:
            loss = nn.functional.cross_entropy(engine(x), y)
            engine.backward(loss)
            engine.step()
            if tick():
                return


def tensorflow(args: Arguments, ready: Callable[[], Tick]) -> None:
    """A compiled step over ``tf.data``, as TensorFlow's guide to custom training shows."""
    import keras
    import tensorflow as tf

    data = make_data("tensors", args.width).dataset
    x, y = (tensor.numpy() for tensor in data.tensors)  # type: ignore[attr-defined]
    model = keras_model(args)
    optimizer = keras.optimizers.AdamW(RATE)
    optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function  # type: ignore[untyped-decorator]
    def step(batch: Any, target: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(target, model(batch, training=True))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    rows = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=0).batch(BATCH).prefetch(2)
    tick = ready()
    while True:
        for batch, target in rows:
            step(batch, target)
            if tick():
                return


def keras_model(args: Arguments) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(args.width, activation="relu") for _ in range(args.depth)]
    return keras.Sequential([keras.Input((args.width,)), *layers, keras.layers.Dense(10)])


LOOPS: dict[str, Callable[[Arguments, Callable[[], Tick]], None]] = {
    "serial": serial,
    "pytorch-ddp": pytorch_ddp,
    "fsdp": fsdp,
    "deepspeed": deepspeed,
    "horovod": horovod,
    "tensorflow": tensorflow,
}


# -- ours --------------------------------------------------------------------------------------


def ours(turns: Turns, args: Arguments) -> None:
    """The same training by our `Trainer`, callbacks and all."""
    from distributed import Callback, Trainer

    class Clock(Callback):
        all_ranks = True

        def on_run_start(self, context: Any) -> None:
            self.tick = turns.clock(1)

        def on_step_end(self, context: Any) -> None:
            if self.tick():
                raise SystemExit

    keras = args.backend == "tensorflow"
    model = keras_model(args) if keras else make_model(args.width, args.depth)
    fields: dict[str, Any] = {"learning_rate": RATE, "weight_decay": 0.01, "device": "cpu"}
    if args.keras_optimizer:
        from keras.optimizers import AdamW

        fields["optimizer"] = AdamW
        del fields["weight_decay"]
    fields |= {name: json.loads(value) for name, value in args.set}
    mine = Trainer(model, backend=args.backend, callbacks=[Clock()], **fields)
    try:
        mine.fit(make_data("tensors" if keras else args.data, args.width), epochs=1000)
    except SystemExit:
        return


# -- the measurement ---------------------------------------------------------------------------


def measure(args: Arguments) -> dict[str, Any]:
    """Ratios and microseconds of ours and the hand-written loop, in this process."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if not dist.is_initialized():
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("gloo", **({} if "RANK" in os.environ else alone))
    # TensorFlow computes in threads of its own; only one of the two loops runs at a time.
    cpu_clock = time.process_time if args.backend == "tensorflow" else time.thread_time
    turns = Turns(args.steps, args.blocks, cpu_clock)
    base = threading.Thread(
        target=LOOPS[args.backend], args=(args, lambda: turns.clock(0)), daemon=True, name="hand-written"
    )
    base.start()
    turns.base_is_ready.wait()
    ours(turns, args)
    base.join()
    return compare(turns)


def in_ray(args: Arguments) -> dict[str, Any]:
    """The same measurement inside a worker of Ray Train: DDP by hand against ours, joined."""
    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    # Ray's workers read the result's file: nothing else comes back from a function but metrics.
    path = Path(os.environ.get("TMPDIR", "/tmp"), f"ray-step-{os.getpid()}.json")
    inner = argparse.Namespace(**{**vars(args), "backend": "pytorch-ddp"})

    def train(config: dict[str, Any]) -> None:
        path.write_text(json.dumps(measure(inner)))

    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    TorchTrainer(train, scaling_config=ScalingConfig(num_workers=1)).fit()
    found: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    ray.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="all", choices=["all", "ray", *LOOPS])
    parser.add_argument("--set", action="append", default=[], type=lambda text: text.split("=", 1))
    parser.add_argument(
        "--keras-optimizer",
        action="store_true",
        help="tensorflow: ours with the hand-written loop's optimizer",
    )
    parser.add_argument("--data", default="dataset", choices=["dataset", "tensors"])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50, help="steps per block")
    parser.add_argument("--blocks", type=int, default=60)
    args = parser.parse_args()
    if args.backend == "all":
        for name in (*LOOPS, "ray"):
            subprocess.run([sys.executable, __file__, "--backend", name, *sys.argv[1:]], check=True)
        return
    if args.backend == "deepspeed":  # Its default here is 2, and that of DeepSpeed 0: both loops take one.
        args.set.insert(0, ["zero_stage", "0"])
    found = in_ray(args) if args.backend == "ray" else measure(args)
    if RANK:
        os._exit(0)
    name = " ".join([args.backend, *("=".join(pair) for pair in args.set)])
    report(name, found)
    os._exit(0)  # Two frameworks' threads need not agree on how a process ends.


if __name__ == "__main__":
    main()
