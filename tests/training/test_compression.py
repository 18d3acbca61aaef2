"""Training with each codec: the oracle is the algorithm in plain PyTorch, in one process."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed.data.order import share
from distributed.registry.catalog import get_catalog
from distributed.testing.rank_pool import RankPool
from tests.communication import codec_oracle as oracle
from tests.communication.codec_mutants import ClipsBeforeDecompression
from tests.communication.test_joined import together
from tests.support.ports import free_port
from tests.support.training import OnStep, SameWeights, make_trainer

CODECS = ("fp16", "bf16", "int8", "fp8", "top-k", "random-k", "powersgd")
WITH_FEEDBACK = CODECS[2:]
BATCH, SAMPLES = 12, 52  # of which the last batch has 4
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Network(nn.Module):
    """Convolution, matrix, vectors: of sizes that no row of a codec divides."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 10, 5)
        self.hidden = nn.Linear(60, 30)
        self.last = nn.Linear(30, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.hidden(self.conv(inputs).tanh().flatten(1)).tanh())


def build() -> Network:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Network().double()


def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 3, 10, generator=draw, dtype=torch.float64)
    return inputs, torch.randint(4, (SAMPLES,), generator=draw)


def fields(codec: str) -> dict[str, Any]:
    options = {"top-k": {"ratio": oracle.RATIO}, "random-k": {"ratio": oracle.RATIO}}
    options["powersgd"] = {"rank": oracle.RANK}
    return {
        "compression": {"codec": codec, **options.get(codec, {})},
        "global_batch_size": BATCH,
        "optimizer": SGD,
        "seed": oracle.SEED,
        "gradient_clipping": 0.5,
        "data": {"shuffle": False},
    }


class Plain:
    """Data-parallel training with a codec, all ranks in one process.

    Args:
        ranks: their number.
    """

    def __init__(self, codec: str, ranks: int) -> None:
        self.model, self.ranks, self.step = build(), ranks, 0
        self.optimizer = SGD(self.model.parameters())
        rows = oracle.first_rows(name for name, _ in self.model.named_parameters())
        self.exchange = oracle.ErrorFeedback(codec, rows, feeds_back=codec in WITH_FEEDBACK)

    def train(self, batches: int) -> None:
        inputs, targets = (part.split(BATCH) for part in data())
        for number in range(self.step, self.step + batches):
            self.one_step(inputs[number % len(inputs)], targets[number % len(inputs)])

    def one_step(self, inputs: Tensor, targets: Tensor) -> None:
        parameters = dict(self.model.named_parameters())
        gradients: dict[str, list[Tensor]] = {name: [] for name in parameters}
        for rank in range(self.ranks):
            start, stop = share(len(inputs), rank, self.ranks)
            output = self.model(inputs[start:stop])
            losses = nn.functional.cross_entropy(output, targets[start:stop], reduction="sum")
            found = torch.autograd.grad(losses / len(inputs), list(parameters.values()))
            for name, gradient in zip(parameters, found, strict=True):
                gradients[name].append(gradient)
        for name, parameter in parameters.items():
            parameter.grad = self.exchange(gradients[name], name, self.step)
        nn.utils.clip_grad_norm_(parameters.values(), 0.5)
        self.optimizer.step()
        self.step += 1

    def on_other_ranks(self, ranks: int) -> None:
        """Continue with another number of ranks, each of which has an equal share of what is pending."""
        for name in dict(self.model.named_parameters()):
            before = [self.exchange.residuals.pop((name, rank)) for rank in range(self.ranks)]
            for rank in range(ranks):
                self.exchange.residuals[name, rank] = sum(before) / ranks
        self.ranks = ranks


def close(model: nn.Module, expected: nn.Module) -> None:
    for (name, found), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, other, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_training_is_the_oracles(rank_pool: RankPool, codec: str, ranks: int) -> None:
    model, plain = build(), Plain(codec, ranks)
    make_trainer(model, ranks, rank_pool, callbacks=[SameWeights()], **fields(codec)).fit(data(), epochs=2)
    plain.train(10)
    close(model, plain.model)


def test_gradients_clipped_before_they_are_sent_show(rank_pool: RankPool) -> None:
    """A broken backend does not train as the oracle does."""
    backends, spec = get_catalog().backends, get_catalog().backends["pytorch-ddp"]
    kind = ClipsBeforeDecompression
    broken = replace(spec, name=f"mutant-{kind.__name__}", target=f"{kind.__module__}:{kind.__name__}")
    model, plain = build(), Plain("top-k", 2)
    backends[broken.name] = broken
    try:
        make_trainer(model, 2, rank_pool, backend=broken.name, **fields("top-k")).fit(data(), epochs=1)
    finally:
        del backends[broken.name]
    plain.train(5)
    with pytest.raises(AssertionError):
        close(model, plain.model)


@pytest.mark.parametrize("codec", CODECS)
def test_a_resumed_run_has_the_same_bits(rank_pool: RankPool, codec: str, tmp_path: Path) -> None:
    given = {**fields(codec), "checkpoint": {"every_n_steps": 1}}
    whole, parts = build(), build()
    make_trainer(whole, 2, rank_pool, **given).fit(data(), epochs=2)
    for steps in (3, 7, 10):
        trainer = make_trainer(
            parts, 2, rank_pool, folder=tmp_path, resume_from_checkpoint=True, epochs=2, **given
        )
        trainer.fit(data(), max_steps=steps)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("codec", WITH_FEEDBACK)
