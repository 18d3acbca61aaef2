"""DeepSpeed's engine in a loop of the user's own trains as plain PyTorch does on the whole batch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from distributed import DeepSpeedDilatedAttentionEngine, DistributedConfig, UserError, cleanup_distributed
from distributed.interfaces.plan import Facts, Resources
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from distributed.testing.suite import EXACT
from tests.backends.fsdp_model import WORDS, TinyLM, tiny
from tests.support.commands import start
from tests.support.ports import free_port

initialize = DeepSpeedDilatedAttentionEngine.initialize_deepspeed
RATE, BATCH, STEPS = 1e-2, 8, 4

SCRIPT = """
import json, os, pathlib, sys
import deepspeed, torch
from torch.nn.functional import cross_entropy
from distributed import DeepSpeedDilatedAttentionEngine
from tests.backends.fsdp_model import tiny
from tests.backends.test_deepspeed_own_loop import BATCH, CASES, RATE, STEPS, batches

rank, size, out = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), {}
torch.distributed.init_process_group(backend="gloo")
linear = torch.nn.functional.linear
for name, (given, micro_batches) in CASES.items():
    model = tiny()
    if rank:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)  # the ranks start from rank 0's weights all the same
    model_engine, optimizer, _, lr_scheduler = DeepSpeedDilatedAttentionEngine.initialize_deepspeed(
        model=model, train_batch_size=BATCH, device="cpu", **{"learning_rate": RATE, **given}
    )
    share = BATCH // size // micro_batches
    for x, y in batches():
        for part in range(micro_batches):
            first = (rank * micro_batches + part) * share
            outputs = model_engine(x[first : first + share])
            loss = cross_entropy(outputs.flatten(0, 1), y[first : first + share].flatten())
            model_engine.backward(loss)
            model_engine.step()
    assert isinstance(model_engine, deepspeed.DeepSpeedEngine) and optimizer is model_engine.optimizer
    assert model_engine.zero_optimization_stage() == given["zero_stage"]
    assert torch.nn.functional.linear is linear
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=given["zero_stage"] == 3):
        out[name] = [value for p in model.parameters() for value in p.flatten().tolist()]
pathlib.Path(os.environ["OUT"], f"{rank}.json").write_text(json.dumps(out))
"""


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


CASES: dict[str, tuple[dict[str, Any], int]] = {
    **{f"stage {stage}": ({"zero_stage": stage}, 1) for stage in range(4)},
    **{
        f"stage {stage}, accumulated, clipped, scheduled": (
            {
                "zero_stage": stage,
                "gradient_accumulation_steps": 2,
                "gradient_clipping": 0.1,
                "lr_scheduler": halved,
                # Adam would hide another norm, because its step has one size for gradients of any.
                "optimizer": torch.optim.SGD,
                "learning_rate": 4.0,
            },
            2,
        )
        for stage in (0, 1, 3)
    },
    "offloaded": ({"zero_stage": 2, "zero": {"offload_optimizer": "cpu"}}, 1),
}
"""Name -> arguments of `initialize_deepspeed`, calls of the engine for each step."""


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randint(WORDS, (STEPS, BATCH, 4), generator=generator) for _ in range(2))
    return list(zip(x, y, strict=True))


def plain(given: dict[str, Any]) -> list[float]:
    """Weights after plain PyTorch over the whole batches, by AdamW if no optimizer is given."""
    model = tiny()
    trained = [p for p in model.parameters() if p.requires_grad]
    kind = given.get("optimizer", partial(torch.optim.AdamW, weight_decay=0.0))
    optimizer = kind(trained, lr=given.get("learning_rate", RATE))
    scheduler = given["lr_scheduler"](optimizer) if "lr_scheduler" in given else None
    for x, y in batches():
        optimizer.zero_grad()
        cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        if "gradient_clipping" in given:
            norm = nn.utils.clip_grad_norm_(trained, given["gradient_clipping"])
            assert norm > 2 * given["gradient_clipping"]
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return weights(model)


def weights(model: nn.Module) -> list[float]:
    return [float(value) for p in model.parameters() for value in p.detach().flatten()]


def run_ranks(folder: Path, size: int) -> list[dict[str, list[float]]]:
    """What `SCRIPT` leaves on `size` ranks with torchrun's variables."""
    port = str(free_port())
    processes = [
        start(
            [sys.executable, "-c", SCRIPT],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OUT": str(folder),
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONPATH": os.pathsep.join(
                    [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
                ),
            },
            stdout=-1,
            stderr=-2,
            preload=["deepspeed", *get_catalog().backends["deepspeed"].preload],
        )
        for rank in range(size)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert codes == [0] * size, "\n".join([str(codes), *outputs])
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.starts_processes
def test_two_ranks_train_as_plain_pytorch_does_on_the_whole_batch(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, 2)
    for name, (given, _) in CASES.items():
        expected = plain(given)
        for rank in found:
            assert rank[name] == pytest.approx(expected, abs=EXACT, rel=0), name


