"""Real runs of Ray Train on one small cluster: what comes back, what fails and how, Tune, joining."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_backends.ray.output import Relay
from distributed_backends.ray.run_files import files_of, names_in, pack
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Callback, DistributedConfig, Preempted, RayTrainer, Trainer, UserError, WorkerError
from distributed.config.load import override
from distributed.interfaces.plan import Facts, Resources
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from distributed.testing.conformance import distance, problem, small_model
from distributed.testing.suite import EXACT
from tests.parallel.models import ENTRIES, tokens, train_plainly
from tests.support.training import make_trainer
from tests.training.test_between_fits import (
    Objects,
    distances_of,
    load_state,
    nothing,
    scale_weights,
    set_rate,
)
from tests.training.test_compression import Plain, build, close, data, fields

X, Y = problem(26)
FAST = "0.05"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", FAST)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


class Talk(Callback):
    """Every rank prints; rank 1 may do worse, the first time."""

    all_ranks = True

    def __init__(self, deed: str = "", marker: str | None = None) -> None:
        self.deed, self.marker = deed, marker

    def on_step_end(self, context: Any) -> None:
        if context.progress.step != 1:
            return
        print(f"step of rank {context.world.rank} of {context.world.size} in {os.getcwd()}")
        if context.world.rank != 1 or (self.marker and os.path.exists(self.marker)):
            return
        if self.marker:
            Path(self.marker).touch()
        if self.deed == "raise":
            raise ValueError("no more")
        if self.deed == "mistake":
            raise UserError("too many", field="batch_size", got=3)
        if self.deed == "die":
            os.kill(os.getpid(), signal.SIGKILL)


def trainer(model: nn.Module, ranks: int = 2, **given: Any) -> RayTrainer:
    sgd = {"optimizer": torch.optim.SGD, "lr": 0.3, "batch_size": 4}
    options = {**sgd, **given}
    config = {name: options.pop(name) for name in ("lr", "batch_size")}
    return RayTrainer(model, {**config, "hidden": 8}, num_processes=ranks, **options)


# -- a run -----------------------------------------------------------------------------


def test_a_run_is_the_same_training_and_comes_back(
    ray_cluster: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, reference = small_model(), small_model()
    made = trainer(model, callbacks=[Talk()], checkpoint_dir="saved")
    history = made.fit((X, Y), (X, Y), epochs=2)
    plain = Trainer(reference, backend="serial", global_batch_size=8, learning_rate=0.3, optimizer="sgd")
    expected = plain.fit((X, Y), (X, Y), epochs=2)
    assert distance(model, reference) < 1e-9
    assert (history.world_size, history.backend) == (2, "ray")
    assert history.best_accuracy == expected.best_accuracy
    assert made.hyperparameters == {"hidden": 8}
    said = capfd.readouterr()
    assert "ray (pytorch-ddp): 2 ranks on CPU over gloo" in said.out
    assert "kept in hyperparameters: hidden" in said.out
    # Ranks work where the caller does, and their lines are shown there, with no line of Ray's.
    assert f"\nstep of rank 0 of 2 in {tmp_path}\n" in said.out
    assert f"[rank 1] step of rank 1 of 2 in {tmp_path}\n" in said.out
    assert "epoch 1  step 8" in said.err
    assert "Train" not in said.out + said.err
    assert list((tmp_path / "saved").glob("step_*"))
    # A checkpoint of it goes on without Ray.
    more = trainer(small_model(), 1, backend="serial", checkpoint_dir="saved", resume_from_checkpoint=True)
    assert more.fit((X, Y), epochs=3).epochs[0]["epoch"] == 2


def test_a_change_between_two_fits_is_trained(ray_cluster: None) -> None:
    own = Objects()
    run = own.trainer(None, 2, backend="ray", epochs=1)
    distances = distances_of(run, own, [nothing, scale_weights, set_rate, load_state])
    assert max(distances.values()) < EXACT, distances


def test_ranks_that_ray_starts_share_a_model(ray_cluster: None) -> None:
    """Tensor parallelism inside Ray: tied and fused weights, against plain PyTorch in one process."""
    build, data = ENTRIES["dilated"].build, tokens(21)
    model = build()
    trainer = make_trainer(
        model, 2, backend="ray", parallel={"tensor": 2}, global_batch_size=8, learning_rate=0.01,
        gradient_clipping=0.5, optimizer=partial(torch.optim.AdamW, eps=1e-4),
    )  # fmt: skip
    history = trainer.fit(data, max_steps=10)
    assert (history.backend, history.world_size, history.batch["data_parallel_size"]) == ("ray", 2, 1)
    expected = train_plainly(build(), data, global_batch_size=8, steps=10, max_norm=0.5).weights
    own = dict(model.named_parameters())
    assert max(float((own[name] - w).detach().abs().max()) for name, w in expected.items()) < EXACT


def test_ranks_that_ray_starts_send_gradients_by_a_codec(ray_cluster: None) -> None:
    model, plain = build(), Plain("top-k", 2)
    make_trainer(model, 2, backend="ray", **fields("top-k")).fit(data(), epochs=1)
    plain.train(5)
    close(model, plain.model)


@pytest.mark.parametrize("deed", ["raise", "mistake", "die"])
def test_a_rank_that_fails_is_named(ray_cluster: None, deed: str) -> None:
    kind = UserError if deed == "mistake" else WorkerError
    with pytest.raises(kind) as caught:
        trainer(small_model(), callbacks=[Talk(deed)]).fit((X, Y))
    text = str(caught.value)
    if deed == "mistake":
        assert text == "batch_size: too many. Got 3."
        return
    assert text.startswith("rank 1 (")
    assert caught.value.rank == 1
    # Whoever notices first tells of a killed rank: Ray, or the watcher beside the ranks.
    killed = ("worker process has died", "terminated without a report: it was killed, or called os._exit")
    assert any(words in text for words in (("raised ValueError: no more",) if deed == "raise" else killed))
    assert "RayTrainWorker" not in text
    assert len(text.splitlines()) < 40


def test_ray_starts_all_ranks_anew_where_failures_are_allowed(ray_cluster: None, tmp_path: Path) -> None:
    model, reference = small_model(), small_model()
    talk = Talk("raise", str(tmp_path / "failed"))
    made = trainer(
        model, callbacks=[talk], elastic={"max_restarts": 1}, checkpoint_dir=str(tmp_path / "saved")
    )
    history = made.fit((X, Y))
    assert history.restarts == ["Ray restarted all ranks"]
    assert (tmp_path / "failed").exists()
    Trainer(reference, backend="serial", global_batch_size=8, learning_rate=0.3, optimizer="sgd").fit((X, Y))
    assert distance(model, reference) < 1e-9


class Worse(Callback):
    """Rank 1 is killed at the first attempt, and rank 0 fails at the second."""

    all_ranks = True

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def on_step_end(self, context: Any) -> None:
        if self.marker.exists():
            if context.world.rank == 0:
                raise ValueError("no more")
        elif context.world.rank == 1:
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_the_last_attempts_failure_is_told_and_not_one_before_it(ray_cluster: None, tmp_path: Path) -> None:
    saved, worse = str(tmp_path / "saved"), Worse(tmp_path / "failed")
    made = trainer(small_model(), callbacks=[worse], elastic={"max_restarts": 1}, checkpoint_dir=saved)
    with pytest.raises(WorkerError, match="raised ValueError: no more"):
        made.fit((X, Y))


class Call(Callback):
    """Tells the process that called `fit` to go."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def on_step_end(self, context: Any) -> None:
        if context.progress.step == 2:
            os.kill(self.pid, signal.SIGUSR1)


