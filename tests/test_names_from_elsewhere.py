"""Names of other libraries and of hand-written loops: what docs/coming-from-names.md has about them is so."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import distributed_kernels as kernels
import pytest
import torch
from torch import Tensor, nn

import distributed
from distributed import (
    AdvancedDistributedTrainer,
    DistributedConfig,
    DistributedTrainer,
    FSDPTrainer,
    HorovodTrainer,
    HybridParallelTrainer,
    PyTorchDDPTrainer,
    ShardingStrategy,
    Trainer,
    UserError,
    cleanup_distributed,
    setup_distributed,
    setup_horovod,
)
from distributed.cli import main
from distributed.config.load import all_fields
from distributed.interfaces.plan import Facts, Resources
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from distributed.testing.oracle import sample_order
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.support.training import make_trainer

PAGE = Path(__file__).parents[1] / "docs" / "coming-from-names.md"
NAMES = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "TensorParallelModel",
    "HybridParallelTrainer",
    "create_hybrid_model",
    "setup_process_groups",
    "AdvancedDistributedTrainer",
    "DistributedTrainer",
    "setup_distributed",
    "cleanup_distributed",
    "setup_horovod",
    "HorovodTrainer",
    "NO_SHARD",
    "SHARD_GRAD_OP",
    "FULL_SHARD",
    "HYBRID_SHARD",
    "buffer_dtype",
    "async_checkpoint",
    "--rdzv_backend",
    "model_parallel",
    "use_gradient_checkpointing",
    "use_deepspeed",
    "sequence_parallel",
    "use_sequence_parallel",
    "DeepSpeedDilatedAttentionEngine",
    "profile_training_step",
    "FairScale",
    "DeepSpeedConfig",
    "deepspeed_config",
    "allreduce_example",
    "allgather_example",
    "broadcast_example",
    "ring_allreduce",
    "train_step_overlapped",
    "profile_communication",
    "profile_communication_overhead",
    "GradientCompression",
    "compress_gradients",
    "decompress_gradients",
    "compress_gradient(grad, k",
    "random_sparse(grad, p",
    "hvd.Compression.fp16",
]
LAYER = {"dtype": torch.float64}
LAYERS = [
    {"in_features": 6, "out_features": 8, "tensor_parallel": True, **LAYER},
    nn.Tanh(),
    {
        "layer": kernels.SKLinear,
        "in_features": 8,
        "out_features": 8,
        "sketch_size": 2,
        "tensor_parallel": True,
        **LAYER,
    },
    nn.Tanh(),
    {"in_features": 8, "out_features": 4, "bias": False, **LAYER},
]


def problem(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return x, x[:, :4].argmax(dim=1)


# -- the page ----------------------------------------------------------------------------------------------


def rows() -> list[list[str]]:
    """Rows of three cells; those of the guides have four, and `tests/seeds` runs them."""
    text = PAGE.read_text(encoding="utf-8")
    text = text[text.index("## Layers and models") :]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if "---" not in line]


def test_the_page_has_every_name_and_what_it_names_exists() -> None:
    found, text = rows(), PAGE.read_text(encoding="utf-8")
    assert [name for name in NAMES if name not in text] == []
    fields = {*all_fields(), *(field.rpartition(".")[2] for field in all_fields())}
    for name, here, _ in found:
        for part in re.findall(r"`([^`]+)`", here):
            assert part in fields or hasattr(distributed, part), f"{name}: {part}"


# -- trainers ----------------------------------------------------------------------------------------------


def plainly(model: nn.Module, data: tuple[Tensor, Tensor], batch: int, steps: int) -> nn.Module:
    """SGD on the mean of each global batch, in one process."""
    optimizer, done, epoch = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 0, 0
    while done < steps:
        for chosen in sample_order(len(data[0]), 0, epoch).split(batch)[: steps - done]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data[0][chosen]), data[1][chosen]).backward()
            optimizer.step()
            done += 1
        epoch += 1
    return model


def difference(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def test_hybrid_parallel_trainer_trains_as_one_process_does(rank_pool: RankPool) -> None:
    data = problem(21)
    trainer: Any = make_trainer(
        {"layers": LAYERS},
        4,
        rank_pool,
        kind=HybridParallelTrainer,
        parallelism_config={"tensor_parallel_size": 2, "data_parallel_size": 2},
        global_batch_size=8,
        optimizer=partial(torch.optim.SGD, momentum=0.9),
        learning_rate=0.1,
    )
    parallel = trainer.config.parallel
    assert (parallel.tensor, parallel.data) == (2, 2)
    assert parallel.tensor_plan == dict.fromkeys("02", "colwise_gather_output")
    expected = plainly(copy.deepcopy(trainer.model), data, batch=8, steps=7)
    assert [tuple(p.shape) for p in trainer.create_hybrid_model().parameters()] == [
        tuple(p.shape) for p in expected.parameters()
    ]
    history = trainer.fit(data, max_steps=7)
    assert history.batch["data_parallel_size"] == 2
    assert difference(trainer.model, expected) < EXACT


@pytest.mark.parametrize(
    ("ranks", "word", "text"),
    [
        (2, "embedding_rowwise", "Got 'embedding_rowwise'. Allowed: colwise, "),
        (2, "packed_colwise:2", "Got 'packed_colwise:2'. Allowed: colwise, "),
        (3, "rowwise", "in_features: not divisible by the group's 3 ranks. Got 8."),
    ],
)
def test_a_sketched_layer_is_cut_by_words_that_it_has(
    ranks: int, word: str, text: str, rank_pool: RankPool
) -> None:
    sizes = {"parallelism_config": {"tensor": ranks, "tensor_plan": {"2": word}}, "global_batch_size": 8}
    trainer = make_trainer({"layers": LAYERS}, ranks, rank_pool, kind=HybridParallelTrainer, **sizes)
    with pytest.raises(UserError) as caught:
        trainer.fit(problem(8), max_steps=1)
    assert caught.value.field == "parallel.tensor_plan"
    assert text in str(caught.value)


def test_sizes_of_a_hybrid_trainer_are_fields_of_parallel() -> None:
    model = nn.Linear(2, 2)
    sizes = {
        "pipeline_parallel_size": ("pipeline", 2),
        "context_parallel_size": ("context", 3),
        "sequence_parallel_size": ("context", 3),
        "expert_parallel_size": ("expert", 2),
        "shard_parallel_size": ("shard", 4),
        "tensor": ("tensor", 5),
    }
    for name, (axis, size) in sizes.items():
        config = HybridParallelTrainer(model, {name: size}).config
        assert getattr(config.parallel, axis) == size
    plan = {"tensor": 2, "tensor_plan": {"0": "rowwise"}}
    assert HybridParallelTrainer({"layers": LAYERS}, plan).config.parallel.tensor_plan == {"0": "rowwise"}
    for given in ({"parallel": {"tensor": 2}}, {}):
        parallel = HybridParallelTrainer({"layers": LAYERS}, **given).config.parallel
        assert parallel.tensor_plan == dict.fromkeys("02", "colwise_gather_output")
    with pytest.raises(
        UserError, match=r"parallel\.tensor: parallelism_config stands for.*Got 4\. Allowed: 2"
    ):
        HybridParallelTrainer(model, {"tensor_parallel_size": 2}, parallel={"tensor": 4})
    for given, text in (
        (
            (model, {"tensor_parallel": 2}),
            r"unknown size 'tensor_parallel'\. Did you mean 'tensor_parallel_size'",
        ),
        ((model, {"tensor": 2, "tensor_parallel_size": 2}), r"two sizes mean parallel\.tensor"),
        (({"blocks": []},), r"model_config: it has no layers\. Got 'blocks'"),
        (({"layers": [{"in_features": 2, "out": 2}]},), r"layers\[0\].*Pass in_features and out_features"),
    ):
        with pytest.raises(UserError, match=text):
            HybridParallelTrainer(*given)
    sizes: dict[str, Any] = {"in_features": 64, "out_features": 64, "sketch_size": 4}
    for sketched in (sizes, {"layer": kernels.SKLinear, **sizes}):
        built = HybridParallelTrainer({"layers": [sketched]}).model
        assert isinstance(built[0], kernels.SKLinear)
    with pytest.raises(UserError, match=r"fit starts them.*torchrun"):
        HybridParallelTrainer(model, {"tensor": 2}, num_processes=2).setup_process_groups()


def test_trainers_that_know_their_rank_check_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = nn.Linear(2, 2), torch.optim.SGD
    for trainer in (DistributedTrainer(model, optimizer, 2, 0), AdvancedDistributedTrainer(model, 0, 2)):
        assert (trainer.config.backend, trainer.config.num_gpus) == ("pytorch-ddp", 2)
    assert trainer.config.find_unused_parameters
    assert trainer.config.gradient_as_bucket_view
    assert trainer.config.gradient_clipping == 1.0
    with pytest.raises(UserError, match=r"rank: no launcher.*Got 1\. Allowed: 0\..*setup_distributed"):
        DistributedTrainer(model, optimizer, 2, 1)
    with pytest.raises(UserError, match=r"rank, world_size: no launcher.*torchrun"):
        setup_distributed()
    with pytest.raises(UserError, match=r"rank, world_size: no launcher.*torchrun"):
        setup_horovod()
    cleanup_distributed()  # without a group there is nothing to leave
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert DistributedTrainer(model, optimizer, 2, 1).config.num_gpus is None
    for action in (partial(AdvancedDistributedTrainer, model, 0, 2), partial(setup_distributed, 0, 2)):
        with pytest.raises(
            UserError, match=r"rank: torchrun gave this process another rank\. Got 0\. Allowed: 1"
        ):
            action()
    with pytest.raises(UserError, match=r"world_size: torchrun gave.*Got 3\. Allowed: 2"):
        DistributedTrainer(model, optimizer, 3)
    with pytest.raises(UserError, match=r"is not initialized on this rank\. Call setup_distributed"):
        AdvancedDistributedTrainer(model).synchronize_sketching_matrices()


def test_horovod_trainer_takes_a_config_or_an_optimizer_second(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert HorovodTrainer(model, optimizer).optimizer is optimizer
    assert HorovodTrainer(model, torch.optim.SGD).optimizer is torch.optim.SGD
    (tmp_path / "run.yaml").write_text("epochs: 3\n")
    for config in ({"epochs": 3}, tmp_path / "run.yaml", DistributedConfig(epochs=3)):
        assert HorovodTrainer(model, config).config.epochs == 3
    with pytest.raises(UserError, match=r"optimizer: two optimizers are given.*Got 'SGD'"):
        HorovodTrainer(model, optimizer, optimizer=optimizer)


# -- sharding ----------------------------------------------------------------------------------------------


def test_each_sharding_strategy_sets_its_fields() -> None:
    from torch.distributed.fsdp import ShardingStrategy as TorchsOwn

    def fields(strategy: Any, **given: Any) -> tuple[Any, ...]:
        config = FSDPTrainer(nn.Linear(2, 2), sharding_strategy=strategy, **given).config
        return config.backend, config.fsdp.reshard_after_forward, config.parallel.data  # type: ignore[attr-defined]

    for kind in (ShardingStrategy, TorchsOwn):
        assert fields(kind.NO_SHARD) == ("pytorch-ddp", True, None)
        assert fields(kind.SHARD_GRAD_OP) == ("fsdp", False, None)
        assert fields(kind.FULL_SHARD) == ("fsdp", True, None)
        assert fields(kind.HYBRID_SHARD, parallel={"data": 2}) == ("fsdp", True, 2)
    assert fields("shard_grad_op", fsdp={"wrap": "whole"}) == ("fsdp", False, None)
    config = FSDPTrainer(nn.Linear(2, 2), sharding_strategy="HYBRID_SHARD", parallel={"data": 2}).config
    facts = (config.model_copy(update={"num_processes": 4}), get_catalog(), Facts(), Resources())
    dims = resolve(*facts).dims
    assert (dims.data, dims.shard) == (2, 2)
    with pytest.raises(UserError, match=r"parallel\.data: sharding_strategy=HYBRID_SHARD needs the number"):
        fields("HYBRID_SHARD")
    with pytest.raises(UserError, match=r"stands for fsdp\.reshard_after_forward=False\. Got True"):
        fields("SHARD_GRAD_OP", fsdp={"reshard_after_forward": True})
    with pytest.raises(UserError, match=r"backend: sharding_strategy=NO_SHARD.*Got 'fsdp'"):
        fields("NO_SHARD", backend="fsdp")
    with pytest.raises(
        UserError, match=r"sharding_strategy: unknown.*Got '_HYBRID_SHARD_ZERO2'.*NO_SHARD, SHARD"
    ):
        fields(TorchsOwn._HYBRID_SHARD_ZERO2)


# -- fields, flags and arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("buffer_dtype", "Leave it out: buffers keep their dtype, and mixed_precision casts"),
        ("param_dtype", "Did you mean 'mixed_precision'?"),
        ("reduce_dtype", "Did you mean 'fsdp.reduce_dtype'?"),
        ("sharding_strategy", "SHARD_GRAD_OP is fsdp.reshard_after_forward=false"),
        ("async_checkpoint", "Did you mean 'checkpoint.asynchronous'?"),
        ("rdzv_backend", "Leave it out: node 0 serves the rendezvous, at rdzv_endpoint"),
        ("model_parallel", "Did you mean 'parallel.tensor' or 'parallel.pipeline'?"),
        ("tensor_parallel_size", "Did you mean 'parallel.tensor'?"),
        ("use_gradient_checkpointing", "Set activation_checkpointing=full"),
        ("use_deepspeed", "Did you mean 'backend=deepspeed'?"),
        ("profile_training_step", "Did you mean 'profile.enabled'?"),
        ("gradient_compression", "Did you mean 'compression.codec'?"),
        ("GradientCompression", "Did you mean 'compression.codec'?"),
        ("compress_gradients", "Did you mean 'compression.codec'?"),
        ("compress_gradient", "Did you mean 'compression.codec=top-k'?"),
        ("random_sparse", "Did you mean 'compression.codec=random-k'?"),
        ("compression_ratio", "Did you mean 'compression.ratio'?"),
    ],
)
def test_a_name_that_is_no_field_names_the_field(name: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        PyTorchDDPTrainer(nn.Linear(2, 2), **{name: True})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--rdzv_backend=c10d"], "Leave it out: node 0 serves the rendezvous, at rdzv_endpoint"),
        (["--rdzv-backend", "c10d"], "Leave it out: node 0 serves the rendezvous, at rdzv_endpoint"),
        (["--tensor-parallel-size", "2"], "Did you mean '--set parallel.tensor=2'?"),
        (["--use-deepspeed"], "Did you mean '--backend deepspeed'?"),
        (["--backend", "fairscale"], "Did you mean 'fsdp'?"),
    ],
)
def test_a_flag_of_another_launcher_names_ours(
    words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words]) == 2
    assert text in capsys.readouterr().err
    (tmp_path / "train.py").write_text("")
    assert main(["train", "--script", str(tmp_path / "train.py"), *words, "--epochs", "1", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert text in error or "fairscale" not in words
    if "rdzv" in words[0]:
        assert f"--script {tmp_path}/train.py --epochs 1 --dry-run`" in error  # corrected: without the flag


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("model_parallel", "parallel: {tensor: N}"),
        ("use_gradient_checkpointing", "activation_checkpointing: full"),
        ("use_deepspeed", "backend: deepspeed"),
    ],
)
def test_attention_classes_name_the_field_of_a_run(name: str, field: str) -> None:
    shape: Any = (16, 4, [8], [1])
    for kind in (
        kernels.MultiheadDilatedAttention,
        kernels.RingDistributedDilatedAttention,
        kernels.BlockSparseRingDistributedDilatedAttention,
        kernels.DistributedMultiheadDilatedAttention,
        kernels.DistributedImprovedMultiheadDilatedAttention,
        kernels.DilatedTransformerBlock,
    ):
        with pytest.raises(kernels.KernelError) as caught:
            kind(*shape, **{name: True})
        assert f"{name}=True" in str(caught.value)
        assert f"in the configuration: {name} -> {field}" in str(caught.value)
    with pytest.raises(TypeError, match=r"MultiheadDilatedAttention.*unexpected keyword argument 'depth'"):
        kernels.MultiheadDilatedAttention(*shape, depth=3)
    if name != "use_gradient_checkpointing":  # models have that argument
        sizes: Any = {**kernels.PRESETS["small"], name: True}
        for build in (kernels.create_distributed_model, kernels.DilatedLanguageModel):
            with pytest.raises(kernels.KernelError) as caught:
                build(**sizes)
            assert f"{name} -> {field}" in str(caught.value)
    with pytest.raises(TypeError, match=r"DilatedLanguageModel.*unexpected keyword argument 'depth'"):
        kernels.DilatedLanguageModel(**kernels.PRESETS["small"], depth=3)


def test_deepspeed_config_moves_a_ddp_trainer_to_deepspeed() -> None:
    deepspeed = pytest.importorskip("deepspeed")
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    with pytest.raises(TypeError, match="zero_optimization"):
        deepspeed.DeepSpeedConfig(zero_optimization=zero)
    trainer: Trainer = PyTorchDDPTrainer(nn.Linear(2, 2), deepspeed_config={"zero_optimization": zero})
    plan = resolve(trainer.config, get_catalog(), Facts(), Resources())
    assert (plan.spec.name, plan.config.zero_stage) == ("deepspeed", 3)
    section: Any = plan.config
    assert (section.zero.offload_optimizer, section.zero.offload_parameters) == ("cpu", "cpu")
    assert any("deepspeed" in note for note in plan.notes)
