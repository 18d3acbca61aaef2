"""Compiled blocks and models: the same training but for rounding, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distributed import Callback, UserError
from distributed.interfaces.callback import Context
from distributed.testing.rank_pool import RankPool
from distributed.testing.reference_problem import Deep, problem, small_model
from tests.parallel.models import ENTRIES, tokens
from tests.support.training import make_trainer

pytestmark = pytest.mark.starts_processes  # the compiler does

ROUNDING = 1e-12


class OwnLoss(nn.Module):
    """Computes the loss over unmasked targets, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Deep(0.0)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def masked() -> list[dict[str, Tensor]]:
    """Samples of which most labels are masked."""
    x, y = problem(26)
    y = torch.where(torch.rand(26, generator=torch.Generator().manual_seed(3)) < 0.6, -100, y)
    return [{"inputs": a, "labels": b} for a, b in zip(x, y, strict=True)]


def train(
    model: Any,
    data: Any,
    backend: str,
    ranks: int,
    pool: RankPool | None,
    callbacks: Sequence[Callback] = (),
    steps: int = 6,
    **given: Any,
) -> tuple[list[Tensor], list[float]]:
    """(weights, losses) after a few steps with accumulation."""
    trainer = make_trainer(
        model, ranks, pool, backend=backend, batch_size=3, gradient_accumulation_steps=2,
        optimizer=torch.optim.SGD, learning_rate=0.1, **given,
    )  # fmt: skip
    trainer.callbacks = list(callbacks)
    history = trainer.fit(data, data[:5] if isinstance(data, list) else problem(5), max_steps=steps)
    return [p.detach() for p in model.parameters()], history.steps["loss"]


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


class IsCompiled(Callback):
    """Fail where a block ran more often without being compiled than the first micro-batch of a run."""

    all_ranks = True

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed

    def on_step_end(self, context: Context) -> None:
        body = getattr(context.model, "body", context.model)
        assert [block.calls for block in body.blocks] == [self.allowed] * 2
        assert [name for name in context.model.state_dict() if "orig_mod" in name] == []


@pytest.mark.parametrize(
    ("backend", "given"),
    [("pytorch-ddp", {}), ("fsdp", {}), ("horovod", {}), ("deepspeed", {"zero_stage": 2})],
    ids=["ddp", "fsdp", "horovod", "zero-2"],
)
def test_compiled_training_differs_by_rounding(
    backend: str, given: dict[str, Any], rank_pool: RankPool
) -> None:
    """Blocks of a model, and a whole model that averages its loss over unmasked targets."""
    for build, data, compiled, allowed in (
        (partial(Deep, 0.0), problem(26), "blocks", 0),
        (OwnLoss, masked(), "model", 1),
    ):
        plain = train(build(), data, backend, 2, rank_pool, **given)
        callbacks = [IsCompiled(allowed)]
        found = train(build(), data, backend, 2, rank_pool, callbacks, compile=compiled, **given)
        assert distance(plain[0], found[0]) < ROUNDING
        assert found[1] == pytest.approx(plain[1], abs=ROUNDING)


class CountsGraphs(Callback):
    """Fail where nothing was compiled, or where the compiler left code out after the first step.

    The first step compares the inputs of layers that ranks cut, which cannot be compiled.
    """

    all_ranks = True

    def on_run_start(self, context: Context) -> None:
        torch._dynamo.utils.counters.clear()

    def on_step_end(self, context: Context) -> None:
        if context.progress.step == 1:
            torch._dynamo.utils.counters["graph_break"].clear()

    def on_run_end(self, context: Context, status: str) -> None:
        if status == "finished":
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
            assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize(("name", "parallel"), [("encoder", {}), ("llama", {"tensor": 2})])
