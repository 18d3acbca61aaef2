"""Replicated models: what is saved by s ranks and read by t is the same, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from distributed.checkpoint.reader import PortableReader
from distributed.checkpoint.torch_state import (
    canonical_name,
    capture_rng,
    export_replicated,
    import_replicated,
    load_full_model,
    restore_rng,
)
from distributed.errors import UserError
from distributed.interfaces.state import BackendState
from tests.campaigns.thread_ranks import save_state as save


class Net(nn.Module):
    """Tied, frozen, odd, empty, 0-dimensional and several dtypes, and buffers of each kind."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5, dtype=dtype)
        self.body = nn.Sequential(nn.Linear(5, 5, dtype=dtype), nn.BatchNorm1d(5, dtype=dtype))
        self.head = nn.Linear(5, 7, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3, dtype=dtype), requires_grad=False)
        self.temperature = nn.Parameter(torch.tensor(1.5, dtype=dtype))
        self.empty = nn.Parameter(torch.empty(0, 4, dtype=dtype))
        self.columns = nn.Parameter(torch.randn(4, 6, dtype=dtype).t())  # not contiguous
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("ids", torch.arange(2**40, 2**40 + 3))
        self.register_buffer("small", torch.randn(3).to(torch.float16))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.mask: Tensor
        self.notes = {"seen": 0}

    def get_extra_state(self) -> dict[str, int]:
        return self.notes

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.notes = state

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.body(self.embed(ids)) * self.temperature + self.columns.sum()
        return self.head(hidden).float().logsumexp(-1).mean()


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trainable(model), lr=0.1, momentum=0.9, nesterov=True)


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    plain = [p for p in trainable(model) if p.dim() < 2]
    decay = [p for p in trainable(model) if p.dim() >= 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), amsgrad=True)


def make_adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(trainable(model), lr=1e-2)


def make_nadam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam(trainable(model), lr=1e-2)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and p.numel()]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.tensor([step % 7, 3, 5, 1])).backward()
        optimizer.step()