def test_a_caller_that_is_told_to_go_has_its_ranks_save(ray_cluster: None, tmp_path: Path) -> None:
    made = trainer(small_model(), callbacks=[Call(os.getpid())], checkpoint_dir=str(tmp_path / "saved"))
    with pytest.raises(Preempted) as caught:
        made.fit((X, Y), max_steps=10**6, epochs=10**6)
    assert caught.value.signal == "SIGUSR1"
    assert caught.value.checkpoint == str(tmp_path / "saved" / f"step_{caught.value.step:08d}")
    assert (tmp_path / "saved" / f"step_{caught.value.step:08d}" / "manifest.json").exists()


def test_what_a_killed_rank_was_waiting_for_is_heard_by_the_next(ray_cluster: None) -> None:
    import ray

    class Rank:
        def __init__(self, orders: Any) -> None:
            from distributed_backends.ray.output import forward_requests

            forward_requests(orders)

        def heard(self) -> str:
            import time

            from distributed.resilience.preemption import received_signal

            while received_signal() is None:
                time.sleep(0.05)
            return str(received_signal())

    kind = ray.remote(num_cpus=0)(Rank)
    with Relay(asks=True) as relay:
        first, second = kind.remote(relay.orders), kind.remote(relay.orders)
        ray.get([rank.__ray_ready__.remote() for rank in (first, second)])
        ray.kill(first)
        relay.ask("SIGTERM")
        assert ray.get(second.heard.remote(), timeout=60) == "SIGTERM"
        third = kind.remote(relay.orders)  # the second had no time to save
        assert ray.get(third.heard.remote(), timeout=60) == "SIGTERM"


