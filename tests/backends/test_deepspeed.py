"""deepspeed: what its configuration means here, and what ZeRO does to a step."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_backends.deepspeed.options import check_weights
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distributed import Callback, DistributedConfig, FSDPTrainer, PyTorchDDPTrainer, Trainer, UserError
from distributed.config.load import override
from distributed.interfaces.callback import Context
from distributed.interfaces.placement import LauncherEnvironment
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.planner.resolve import resolve
from distributed.registry.catalog import build_catalog, get_catalog
from distributed.testing.conformance import distance, problem, small_model
from distributed.testing.rank_pool import RankPool
from tests.backends.fsdp_model import own_loss, tiny, trainer_of, words

STAGES = [0, 1, 2, 3]
OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.02, "betas": [0.8, 0.9], "weight_decay": 0.1}}


def plan(config: DistributedConfig, joined: LauncherEnvironment | None = None) -> RunPlan:
    return resolve(config, get_catalog(), Facts(), Resources(), joined)


def config(**given: Any) -> DistributedConfig:
    return PyTorchDDPTrainer(small_model(), device="cpu", **given).config


def native(**given: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2}, **given}


def zero(**given: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **given}}


# -- where it runs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"zero_stage": 3}, "zero_stage=3"),
        ({"deepspeed_config": native()}, "deepspeed_config"),
    ],
)
def test_zero_moves_a_default_backend(given: dict[str, Any], asked: str) -> None:
    found = plan(config(num_gpus=2, **given))
    assert found.spec.name == found.config.backend == "deepspeed"
    assert f"note: {asked} moves the default backend 'pytorch-ddp' to 'deepspeed'" in found.summary()
    assert f"ZeRO stage {given.get('zero_stage', 2)}" in found.notes


def test_also_without_a_named_trainer_and_from_another_one() -> None:
    assert plan(DistributedConfig(zero_stage=1)).spec.name == "deepspeed"
    assert plan(FSDPTrainer(small_model(), zero_stage=1).config).spec.name == "deepspeed"
    assert plan(config()).spec.name == "pytorch-ddp"


def test_a_backend_that_was_asked_for_stays() -> None:
    with pytest.raises(UserError, match=r"zero_stage: backend 'fsdp' cannot .*Backends that can: deepspeed"):
        plan(config(backend="fsdp", zero_stage=2))
    with pytest.raises(UserError, match="backend 'serial' cannot"):
        plan(config(backend="serial", deepspeed_config={}))


def test_without_a_backend_that_has_zero_the_error_says_so() -> None:
    bare = build_catalog(found=[])
    bare.backends["pytorch-ddp"] = get_catalog().backends["pytorch-ddp"]
    with pytest.raises(UserError, match="no backend here offers ZeRO"):
        resolve(config(zero_stage=1), bare, Facts(), Resources())


# -- what contradicts ------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"zero_stage": 4}, "zero_stage: invalid value. Got 4. Allowed: a whole number at least 0 and at most 3"),
    ({"zero_stage": 3, "deepspeed_config": native()}, "zero_stage: deepspeed_config contradicts it"),
    ({"batch_size": 4, "deepspeed_config": native(train_micro_batch_size_per_gpu=8)}, "batch_size: deepsp"),
    ({"gradient_accumulation_steps": 2, "deepspeed_config": native(gradient_accumulation_steps=4)},
     "gradient_accumulation_steps: .* says 4"),
    ({"global_batch_size": 8, "deepspeed_config": native(train_batch_size=16)}, "global_batch_size: deepsp"),
    ({"gradient_clipping": 0.5, "deepspeed_config": native(gradient_clipping=1.0)}, "clipping: deepspeed"),
    ({"gradient_clipping": 0.5, "deepspeed_config": native(gradient_clipping=0)}, "clipping: deepspeed_"),
    ({"mixed_precision": "bf16", "deepspeed_config": native(fp16={"enabled": True})}, "precision: .*'fp16'"),
    ({"mixed_precision": False, "deepspeed_config": native(bf16={"enabled": True})}, "precision: .*bf16"),
    ({"mixed_precision": "bf16", "deepspeed_config": native(bf16={"enabled": False})}, "'not bf16'"),
    ({"optimizer": "sgd", "deepspeed_config": native(optimizer=OPTIMIZER)}, "optimizer: deepspeed_config"),
    ({"learning_rate": 0.5, "deepspeed_config": native(optimizer=OPTIMIZER)}, "learning_rate: .* says 0.02"),
    ({"zero.offload_optimizer": "none",
      "deepspeed_config": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}},
     "zero.offload_optimizer: deepspeed_config contradicts it"),
    ({"deepspeed_config": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}},
     "zero.offload_optimizer: invalid value. Got 'nvme'. Allowed: none, cpu"),
    ({"deepspeed_config": native(scheduler={"type": "WarmupLR"})}, "scheduler: not supported.*warmup_steps"),
    ({"deepspeed_config": native(train_batchsize=8)}, "Did you mean 'train_batch_size'"),
    ({"deepspeed_config": native(bf16={"enabled": True, "check_grad_overflow": False})}, "overflow: not s"),
    ({"deepspeed_config": native(bf16={"enable": True})}, "Did you mean 'enabled'"),
    ({"deepspeed_config": zero(compute_grad_norm=False)}, "clipping and the log"),
    ({"deepspeed_config": zero(zero_quantized_weights=True)}, "changes the tr"),
    ({"deepspeed_config": native(optimizer={"type": "OneBitAdam"})}, "Give the Trainer the optimizer itself"),
    ({"deepspeed_config": "absent.json"}, "deepspeed_config: the file cannot be read: No such file"),
    ({"deepspeed_config": 7}, "a mapping, the path of a JSON file, or a deepspeed.DeepSpeedConfig"),
    ({"zero_stage": 1, "find_unused_parameters": True}, "'deepspeed' cannot find unused parameters"),
    ({"zero_stage": 1, "bucket_cap_mb": 5.0}, "bucket_cap_mb: DDP's gradient buckets have no meaning"),
    ({"zero_stage": 1, "gradient_as_bucket_view": False}, "gradient_as_bucket_view: DDP's"),
    ({"zero_stage": 2, "zero.offload_parameters": "cpu"}, "zero.offload_parameters: .*cpu with zero_stage 3"),
    ({"zero_stage": 0, "zero.offload_optimizer": "cpu"}, "zero.offload_optimizer: .*zero_stage 1 or 2 or 3"),
    ({"deepspeed_config": native(fp16={"enabled": True})}, "no fp16 weights on a CPU"),
    ({"num_gpus": 2, "deepspeed_config": native(train_batch_size=7)}, "global_batch_size: it cannot be sp"),
    ({"num_gpus": 3, "deepspeed_config": native(train_batch_size=8, train_micro_batch_size_per_gpu=4)},
     "gradient_accumulation_steps would be"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_mistakes_are_named_before_a_process_starts(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(config(**given))


def test_a_launcher_that_started_another_number_of_ranks_than_asked() -> None:
    place = LauncherEnvironment("deepspeed", 0, 2, 0, 2, 0, 1, "127.0.0.1", 29500)
    with pytest.raises(UserError, match="asks for 4 ranks and deepspeed started 2"):
        plan(config(zero_stage=2, num_gpus=4), place)


# -- what it says becomes ours -----------------------------------------------------------------

FULL = {
    "train_batch_size": 24, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.7, "bf16": {"enabled": True}, "optimizer": OPTIMIZER,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto",
                          "offload_param": {"device": "cpu", "pin_memory": False}},
}  # fmt: skip
MEANS = {
    "global_batch_size": 24, "gradient_accumulation_steps": 3, "gradient_clipping": 0.7, "zero_stage": 3,
    "mixed_precision": "bf16", "optimizer": "adamw", "learning_rate": 0.02, "weight_decay": 0.1,
    "zero.offload_optimizer": "cpu", "zero.offload_parameters": "cpu",
}  # fmt: skip


def value(found: DistributedConfig, name: str) -> Any:
    inner: Any = found
    for part in name.split("."):
        inner = getattr(inner, part)
    return inner


@pytest.mark.parametrize("form", ["dict", "file", "object"])
def test_every_form_gives_its_values_with_their_origin(form: str, tmp_path: Path) -> None:
    given: Any = FULL
    if form == "file":
        given = tmp_path / "zero.json"
        given.write_text(json.dumps(FULL))
    elif form == "object":
        from deepspeed import DeepSpeedConfig

        given = DeepSpeedConfig({**FULL, "train_micro_batch_size_per_gpu": 8})
    found = config(deepspeed_config=given)
    assert {name: value(found, name) for name in MEANS} == MEANS
    assert {found.origin(name) for name in MEANS} == {"deepspeed_config"}
    batch = plan(config(deepspeed_config=given, num_gpus=1)).batch
    assert (batch.batch_size, batch.global_batch_size) == (8, 24)


def test_auto_and_equal_values_are_no_contradiction() -> None:
    auto = {
        "train_batch_size": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
        "optimizer": {"type": "auto", "params": {"lr": "auto"}}, "zero_optimization": {"stage": "auto"},
    }  # fmt: skip
    found = config(deepspeed_config=auto, gradient_clipping=2.0, zero_stage=1, learning_rate=0.5)
    assert (found.gradient_clipping, found.zero_stage, found.learning_rate) == (2.0, 1, 0.5)
    assert found.origin("gradient_clipping") == "argument"
    assert config(deepspeed_config={"gradient_clipping": 2}, gradient_clipping=2.0).gradient_clipping == 2.0
    assert config(deepspeed_config={}).zero_stage == 0  # as DeepSpeed has it


def test_another_native_configuration_takes_the_place_of_the_first() -> None:
    first = config(deepspeed_config=native(gradient_clipping=1.0))
    second = override(first, {"deepspeed_config": native()}, "fit")
    assert second.gradient_clipping is None
    assert second.zero_stage == 2


class Shows(Callback):
    """Fails unless the optimizer in use is as given."""

    def __init__(self, expected: Mapping[str, Any]) -> None:
        self.expected = expected

    def on_run_start(self, context: Context) -> None:
        group = context.optimizer.param_groups[0]  # type: ignore[attr-defined]
        assert {name: group[name] for name in self.expected} == self.expected


@pytest.mark.slow
def test_its_optimizer_is_built_as_it_says() -> None:
    trainer = Trainer(
        small_model(), device="cpu", num_processes=1, deepspeed_config=native(optimizer=OPTIMIZER)
    )
    trainer.callbacks = [Shows({"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.1, "eps": 1e-8})]
    trainer.fit(problem(8), max_steps=1)
    odd = {"type": "SGD", "params": {"cooking": 1}}
    trainer = Trainer(small_model(), device="cpu", num_processes=1, deepspeed_config=native(optimizer=odd))
    with pytest.raises(UserError, match=r"torch's SGD cannot be built.*cooking"):
        trainer.fit(problem(8), max_steps=1)


def test_what_deepspeed_itself_refuses_is_one_paragraph() -> None:
    wrong = {"zero_optimization": {"stage": 2, "reduce_bucket_size": -3}}
    trainer = Trainer(small_model(), device="cpu", num_processes=1, deepspeed_config=wrong)
    with pytest.raises(UserError, match=r"\(reduce_bucket_size\): DeepSpeed refuses it: .*greater than 0"):
        trainer.fit(problem(8), max_steps=1)


# -- a step ----------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Names a buffer that is to stay in float32 where a model is cast to 16 bits, as transformers do."""

    _keep_in_fp32_modules_strict = ("scale",)
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = small_model()
        self.register_buffer("scale", torch.tensor(1.0, dtype=torch.float64) / 3.0)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x) * self.scale
        return found