# -- one process -------------------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[None]:
    """Leaves the process without the group that the engine of one rank needs."""
    yield
    cleanup_distributed()


class OwnLoss(TinyLM):
    """Returns its loss, as models of transformers do with labels."""

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(super().forward(words).flatten(0, 1), labels.flatten())


def test_one_process_trains_without_a_launcher(alone: None) -> None:
    """A model that returns its loss, in two calls for each step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = OwnLoss().double()
    engine, _, loader, scheduler = initialize(
        model, BATCH, RATE, 2, gradient_accumulation_steps=2, device="cpu"
    )
    assert (loader, scheduler) == (None, None)
    for x, y in batches():
        for part in (slice(0, 4), slice(4, 8)):
            engine.backward(engine(x[part], labels=y[part]))
            engine.step()
    assert weights(model) == pytest.approx(plain({}), abs=EXACT, rel=0)


def test_samples_that_are_not_the_rank_s_share_are_refused(alone: None) -> None:
    engine, *_ = initialize(tiny(), BATCH, RATE, 0, device="cpu")
    x, _ = batches()[0]
    with pytest.raises(
        UserError, match=r"called with 3 samples on this rank\. Got 8\. Allowed: calls with 8 ="
    ):
        engine(x[:3])
    with pytest.raises(UserError, match="called with 3 samples on this rank"):
        engine({"x": x[:3]})
    engine.eval()
    assert len(engine(x[:3])) == 3


def test_bf16_is_autocast_and_a_dataset_becomes_the_rank_s_loader(alone: None) -> None:
    x, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    model = tiny(torch.float32)
    engine, _, loader, _ = initialize(
        model, BATCH, RATE, 1, mixed_precision="bf16", training_data=TensorDataset(x, y), device="cpu"
    )
    assert [len(inputs) for inputs, _ in loader] == [BATCH] * STEPS
    seen = torch.cat([inputs for inputs, _ in loader])
    assert sorted(seen.tolist()) == sorted(x.tolist())
    outputs = engine(next(iter(loader))[0])
    assert outputs.dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_the_lines_of_a_trainer_are_printed(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    native = {"zero_optimization": {"stage": 1}}
    initialize(tiny(), BATCH, RATE, deepspeed_config=native, device="cpu")
    first, *notes = capsys.readouterr().out.splitlines()
    assert first == "deepspeed: 1 rank on CPU, fp32; global batch 8 = 8 samples x 1 rank"
    assert "note: ZeRO stage 1" in notes
    assert [note for note in notes if "has no gradient_clipping, and nothing is clipped" in note]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"zero_stage": 4}, "^zero_stage: invalid value. Got 4. Allowed: a whole number at least 0 and at most"),
    ({"train_batch_size": 8, "gradient_accumulation_steps": 3},
     "^train_batch_size: 8 samples .*3 calls.*Allowed: multiples of 3; nearest: 6 or 9"),
    ({"train_batch_size": None}, "^train_batch_size: the number of samples per step is missing"),
    ({"mixed_precision": "fp16"}, "^mixed_precision: .*no loss scaler"),
    ({"epochs": 3}, "^epochs: an engine in a loop of your own does not apply it.*Trainer"),
    ({"lr": 0.1}, "Did you mean 'learning_rate'"),
    ({"cpu_offload": True}, "zero.offload_optimizer=cpu"),
    ({"zero_stage": 1, "optimizer": torch.optim.Adafactor}, "^optimizer: ZeRO shards parameters into flat"),
    ({"zero_stage": 1, "deepspeed_config": {"zero_optimization": {"stage": 2}}}, "zero_stage: deepspeed_con"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_mistakes_are_named(given: dict[str, Any], message: str, alone: None) -> None:
    with pytest.raises(UserError, match=message):
        initialize(tiny(), **{"train_batch_size": BATCH, "device": "cpu", **given})


def test_ranks_that_do_not_divide_the_batch_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"^train_batch_size: 64 .* between 3 ranks.*nearest: 63 or 66"):
        initialize(tiny(), 64, device="cpu")


def test_a_backend_without_an_engine_names_what_to_use() -> None:
    catalog = get_catalog()
    plan = resolve(DistributedConfig(device="cpu"), catalog, Facts(), Resources())
    with pytest.raises(UserError, match=r"^backend: .*Trainer\.train_step, or setup_distributed"):
        catalog.load_backend(plan.spec).engine_outside_fit(plan, tiny(), None, None)