def test_a_node_that_came_later_asks_the_callers_for_the_files(ray_cluster: None, tmp_path: Path) -> None:
    import ray

    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "task.bin").write_bytes(b"1")
    (tmp_path / "sys_path.json").write_bytes(b"2")
    here, files = ray.get_runtime_context().get_node_id(), pack(tmp_path)
    order = {"node": here, "folder": str(tmp_path), "names": names_in(tmp_path)}
    (tmp_path / "verdict.json").write_bytes(b"of an attempt that failed")
    assert ray.get(files_of(order)) == files == {"part/task.bin": b"1", "sys_path.json": b"2"}


# -- room ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ray": {"num_cpus_per_rank": 9}}, "resources for 1 of 2 ranks of 9 CPU each"),
        ({"ray": {"resources": {"disks": 1}}}, "resources for 0 of 2 ranks of 1 CPU, 1 disks each"),
        ({"num_nodes": 2}, "and 1 of 2 nodes: it has 16 CPU"),
        ({"device": "cuda"}, "2 ranks there need 2 GPUs and 0 are visible"),
    ],
)
def test_what_the_cluster_cannot_hold_is_refused_at_once(
    ray_cluster: None, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        trainer(small_model(), **given).fit((X, Y))
    assert words in str(caught.value)


def test_a_busy_cluster_is_not_waited_for_for_ever(ray_cluster: None) -> None:
    import ray

    holder = ray.util.placement_group([{"CPU": 15}])
    ray.get(holder.ready())
    try:
        with pytest.raises(
            UserError, match=r"no resources for 2 ranks of 1 CPU each within 1 s: free are 1 CPU"
        ):
            trainer(small_model(), ray={"start_timeout": 1}).fit((X, Y))
    finally:
        ray.util.remove_placement_group(holder)


# -- the plan --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"inner": "ray"},
            "ray.inner: backend 'ray' cannot start the ranks of 'ray', which starts ranks itself",
        ),
        ({"inner": "fsdb"}, "ray.inner: no backend is called 'fsdb'. Did you mean 'fsdp'?"),
        ({"inner": "serial"}, "backend 'ray (serial)' cannot run 2 ranks"),
        ({"adress": "auto"}, "Did you mean 'ray.address'?"),
    ],
)
def test_impossible_inner_backends_and_options_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        trainer(small_model(), ray=given).fit((X, Y))
    assert words in str(caught.value)


def test_the_inner_backend_says_what_can_be_done() -> None:
    config = DistributedConfig(backend="ray", num_processes=2, device="cpu", ray={"inner": "fsdp"})
    plan = resolve(config, get_catalog(), Facts(), Resources())
    fsdp = get_catalog().backend("fsdp")
    assert (plan.spec.target, plan.spec.capabilities) == (fsdp.target, fsdp.capabilities)
    assert (plan.spec.name, plan.spec.label, plan.mode) == ("ray", "ray (fsdp)", "spawn")
    config = override(config, {"zero_stage": 2}, "test")
    with pytest.raises(UserError, match=r"backend 'ray \(fsdp\)' cannot"):
        resolve(config, get_catalog(), Facts(), Resources())


def test_other_backends_refuse_rays_options() -> None:
    with pytest.raises(UserError, match=r"ray\.inner: backend 'serial' does not start its ranks by Ray"):
        Trainer(small_model(), backend="serial", ray={"inner": "fsdp"}).fit((X, Y))


def test_a_sample_holds_one_learning_rate() -> None:
    sample = {"lr": 0.5, "batch_size": 8, "layers": [3, 4], "ray.address": "auto"}
    made = RayTrainer(small_model(), sample)
    assert (made.config.learning_rate, made.config.batch_size, made.config.ray.address) == (0.5, 8, "auto")
    assert made.hyperparameters == {"layers": [3, 4]}
    with pytest.raises(UserError, match="lr and learning_rate are the same"):
        RayTrainer(small_model(), {"lr": 0.5, "learning_rate": 0.1})
    with pytest.raises(UserError, match="batch_size"):
        RayTrainer(small_model(), {"batch_size": "many"})