@pytest.mark.parametrize("claimed", [True, False, None], ids=["fp16", "no fp16", "as it is"])
@pytest.mark.parametrize("stage", STAGES)
def test_what_the_accelerator_claims_of_fp16_changes_no_weight(
    stage: int, claimed: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPUs with AVX512-FP16 and GPUs claim it, other CPUs do not; float64 trains as in plain PyTorch."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    if claimed is not None:
        monkeypatch.setattr(CPU_Accelerator, "is_fp16_supported", lambda accelerator: claimed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Scaled()
    plain, (x, y) = copy.deepcopy(model), problem(12)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.3)
    for first in range(0, 12, 4):
        sgd.zero_grad()
        cross_entropy(plain(x[first : first + 4]), y[first : first + 4]).backward()
        sgd.step()
    given: dict[str, Any] = {"zero_stage": stage, "optimizer": "sgd", "learning_rate": 0.3, "device": "cpu"}
    given |= {"batch_size": 4, "data": {"shuffle": False}}
    Trainer(model, num_processes=1, **given).fit((x, y), max_steps=3)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision_is_autocast_as_under_ddp(stage: int, precision: str, rank_pool: RankPool) -> None:
    """Equal training, norms and skipped steps: an overflow on the way down from a scale too large."""

    def run(**given: Any) -> tuple[nn.Module, Any]:
        model = small_model(torch.float32)
        trainer = trainer_of(
            given.pop("backend"), 2, rank_pool, model, optimizer=torch.optim.SGD, learning_rate=0.1,
            gradient_accumulation_steps=2, mixed_precision=precision, scaler_init_scale=2.0**24, **given,
        )  # fmt: skip
        return model, trainer.fit(problem(48, torch.float32), max_steps=20)

    reference, expected = run(backend="pytorch-ddp")
    model, history = run(backend="deepspeed", zero_stage=stage)
    assert history.num_skipped_steps == expected.num_skipped_steps
    assert (precision == "fp16") == (0 < history.num_skipped_steps < 20)
    assert distance(model, reference) < 1e-6
    assert history.logs[-1]["grad_norm"] == pytest.approx(expected.logs[-1]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_16_bit_weights_keep_float32_masters(stage: int, rank_pool: RankPool) -> None:
    """DeepSpeed's own bf16: close to autocast, float32 comes back, and a second fit loses nothing."""
    given = {
        "zero_stage": stage,
        "deepspeed_config": {"bf16": {"enabled": True}},
        "optimizer": torch.optim.SGD,
    }
    small: dict[str, Any] = {"learning_rate": 1e-4, "gradient_clipping": None}
    start, model = small_model(torch.float32), small_model(torch.float32)
    trainer = trainer_of("deepspeed", 2, rank_pool, model, **given, **small)
    trainer.fit(problem(24, torch.float32), max_steps=1)
    moved = distance(model, start)
    assert 0 < moved < 1e-4, "rounding to bf16 would move weights further, or not at all"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    trainer.fit(problem(24, torch.float32), max_steps=1)
    assert moved < distance(model, start) < 3 * moved


@pytest.mark.parametrize("stage", STAGES)
def test_a_training_step_may_reach_past_forward(stage: int, rank_pool: RankPool) -> None:
    """Tied, frozen and 0-dimensional parameters, read wherever a training step likes."""
    reference, model = tiny(), tiny()
    trainer_of("serial", 1, rank_pool, reference, training_step=own_loss).fit(words(), max_steps=5)
    trainer = trainer_of("deepspeed", 2, rank_pool, model, training_step=own_loss, zero_stage=stage)
    trainer.fit(words(), max_steps=5)
    assert distance(model, reference) < 1e-9


class Two(nn.Module):
    """One of two layers is used, by the sign of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.up if float(x[0, 0]) > 0 else self.down
        result: Tensor = chosen(x)
        return result


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_of_an_earlier_window_is_not_used_again(stage: int) -> None:
    """Each layer has its gradient from one of the window's two micro-batches only."""
    x = torch.ones(4, 3, dtype=torch.float64)
    x[1::2] = -1
    y = torch.zeros(4, dtype=torch.long)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Two()
    plain = copy.deepcopy(model)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for window in (slice(0, 2), slice(2, 4)):
        loss = sum(cross_entropy(plain(x[i : i + 1]), y[i : i + 1]) for i in range(*window.indices(4))) / 2
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    given: dict[str, Any] = {"zero_stage": stage, "optimizer": "sgd", "learning_rate": 0.1, "device": "cpu"}
    given |= {"gradient_accumulation_steps": 2, "data": {"shuffle": False}}
    Trainer(model, num_processes=1, batch_size=1, **given).fit((x, y), max_steps=2)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-12)


def frozen_first(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [model.shift]}, {"params": model.embed.parameters()}], lr=1.0)