def test_another_number_of_ranks_keeps_the_pending_update(
    rank_pool: RankPool, codec: str, tmp_path: Path
) -> None:
    model, plain = build(), Plain(codec, 3)
    given = {**fields(codec), "checkpoint": {"every_n_steps": 1}, "epochs": 2}
    for ranks, steps in ((3, 3), (2, 6)):
        trainer = make_trainer(model, ranks, rank_pool, folder=tmp_path, resume_from_checkpoint=True, **given)
        trainer.fit(data(), max_steps=steps)
    plain.train(3)
    plain.on_other_ranks(2)
    plain.train(3)
    close(model, plain.model)


def test_a_run_without_the_codec_says_what_it_drops(
    rank_pool: RankPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = fields("top-k")
    make_trainer(build(), 2, rank_pool, folder=tmp_path, **given).fit(data(), epochs=1)
    del given["compression"]
    model = build()
    make_trainer(model, 2, rank_pool, folder=tmp_path, resume_from_checkpoint=True, **given).fit(
        data(), epochs=2
    )
    assert "had still to send; this run has no codec" in capfd.readouterr().out


@pytest.mark.parametrize("bucket_cap_mb", [1e-4, 25.0])
def test_buckets_do_not_change_the_training(rank_pool: RankPool, bucket_cap_mb: float) -> None:
    model, plain = build(), Plain("int8", 2)
    trainer = make_trainer(model, 2, rank_pool, bucket_cap_mb=bucket_cap_mb, **fields("int8"))
    trainer.fit(data(), epochs=1)
    plain.train(5)
    close(model, plain.model)


def masked_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and number of the samples that are not of class 3."""
    kept = target != 3
    return nn.functional.cross_entropy(output, target, reduction="none")[kept].sum(), kept.sum()


def test_what_is_kept_belongs_to_the_true_count(rank_pool: RankPool) -> None:
    """The count of a global batch is known after forward; what is kept must not be scaled by that of the
    next batch."""
    model, plain = build(), Plain("top-k", 2)
    trainer = make_trainer(model, 2, rank_pool, loss_fn=masked_loss, **fields("top-k"))
    trainer.fit(data(), epochs=1)

    inputs, targets = (part.split(BATCH) for part in data())
    parameters = dict(plain.model.named_parameters())
    for x, y in zip(inputs, targets, strict=True):
        gradients = []
        for rank in range(2):
            start, stop = share(len(x), rank, 2)
            loss, _ = masked_loss(plain.model(x[start:stop]), y[start:stop])
            gradients.append(torch.autograd.grad(loss / (y != 3).sum(), list(parameters.values())))
        for (name, parameter), *own in zip(parameters.items(), *gradients, strict=True):
            parameter.grad = plain.exchange(own, name, plain.step)
        nn.utils.clip_grad_norm_(parameters.values(), 0.5)
        plain.optimizer.step()
        plain.step += 1
    close(model, plain.model)


def poison(context: Any) -> None:
    """Make the next batch's gradient of rank 1 infinite."""
    context.model.last.bias.register_hook(once(lambda gradient: gradient * torch.inf))


def once(function: Any) -> Any:
    used: list[bool] = []

    def hook(gradient: Tensor) -> Tensor:
        if used:
            return gradient
        used.append(True)
        return function(gradient)

    return hook


@pytest.mark.parametrize("codec", WITH_FEEDBACK)
def test_a_skipped_step_keeps_what_was_pending(rank_pool: RankPool, codec: str) -> None:
    model, plain = build(), Plain(codec, 2)
    trainer = make_trainer(
        model, 2, rank_pool, on_nan="skip", callbacks=[OnStep(poison, step=2, rank=1)], **fields(codec)
    )
    trainer.fit(data(), epochs=1)
    plain.train(2)
    plain.step += 1  # skipped
    inputs, targets = (part.split(BATCH) for part in data())
    for number in (3, 4):
        plain.one_step(inputs[number], targets[number])
    close(model, plain.model)


def test_a_second_fit_sends_what_the_first_has_kept(rank_pool: RankPool) -> None:
    model, plain = build(), Plain("top-k", 2)
    trainer = make_trainer(model, 2, rank_pool, **fields("top-k"))
    for _ in range(2):
        trainer.fit(data(), epochs=1)
    plain.train(10)
    close(model, plain.model)


JOINED = """
import sys, torch
from tests.training.test_compression import build, data, fields
from tests.support.training import make_trainer
model = build()
trainer = make_trainer(model, 2, **fields("top-k"))
for _ in range(2):
    trainer.fit(data(), epochs=1)
torch.save(model.state_dict(), sys.argv[1])
"""


@pytest.mark.starts_processes
def test_a_second_fit_of_a_launchers_ranks_does_too(tmp_path: Path) -> None:
    script, port = tmp_path / "script.py", free_port()
    script.write_text(JOINED)
    words = [[sys.executable, str(script), str(tmp_path / f"{rank}.pt")] for rank in range(2)]
    own = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    envs = [
        {**own, "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port), "PYTHONPATH": "."}
        for rank in range(2)
    ]
    for code, _, errors in together(words, envs, [{}, {}]):
        assert code == 0, errors
    model, plain = build(), Plain("top-k", 2)
    plain.train(10)
    for rank in range(2):
        model.load_state_dict(torch.load(tmp_path / f"{rank}.pt"))
        close(model, plain.model)
