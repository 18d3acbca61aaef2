"""Codecs on every backend that has them, beside the oracle in plain PyTorch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed.errors import UserError
from distributed.testing.rank_pool import RankPool
from tests.communication import codec_oracle as oracle
from tests.support.training import SameWeights, make_trainer
from tests.training.test_compression import (
    BATCH,
    CODECS,
    SGD,
    WITH_FEEDBACK,
    Plain,
    build,
    close,
    data,
    fields,
    masked_loss,
)

BACKENDS: dict[str, dict[str, Any]] = {
    "horovod": {"backend": "horovod"},
    "deepspeed": {"backend": "deepspeed", "zero_stage": 0},
}


def of_backend(name: str) -> dict[str, Any]:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return BACKENDS[name]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", CODECS)
def test_training_is_the_oracles(rank_pool: RankPool, codec: str, backend: str) -> None:
    model, plain = build(), Plain(codec, 2)
    given = {**fields(codec), **of_backend(backend)}
    make_trainer(model, 2, rank_pool, callbacks=[SameWeights()], **given).fit(data(), epochs=1)
    plain.train(5)
    close(model, plain.model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_kept_belongs_to_the_true_count(rank_pool: RankPool, backend: str) -> None:
    found = []
    for given in ({}, of_backend(backend)):
        model = build()
        make_trainer(model, 2, rank_pool, loss_fn=masked_loss, **fields("top-k"), **given).fit(data())
        found.append(model)
    close(*found)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", WITH_FEEDBACK)
def test_a_run_goes_on_under_another_backend(
    rank_pool: RankPool, codec: str, backend: str, tmp_path: Path
) -> None:
    whole, parts = build(), build()
    make_trainer(whole, 2, rank_pool, **fields(codec)).fit(data(), epochs=1)
    given = {**fields(codec), "checkpoint": {"every_n_steps": 1}, "resume_from_checkpoint": True}
    make_trainer(parts, 2, rank_pool, folder=tmp_path, **given).fit(data(), max_steps=2)
    make_trainer(parts, 2, rank_pool, folder=tmp_path, **given, **of_backend(backend)).fit(data(), epochs=1)
    close(parts, whole)


class PlainShards(Plain):
    """As `Plain`, where `shards` ranks hold a shard of each parameter, and `ranks` copies of each shard
    exchange its gradient."""

    def __init__(self, codec: str, ranks: int, shards: int) -> None:
        super().__init__(codec, ranks * shards)
        self.shards = shards
        rows = oracle.first_rows(name for name, _ in self.model.named_parameters())
        self.exchanges = [
            oracle.ErrorFeedback(codec, rows, feeds_back=codec in WITH_FEEDBACK) for _ in range(shards)
        ]
        self.exchange: Any = self.exchange_shards

    def exchange_shards(self, gradients: list[Tensor], name: str, step: int) -> Tensor:
        copies = [sum(gradients[i : i + self.shards]) for i in range(0, self.ranks, self.shards)]
        parts = zip(*(copy.chunk(self.shards) for copy in copies), strict=True)
        return torch.cat(
            [exchange(part, name, step) for exchange, part in zip(self.exchanges, parts, strict=False)]
        )


@pytest.mark.parametrize("codec", CODECS)
def test_copies_of_shards(rank_pool: RankPool, codec: str) -> None:
    model, plain = build(), PlainShards(codec, 2, 2)
    given = {**fields(codec), "backend": "fsdp", "parallel": {"data": 2}}
    make_trainer(model, 4, rank_pool, **given).fit(data(), epochs=1)
    plain.train(5)
    close(model, plain.model)


def test_copies_of_shards_count_tokens_first(rank_pool: RankPool) -> None:
    """The same with a count that is known after forward only, beside a codec that loses nothing."""
    whole, model = build(), build()
    given = {**fields("top-k"), "compression": {"codec": "top-k", "ratio": 1.0}, "loss_fn": masked_loss}
    make_trainer(whole, 2, rank_pool, **given).fit(data(), epochs=1)
    given |= {"backend": "fsdp", "parallel": {"data": 2}}
    make_trainer(model, 4, rank_pool, **given).fit(data(), epochs=1)
    close(model, whole)


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "data 2 x tensor 2": (4, {"parallel": {"tensor": 2}}),
    "data 2 x pipeline 2": (4, {"parallel": {"pipeline": 2}}),
    "data 2 x shard 2, tensor 1": (4, {"backend": "fsdp", "parallel": {"data": 2}}),
}


class Layers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(30, 20), nn.Tanh(), nn.LayerNorm(20), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4)
        )


def layers() -> Layers:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Layers().double()


def flat_data() -> tuple[Tensor, Tensor]:
    inputs, targets = data()
    return inputs.flatten(1), targets


def train_layers() -> nn.Module:
    model = layers()
    optimizer = SGD(model.parameters())
    inputs, targets = (part.split(BATCH) for part in flat_data())
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model


@pytest.mark.parametrize("mesh", MESHES)
def test_a_codec_that_loses_nothing_changes_nothing(rank_pool: RankPool, mesh: str) -> None:
    ranks, own = MESHES[mesh]
    model = layers()
    given = {**fields("top-k"), "compression": {"codec": "top-k", "ratio": 1.0}, **own}
    make_trainer(model, ranks, rank_pool, **given).fit(flat_data(), epochs=1)
    close(model, train_layers())


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("codec", ["int8", "powersgd", "top-k"])
def test_a_mesh_resumes_with_the_same_bits(
    rank_pool: RankPool, mesh: str, codec: str, tmp_path: Path
) -> None:
    ranks, own = MESHES[mesh]
    given = {**fields(codec), **own}
    whole, parts = layers(), layers()
    make_trainer(whole, ranks, rank_pool, **given).fit(flat_data(), epochs=1)
    given |= {"checkpoint": {"every_n_steps": 1}, "resume_from_checkpoint": True}
    for steps in (2, 5):
        make_trainer(parts, ranks, rank_pool, folder=tmp_path, **given).fit(flat_data(), max_steps=steps)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("saver", MESHES)
@pytest.mark.parametrize("loader", ["data 3", *MESHES])
def test_another_mesh_keeps_the_pending_update(
    rank_pool: RankPool, saver: str, loader: str, tmp_path: Path
) -> None:
    """One more step without a gradient, by a codec that loses nothing, sends all that was pending."""
    ranks, own = MESHES[saver]
    given = {**fields("top-k"), "resume_from_checkpoint": True, "gradient_clipping": None, **own}
    model = layers()
    make_trainer(model, ranks, rank_pool, folder=tmp_path, **given).fit(flat_data(), epochs=1)
    pending = pending_update(tmp_path)
    assert all(value.abs().sum() > 0 for name, value in pending.items() if value.numel() > 10)
    ranks, own = {"data 3": (3, {}), **MESHES}[loader]
    given |= {"compression": {"codec": "top-k", "ratio": 1.0}, "loss_fn": no_loss}
    before = {name: p.clone() for name, p in model.named_parameters()}
    velocity = momentum(tmp_path)
    inputs, targets = flat_data()
    given = {**given, "backend": "pytorch-ddp", "parallel": {}, **own}
    trainer = make_trainer(model, ranks, rank_pool, folder=tmp_path, **given)
    trainer.fit((inputs[:BATCH], targets[:BATCH]), epochs=2)
    for name, parameter in model.named_parameters():
        expected = before[name] - 0.05 * (0.9 * velocity[name] + pending[name])
        torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-9)


def no_loss(output: Tensor, target: Tensor) -> Tensor:
    return output.mean() * 0.0


def _saved(folder: Path, kind: str) -> dict[str, Tensor]:
    from distributed.checkpoint.reader import PortableReader

    newest = max(folder.glob("step_*"))
    reader, found = PortableReader(str(newest)), {}
    for (key, name), shape in reader.tensors().items():
        if key.endswith(kind):
            found[name] = found.get(name, 0) + reader.read(key, name).reshape(shape)
    return found


def pending_update(folder: Path) -> dict[str, Tensor]:
    """The sum of the residuals of all replicas, by name."""
    return _saved(folder, "compression.residual")


def momentum(folder: Path) -> dict[str, Tensor]:
    return _saved(folder, "optimizer.momentum_buffer")


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_stages_are_refused(stage: int) -> None:
    of_backend("deepspeed")
    given = {**fields("int8"), "backend": "deepspeed", "zero_stage": stage}
    with pytest.raises(UserError, match="reduces gradients to the shards"):
        make_trainer(build(), 2, **given).fit(data())


@pytest.mark.parametrize(
    ("parallel", "expected"), [({}, "codecs send gradients between copies"), ({"data": 2}, "no shards here")]
)
def test_shards_without_copies_are_refused(parallel: dict[str, int], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        make_trainer(build(), 2, **fields("int8"), backend="fsdp", parallel=parallel).fit(data())


def test_horovods_own_field_is_another_name(rank_pool: RankPool) -> None:
    of_backend("horovod")
    given = {**fields("fp16"), "backend": "horovod"}
    found = []
    for own in ({}, {"compression": {}, "horovod": {"compression": "fp16"}}):
        model = build()
        make_trainer(model, 2, rank_pool, **{**given, **own}).fit(data(), epochs=1)
        found.append(model)
    for one, other in zip(*(model.parameters() for model in found), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(UserError, match="asks for the codec 'fp16'"):
        make_trainer(
            build(), 2, **{**fields("int8"), "backend": "horovod", "horovod": {"compression": "fp16"}}
        ).fit(data())


def test_sparse_gradients_are_refused(rank_pool: RankPool) -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(12, 4))
    inputs = torch.randint(10, (24, 3)), torch.randint(4, (24,))
    given = {**fields("int8"), "gradient_clipping": None}
    with pytest.raises(UserError, match="codecs send dense gradients"):
        make_trainer(model, 2, rank_pool, **given).fit(inputs)
