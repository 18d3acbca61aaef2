"""An optimizer over flat pieces of parameters: saved, read by another number of ranks, or whole."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed.checkpoint.file_names import rank_file
from distributed.checkpoint.filesystem import FileLayer
from distributed.checkpoint.reader import read_index
from distributed.checkpoint.torch_state import export_replicated, import_replicated
from distributed.checkpoint.writer import merge_scalars, write_rank
from distributed.errors import UserError
from distributed.interfaces.state import BackendState, StateReader
from distributed.training.optimizers import follow_parameters


class Together(StateReader):
    """What several ranks exported, as one saved state."""

    def __init__(self, states: list[BackendState]) -> None:
        self.groups, self.aliases, self.scaler = states[0].groups, states[0].aliases, None
        self.scalars = states[0].scalars
        self.flat: dict[tuple[str, str], Tensor] = {}
        self.shapes: dict[tuple[str, str], tuple[int, ...]] = {}
        for chunk in (chunk for state in states for chunk in state.chunks):
            place = (chunk.key, chunk.name)
            self.shapes[place] = chunk.shape
            flat = self.flat.setdefault(
                place, torch.full((prod(chunk.shape),), torch.nan, dtype=chunk.data.dtype)
            )
            assert flat[chunk.start : chunk.start + len(chunk.data)].isnan().all(), "written twice"
            flat[chunk.start : chunk.start + len(chunk.data)] = chunk.data
        assert not any(flat.isnan().any() for flat in self.flat.values()), "missing"

    def tensors(self) -> Mapping[tuple[str, str], tuple[int, ...]]:
        return self.shapes

    def read(self, key: str, name: str, start: int = 0, length: int | None = None) -> Any:
        flat = self.flat[key, name]
        return flat[start : len(flat) if length is None else start + length].clone()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 1)).double()


def gradients(net: nn.Module, step: int) -> None:
    net.zero_grad()
    net(torch.full((3, 5), 0.1 * (step + 1), dtype=torch.float64)).square().mean().backward()


class Shard:
    """Rank `rank` of `size`: AdamW over views of its slices, which it steps in place."""

    def __init__(self, net: nn.Module, rank: int, size: int) -> None:
        self.net, self.rank, self.size = net, rank, size
        self.pieces: dict[Tensor, tuple[str, int]] = {}
        for name, p in net.named_parameters():
            start, end = p.numel() * rank // size, p.numel() * (rank + 1) // size
            self.pieces[nn.Parameter(p.detach().view(-1)[start:end])] = (name, start)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(list(self.pieces), lr=0.1)

    def step(self) -> None:
        grads = {name: p.grad for name, p in self.net.named_parameters()}
        for piece, (name, start) in self.pieces.items():
            grad = grads[name]
            assert grad is not None
            piece.grad = grad.view(-1)[start : start + piece.numel()]
        self.optimizer.step()

    def export(self) -> BackendState:
        return export_replicated(self.net, self.optimizer, None, self.rank, self.size, pieces=self.pieces)

    def load(self, reader: StateReader) -> None:
        import_replicated(reader, self.net, self.optimizer, pieces=self.pieces)


def train(net: nn.Module, stepper: list[Any], steps: range) -> None:
    """All shards step views of the one `net`, so nothing has to be gathered."""
    for step in steps:
        gradients(net, step)
        for part in stepper:
            part.step()


@pytest.mark.parametrize("saved_by", [0, 1, 2, 3])
@pytest.mark.parametrize("loaded_by", [0, 1, 2, 3])
def test_pieces_and_whole_parameters_continue_each_other(saved_by: int, loaded_by: int) -> None:
    """0 stands for an optimizer over whole parameters. Three ranks leave the 1-element bias of
    two of them empty."""
    reference = model()
    train(reference, [torch.optim.AdamW(reference.parameters(), lr=0.1)], range(6))
    first, second = model(), model()
    before = [Shard(first, rank, saved_by) for rank in range(saved_by)]
    if saved_by:
        train(first, before, range(3))
        reader = Together([shard.export() for shard in before])
    else:
        optimizer = torch.optim.AdamW(first.parameters(), lr=0.1)
        train(first, [optimizer], range(3))
        reader = Together([export_replicated(first, optimizer, None, 0, 1)])
    after: list[Any] = [Shard(second, rank, loaded_by) for rank in range(loaded_by)]
    for shard in after:
        shard.load(reader)
    if not loaded_by:
        after = [torch.optim.AdamW(second.parameters(), lr=0.1)]
        import_replicated(reader, second, after[0])
    train(second, after, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(reference.parameters(), second.parameters(), strict=True))


def test_state_that_is_not_per_element_cannot_be_cut() -> None:
    net = model()
    shard = Shard(net, 0, 2)
    shard.optimizer = torch.optim.SGD(list(shard.pieces), lr=0.1, momentum=0.9)
    gradients(net, 0)
    shard.step()
    state = shard.optimizer.state[next(iter(shard.pieces))]
    state["momentum_buffer"] = torch.zeros(7, 5)
    with pytest.raises(UserError, match=r"optimizer: .* is not elementwise state"):
        shard.export()


def test_a_model_in_parts_is_exported_and_filled_in_parts(tmp_path: Path) -> None:
    """Each of two stages holds a layer and its optimizer state; the other's is on the meta device."""
    source = model()
    optimizer = torch.optim.AdamW([{"params": layer.parameters()} for layer in source], lr=0.1)
    train(source, [optimizer], range(3))
    whole = Together([export_replicated(source, optimizer, None, 0, 1)])
    states = []
    for stage in range(2):
        part = model()
        part[1 - stage].to("meta")
        nn.init.zeros_(part[stage].weight)
        own = torch.optim.AdamW([{"params": layer.parameters()} for layer in part], lr=0.3)

        def held(name: str, stage: int = stage) -> bool:
            return name.startswith(f"{stage}.")

        import_replicated(whole, part, own, held=held)
        assert set(own.state) == set(part[stage].parameters())
        assert own.param_groups[0]["lr"] == 0.1
        states.append(export_replicated(part, own, None, 0, 1, held=held))
    again = Together(states)
    assert again.flat.keys() == whole.flat.keys()
    assert all(torch.equal(again.flat[key], whole.flat[key]) for key in whole.flat)
    assert not states[0].scalars.keys() & states[1].scalars.keys()
    files = FileLayer()
    write_rank(files, str(tmp_path), 1, 2, states[1], {})
    name = rank_file(1)
    merge_scalars(states[0], [read_index(files, str(tmp_path / name), files.sha256(str(tmp_path / name)))])
    assert states[0].scalars == whole.scalars
    assert states[0].groups == whole.groups


def test_an_optimizer_follows_replaced_parameters() -> None:
    """Groups, learning rates and state go to the parameter of the same name."""
    net = model()
    groups = [{"params": [net[0].weight], "lr": 0.5}, {"params": list(net[1].parameters())}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    gradients(net, 0)
    optimizer.step()
    before = dict(net.named_parameters())
    buffers = [optimizer.state[p]["momentum_buffer"] for p in before.values()]
    for layer in net:
        layer.weight = nn.Parameter(layer.weight.detach().clone())
    follow_parameters(optimizer, before, net)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in held] == [id(net[0].weight), id(net[1].weight), id(net[1].bias)]
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert all(optimizer.state[p]["momentum_buffer"] is b for p, b in zip(held, buffers, strict=True))
    assert len(optimizer.state) == 3