def bits(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    flat = tensor.detach().reshape(-1).contiguous()
    return str(tensor.dtype), tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any, Any]:
    def plain(value: Any) -> Any:
        return bits(value) if isinstance(value, Tensor) else value

    state = optimizer.state_dict()
    slots = {i: {k: plain(v) for k, v in entry.items()} for i, entry in state["state"].items()}
    weights = {k: plain(v) for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    return weights, slots, state["param_groups"]


OPTIMIZERS = [make_sgd, make_adamw, make_adafactor, make_nadam]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: make.__name__)
def test_resumed_training_is_bit_identical(make: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Net(dtype)
    optimizer = make(model)
    train(model, optimizer, 3)
    model.notes = {"seen": 3}
    path = save(tmp_path, 2, lambda r, s: export_replicated(model, optimizer, {"scale": 2.0}, r, s))
    torch.manual_seed(2)
    other = Net(dtype)
    again = make(other)
    train(other, again, 1)  # stale state must go
    reader = PortableReader(path)
    import_replicated(reader, other, again)
    assert snapshot(other, again) == snapshot(model, optimizer)
    assert other.notes == {"seen": 3}
    assert other.head.weight is other.embed.weight
    assert reader.scaler == {"scale": 2.0}
    train(model, optimizer, 2)
    train(other, again, 2)
    assert snapshot(other, again) == snapshot(model, optimizer)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_number_of_ranks_saves_the_same_tensors(size: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Net(torch.float32)
    optimizer = make_adamw(model)
    train(model, optimizer, 2)
    path = save(tmp_path, size, lambda r, s: export_replicated(model, optimizer, None, r, s))
    reader = PortableReader(path)
    assert reader.world_size == size
    assert [reader.rank_extra(rank) for rank in range(size + 1)] == [
        *({"rank": r} for r in range(size)),
        None,
    ]
    expected = {
        ("model", name): value for name, value in model.state_dict().items() if isinstance(value, Tensor)
    }
    del expected["model", "head.weight"]
    assert {key for key in reader.tensors() if key[0] == "model"} == expected.keys()
    assert reader.aliases == {"head.weight": "embed.weight"}
    for readers in (1, 2, 3):  # t ranks, each with its own slice of every tensor
        for key, value in expected.items():
            cuts = [value.numel() * r // readers for r in range(readers + 1)]
            parts = [reader.read(*key, cuts[r], cuts[r + 1] - cuts[r]) for r in range(readers)]
            assert bits(torch.cat(parts).reshape(value.shape)) == bits(value)


def test_export_aliases_nothing_live() -> None:
    model = Net(torch.float32)
    optimizer = make_adamw(model)
    train(model, optimizer, 1)
    state = export_replicated(model, optimizer, None, 0, 1)
    before = [chunk.data.clone() for chunk in state.chunks]
    groups = [dict(group) for group in state.groups]
    train(model, optimizer, 1)
    optimizer.param_groups[0]["lr"] = 9.0
    assert all(torch.equal(a, chunk.data) for a, chunk in zip(before, state.chunks, strict=True))
    assert groups == state.groups
    assert state.scalars["embed.weight"] == {"step": 1.0}
    assert type(state.scalars["embed.weight"]["step"]) is float


def test_wrappers_do_not_change_names(tmp_path: Path) -> None:
    assert canonical_name("module._orig_mod.body.0.weight") == "body.0.weight"
    assert canonical_name("modules.module_list.0") == "modules.module_list.0"

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model, bare = nn.Linear(2, 2), nn.Linear(2, 2)
    path = save(tmp_path, 1, lambda r, s: export_replicated(Wrapper(model), None, None, r, s))
    load_full_model(PortableReader(path), bare)
    assert bits(bare.weight) == bits(model.weight)

    clash = Wrapper(nn.Linear(2, 2))
    clash.weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(UserError, match="'weight'"):
        export_replicated(clash, None, None, 0, 1)


def linear_checkpoint(tmp_path: Path) -> PortableReader:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return PortableReader(save(tmp_path, 1, lambda r, s: export_replicated(model, optimizer, None, r, s)))


def test_other_names_are_named(tmp_path: Path) -> None:
    reader = linear_checkpoint(tmp_path)
    with pytest.raises(UserError, match=r"lacks: '0\.bias', '0\.weight'.*lacks: 'bias', 'weight'"):
        load_full_model(reader, nn.Sequential(nn.Linear(3, 2)))


def test_other_shapes_are_named_with_both_values_and_nothing_is_touched(tmp_path: Path) -> None:
    reader = linear_checkpoint(tmp_path)
    model = nn.Linear(4, 2)
    before = bits(model.bias)
    with pytest.raises(UserError, match=r"'weight' has shape \(2, 4\).*\(2, 3\)"):
        load_full_model(reader, model)
    assert bits(model.bias) == before


@pytest.mark.parametrize(("make", "words"), [
    (lambda m: torch.optim.SGD(m.parameters(), lr=1), "another kind of optimizer.*betas"),
    (lambda m: torch.optim.AdamW([{"params": [m.weight]}, {"params": [m.bias]}]), "group 0.*'bias'"),
    (lambda m: torch.optim.AdamW([m.weight, m.bias, nn.Parameter(torch.ones(2))]), "not the model's"),
])  # fmt: skip
def test_another_optimizer_is_refused_before_anything_is_touched(
    make: Any, words: str, tmp_path: Path
) -> None:
    reader = linear_checkpoint(tmp_path)
    model = nn.Linear(3, 2)
    before = bits(model.weight)
    with pytest.raises(UserError, match=words):
        import_replicated(reader, model, make(model))
    assert bits(model.weight) == before


def test_untied_weights_do_not_silently_become_one(tmp_path: Path) -> None:
    model, tied = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.ModuleList([nn.Linear(2, 2)] * 2)
    path = save(tmp_path, 1, lambda r, s: export_replicated(model, None, None, r, s))
    with pytest.raises(UserError, match=r"the model lacks: '1\.bias', '1\.weight'"):
        load_full_model(PortableReader(path), tied)


def test_the_owner_of_a_tied_tensor_may_change(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self, names: tuple[str, str]) -> None:
            super().__init__()
            shared = nn.Parameter(torch.randn(3))
            for name in names:
                self.register_parameter(name, shared)

    saved, loaded = Tied(("a", "b")), Tied(("b", "a"))
    optimizer, again = (torch.optim.SGD(m.parameters(), lr=1, momentum=0.5) for m in (saved, loaded))
    saved.a.sum().backward()
    optimizer.step()
    path = save(tmp_path, 1, lambda r, s: export_replicated(saved, optimizer, None, r, s))
    import_replicated(PortableReader(path), loaded, again)
    assert snapshot(loaded, again)[1:] == snapshot(saved, optimizer)[1:]
    assert bits(loaded.b) == bits(saved.a)


def test_half_precision_model_reads_full_precision_weights(tmp_path: Path) -> None:
    reader = linear_checkpoint(tmp_path)
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    import_replicated(reader, model, optimizer)
    assert torch.equal(model.weight, reader.read("model", "weight").reshape(2, 3).bfloat16())
    entry = optimizer.state[model.weight]
    assert entry["exp_avg"].dtype == torch.bfloat16
    assert entry["step"].dtype == torch.float32


def test_a_tensor_learning_rate_stays_the_same_tensor(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam(other.parameters(), lr=rate, foreach=False, capturable=False)
    saved = torch.optim.Adam(model.parameters(), lr=0.25, fused=True)
    path = save(tmp_path, 1, lambda r, s: export_replicated(model, saved, None, r, s))
    import_replicated(PortableReader(path), other, optimizer)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25
    assert optimizer.param_groups[0]["fused"] is None


def test_lbfgs_history_survives(tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: torch.optim.LBFGS) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (model(torch.eye(3)) - 1).pow(2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer, again = (torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=4) for m in (model, other))
    run(model, optimizer)
    path = save(tmp_path, 2, lambda r, s: export_replicated(model, optimizer, None, r, s))
    import_replicated(PortableReader(path), other, again)
    run(model, optimizer)
    run(other, again)
    assert bits(other.weight) == bits(model.weight)


def test_a_lone_number_becomes_what_the_optimizer_needs(tmp_path: Path) -> None:
    """Another backend knows no scalar dtypes, and may count steps in whole numbers."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    def export(rank: int, size: int) -> BackendState:
        state = export_replicated(model, optimizer, None, rank, size)
        for group in state.groups:
            del group["scalar_dtypes"]
        state.scalars = {name: {"step": 1} for name in state.scalars}
        return state

    other = nn.Linear(2, 1)
    again = torch.optim.AdamW(other.parameters())
    import_replicated(PortableReader(save(tmp_path, 1, export)), other, again)
    assert snapshot(other, again) == snapshot(model, optimizer)


def test_state_that_was_not_saved_does_not_stay(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    fresh, used = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    other(torch.ones(1, 2)).sum().backward()
    used.step()
    path = save(tmp_path, 1, lambda r, s: export_replicated(model, fresh, None, r, s))
    import_replicated(PortableReader(path), other, used)
    assert len(used.state) == 0


def test_meta_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="meta"):
        load_full_model(linear_checkpoint(tmp_path), nn.Linear(3, 2, device="meta"))


def test_random_streams_go_on() -> None:
    import random

    def draw() -> list[Any]:
        return [random.random(), float(numpy.random.rand()), torch.rand(1).item(), random.gauss(0, 1)]

    draw()
    state = capture_rng()
    first = draw()
    assert draw() != first
    restore_rng(state)
    assert draw() == first