@pytest.mark.starts_processes
def test_without_ray_the_command_that_installs_it_is_named() -> None:
    code = """
import sys
class NoRay:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoRay())
import torch
from distributed import RayTrainer, UserError
data = torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)
try:
    RayTrainer(torch.nn.Linear(2, 2), num_processes=2).fit(data)
except UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=120)
    remedy = "Install it: pip install 'distributed-trainer[ray]'."
    assert done.stdout == f"backend 'ray' needs ray, not installed here. {remedy}\n"


# -- Ray Tune, and Ray Train of the user's own -----------------------------------------


def in_a_trial(sample: dict[str, Any]) -> dict[str, Any]:
    made = RayTrainer(small_model(), sample, num_processes=sample.get("ranks"), optimizer="sgd")
    history = made.fit((X, Y), (X, Y), epochs=3)
    return {"accuracy": made.best_accuracy, "world": history.world_size}


def test_a_trial_with_one_rank_trains_itself_and_tune_hears_each_epoch(
    ray_cluster: None, tmp_path: Path
) -> None:
    """As the tuner's users write it: `tune.run`, and a sample with more in it than our fields."""
    from ray import tune

    space = {"hidden_size": 8, "lr": tune.grid_search([0.3, 1e-6]), "batch_size": tune.choice([8])}
    analysis = tune.run(in_a_trial, config=space, storage_path=str(tmp_path), verbose=0)
    assert [trial.status for trial in analysis.trials] == ["TERMINATED"] * 2
    frames = list(analysis.trial_dataframes.values())
    assert [list(frame["epoch"].dropna()) for frame in frames] == [[0, 1, 2]] * 2
    assert analysis.get_best_config("val_loss", "min")["lr"] == 0.3
    assert all(trial.last_result["accuracy"] is not None for trial in analysis.trials)


def from_a_loader(sample: dict[str, Any]) -> dict[str, Any]:
    train_loader = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)
    trainer = RayTrainer(small_model(), sample)
    history = trainer.fit(train_loader, DataLoader(TensorDataset(X, Y), batch_size=4))
    return {"accuracy": trainer.best_accuracy, "global_batch_size": history.batch["global_batch_size"]}


def test_tune_samples_the_batch_size_and_optimizes_what_the_function_returns(
    ray_cluster: None, tmp_path: Path
) -> None:
    """The example of the platform's own design, with its metric named."""
    from ray import tune

    analysis = tune.run(
        from_a_loader,
        config={
            "hidden_size": tune.choice([128, 256, 512]),
            "lr": tune.loguniform(1e-4, 1e-2),
            "batch_size": tune.grid_search([2, 4, 8]),
        },
        metric="accuracy",
        mode="max",
        storage_path=str(tmp_path),
        verbose=0,
    )
    assert [trial.status for trial in analysis.trials] == ["TERMINATED"] * 3
    found = [trial.last_result["global_batch_size"] for trial in analysis.trials]
    assert found == [trial.config["batch_size"] for trial in analysis.trials]
    assert analysis.best_config["batch_size"] in (2, 4, 8)


def test_tune_drives_ranks_of_ray_train(ray_cluster: None, tmp_path: Path) -> None:
    from ray import tune

    def train(sample: dict[str, Any]) -> None:
        assert in_a_trial(sample)["world"] == 2

    found = tune.Tuner(
        # The ranks hold the CPUs, and the trial none.
        tune.with_resources(train, {"memory": 1}),
        param_space={"ranks": 2, "lr": tune.grid_search([0.3]), "batch_size": 4},
        tune_config=tune.TuneConfig(metric="val_loss", mode="min"),
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    ).fit()
    (result,) = found
    assert result.error is None
    assert result.metrics_dataframe is not None
    assert list(result.metrics_dataframe["epoch"].dropna()) == [0, 1, 2]


@pytest.mark.parametrize("group", ["ray's", "ours"])
def test_ranks_of_a_users_own_ray_train_join(ray_cluster: None, tmp_path: Path, group: str) -> None:
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.config import RunConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    def loop() -> dict[str, Any]:
        model = small_model()
        options: dict[str, Any] = {"batch_size": 4, "learning_rate": 0.3, "optimizer": "sgd"}
        history = Trainer(model, **options).fit((X, Y), epochs=1)
        weights = [value for p in model.parameters() for value in p.flatten().tolist()]
        return {"world": history.world_size, "weights": weights}

    kind = TorchTrainer if group == "ray's" else DataParallelTrainer
    run = RunConfig(storage_path=str(tmp_path))
    found = kind(loop, scaling_config=ScalingConfig(num_workers=2), run_config=run).fit().return_value
    reference = small_model()
    Trainer(reference, backend="serial", global_batch_size=8, learning_rate=0.3, optimizer="sgd").fit((X, Y))
    assert found["world"] == 2
    assert found["weights"] == pytest.approx(
        [value for p in reference.parameters() for value in p.flatten().tolist()], abs=1e-9
    )


def test_ray_train_still_names_what_we_do_without() -> None:
    """Each starts a process that would cost a run some seconds; under another name it would again."""
    from distributed_backends.ray.launcher import _CLEANER, _DATASETS
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    names = {type(callback).__name__ for callback in DataParallelTrainer(print)._create_default_callbacks()}
    assert names >= {_CLEANER, _DATASETS}