def test_compiled_blocks_of_libraries_differ_by_rounding(
    name: str, parallel: dict[str, int], rank_pool: RankPool
) -> None:
    """nn.TransformerEncoder under DDP, and a Llama whose blocks two ranks cut: masked tokens, AdamW."""
    found = []
    for compiled in ("none", "blocks"):
        model = ENTRIES[name].build()
        fields = {"parallel": parallel, "compile": compiled, "gradient_clipping": 0.5}
        trainer = make_trainer(model, 2, rank_pool, backend="pytorch-ddp", global_batch_size=8, **fields)
        trainer.callbacks = [CountsGraphs()] if compiled == "blocks" else []
        losses = trainer.fit(tokens(16), max_steps=4).steps["loss"]
        found.append(([p.detach() for p in model.parameters()], losses))
    (plain, plain_losses), (blocks, losses) = found
    assert distance(plain, blocks) < ROUNDING
    assert losses == pytest.approx(plain_losses, abs=ROUNDING)


def test_with_recomputed_activations_and_checkpoints(tmp_path: Any) -> None:
    """Compiled under one setting and resumed under others, a run ends where the plain one does."""
    plain = train(Deep(0.0), problem(26), "serial", 1, None)[0]
    for number, settings in enumerate(
        (
            {"compile": "blocks", "activation_checkpointing": "full"},
            {"compile": "blocks", "activation_checkpointing": "selective"},
            {"compile": "model", "activation_checkpointing": "full"},
        )
    ):
        folder = {"checkpoint_dir": tmp_path / str(number), "resume_from_checkpoint": True}
        model = Deep(0.0)
        train(model, problem(26), "serial", 1, None, steps=3, **folder, **settings)
        assert not any("forward" in vars(module) for module in model.modules())
        found = train(Deep(0.0), problem(26), "serial", 1, None, **folder)[0]
        assert distance(plain, found) < ROUNDING


class Growing(torch.utils.data.Dataset[Tensor]):
    """Samples of as many rows as their index + 2."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(index + 2, 6, dtype=torch.float64)


def mean_of_rows(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).mean()
    return loss


# -- what is refused --------------------------------------------------------------------------------


class NamedLoss(OwnLoss):
    """Calls a loss that it imported by its own name."""

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": cross_entropy(self.body(inputs), labels)}


def test_a_loss_that_a_compiled_model_hides_is_refused() -> None:
    with pytest.raises(UserError, match=r"^compile: .*imported by its own name.*torch\.nn\.functional"):
        train(NamedLoss(), masked(), "serial", 1, None, compile="model")


@pytest.mark.parametrize(
    ("model", "given", "text"),
    [
        (small_model, {"compile": "blocks"}, r"^compile: found no blocks in Sequential.*Allowed: model"),
        (
            partial(Deep, 0.0),
            {"compile": "model", "activation_checkpointing": "offload"},
            "^compile: .*blocks",
        ),
        (
            partial(Deep, 0.0),
            {"compile": "model", "backend": "deepspeed", "zero_stage": 3},
            "^compile: .*ZeRO 3",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused(model: Any, given: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        train(model(), problem(12), given.pop("backend", "serial"), 1, None, **given)


def without_a_compiler() -> nn.Module:
    import torch._inductor.config

    torch._inductor.config.fx_graph_cache = False
    torch._inductor.config.cpp.cxx = ("no-such-compiler",)
    return Deep(0.0)


def test_an_error_of_the_compiler_names_the_field() -> None:
    """Not a silent run without it. The ranks end with the test, as they remember the compiler."""
    with closing(RankPool()) as pool, pytest.raises(UserError, match=r"^compile: .*needs a C\+\+ compiler"):
        train(without_a_compiler, problem(12), "pytorch-ddp", 2, pool, compile="blocks")


def test_more_shapes_than_torch_compiles_are_refused_under_deterministic() -> None:
    torch._dynamo.reset()
    lengths = torch.utils.data.DataLoader(Growing(), batch_size=1)
    trainer = make_trainer(
        Deep(0.0), backend="serial", compile="blocks", deterministic=True, training_step=mean_of_rows
    )
    with (
        torch._dynamo.config.patch(recompile_limit=2),
        pytest.raises(UserError, match="more than 2 different"),
    ):
        trainer.fit(lengths, max_steps=6)