class OwnAdam(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.Adafactor, "elementwise optimizers"),
        (OwnAdam, "set zero_allow_untested_optimizer: true"),
        (torch.optim.Adagrad, "Got 'Adagrad'"),
        (frozen_first, "parameter group 0 holds only frozen parameters"),
    ],
)  # fmt: skip
def test_optimizers_that_zero_cannot_cut(optimizer: Any, message: str) -> None:
    trainer = Trainer(tiny(), device="cpu", num_processes=1, zero_stage=1, optimizer=optimizer)
    with pytest.raises(UserError, match=message):
        trainer.fit(words(), max_steps=1)


def test_weights_of_several_dtypes() -> None:
    model = nn.Sequential(nn.Linear(6, 4).double(), nn.Linear(4, 3))
    trainer = Trainer(model, device="cpu", num_processes=1, zero_stage=2)
    with pytest.raises(UserError, match="differ in dtype: float32, float64"):
        trainer.fit(problem(8), max_steps=1)


@pytest.mark.starts_processes
def test_mlflow_stays_out_and_can_be_had_afterwards() -> None:
    """DeepSpeed's autotuner would import it into every rank, for longer than DeepSpeed itself takes."""
    code = (
        "import sys; from distributed_backends.deepspeed.import_deepspeed import import_deepspeed as go; "
        "go('cpu'); assert 'deepspeed.autotuning' in sys.modules; "
        "assert 'mlflow' not in sys.modules; import mlflow"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_float64_beside_other_dtypes_is_refused_without_zero_too() -> None:
    """DeepSpeed fails with an assertion in the first backward."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match=r"float64 beside other dtypes: float32, float64.*Use one dtype"):
        check_weights(optimizer, model, 0, DistributedConfig(backend="deepspeed"))


class Routed(nn.Module):
    """Sends a micro-batch of positive samples through one layer, and others through a larger one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 30), nn.Linear(30, 2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.left(x) if bool((x[:, 0] > 0).all()) else self.right(x)
        return found


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_layers_of_other_sizes_on_other_ranks_are_refused(
    stage: int, accumulation: int, rank_pool: RankPool
) -> None:
    """Their gradients are messages of other lengths, on which gloo aborts the process."""
    x = torch.ones(4 * accumulation, 4)
    x[2 * accumulation :] *= -1
    trainer = Trainer(
        Routed(), backend="deepspeed", zero_stage=stage, num_processes=2, device="cpu", batch_size=2,
        gradient_accumulation_steps=accumulation, data={"shuffle": False}, tracking={"progress": "off"},
    )  # fmt: skip
    trainer.launcher = rank_pool
    with pytest.raises(UserError, match=r"the ranks used different parameters: '(left|right).*Choose one of"):
        trainer.fit((x, torch.zeros(len(x), dtype=torch.long)), max_steps=1)
