"""Layers of which each rank holds a part compute what nn.Linear computes, forward and backward."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_kernels import SKLinear
from torch import Tensor, nn

from distributed import (
    Callback,
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelModel,
    Trainer,
    UserError,
)
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer

RANKS, SIZE = 4, 2
ROWS, INTO, HIDDEN, OUT = 5, 6, 8, 4
EXACT = 1e-12


class Calls(Callback):
    """Calls a function on every rank, with the pair of ranks that the rank is in."""

    all_ranks = True

    def __init__(self, check: Callable[[Any], None]) -> None:
        self.check = check

    def on_run_start(self, context: Any) -> None:
        torch.set_default_dtype(torch.float64)
        pairs = [dist.new_group([first, first + 1]) for first in range(0, RANKS, SIZE)]
        torch.manual_seed(dist.get_rank())  # ranks do not agree by luck
        try:
            self.check(pairs[dist.get_rank() // SIZE])
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.fixture
def on_ranks(rank_pool: RankPool) -> Callable[[Callable[[Any], None]], None]:
    def run(check: Callable[[Any], None]) -> None:
        data = torch.zeros(4, 1), torch.zeros(4, 1)
        make_trainer(
            nn.Linear(1, 1),
            RANKS,
            rank_pool,
            batch_size=1,
            backend="pytorch-ddp",
            loss_fn=nn.MSELoss(),
            callbacks=[Calls(check)],
        ).fit(data, max_steps=1)

    return run


def whole(part: Tensor, group: Any, dim: int) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(SIZE)]
    dist.all_gather(parts, part.detach().contiguous(), group=group)
    return torch.cat(parts, dim)


def near(a: Tensor | None, b: Tensor | None) -> None:
    assert a is not None
    assert b is not None
    assert float((a - b).detach().abs().max()) < EXACT


def dense(layer: Any, group: Any, dim: int) -> nn.Linear:
    """The nn.Linear of which the ranks hold the parts."""
    made = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    made.weight.data = whole(layer.weight, group, dim)
    if layer.bias is not None:
        made.bias.data = whole(layer.bias, group, 0) if dim == 0 else layer.bias.detach().clone()
    return made


def inputs(group: Any, width: int) -> Tensor:
    """The same on all ranks of the group, leading dimensions included."""
    x = torch.randn(2, ROWS, width)
    dist.broadcast(x, group=group, group_src=0)
    return x.requires_grad_()


def check_one(group: Any, kind: type, dim: int, bias: bool) -> None:
    layer = copy.deepcopy(kind(INTO, OUT, SIZE, bias=bias, group=group))
    assert layer.weight.shape == ((OUT // SIZE, INTO) if dim == 0 else (OUT, INTO // SIZE))
    reference = dense(layer, group, dim)
    x = inputs(group, INTO)
    own = x.detach().clone().requires_grad_()
    out = layer(own)
    near(out, reference(x))
    out.cos().sum().backward()
    reference(x).cos().sum().backward()
    near(own.grad, x.grad)
    near(whole(layer.weight.grad, group, dim), reference.weight.grad)
    if bias:
        near(whole(layer.bias.grad, group, 0) if dim == 0 else layer.bias.grad, reference.bias.grad)


def check_pair(group: Any) -> None:
    """Columns whose output stays cut, then rows that take it."""
    up = ColumnParallelLinear(INTO, HIDDEN, gather_output=False, group=group)
    down = RowParallelLinear(HIDDEN, OUT, input_is_parallel=True, group=group)
    first, second = dense(up, group, 0), dense(down, group, 1)
    x = inputs(group, INTO)
    own = x.detach().clone().requires_grad_()
    hidden = up(own).tanh()
    assert hidden.shape == (2, ROWS, HIDDEN // SIZE)
    out, expected = down(hidden), second(first(x).tanh())
    near(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    near(own.grad, x.grad)
    near(whole(up.weight.grad, group, 0), first.weight.grad)
    near(whole(up.bias.grad, group, 0), first.bias.grad)
    near(whole(down.weight.grad, group, 1), second.weight.grad)
    near(down.bias.grad, second.bias.grad)


def check_layer_mistakes(group: Any) -> None:
    for kind, field in ((ColumnParallelLinear, "out_features"), (RowParallelLinear, "in_features")):
        with pytest.raises(UserError, match="2 ranks cannot divide it") as caught:
            kind(5, 5, group=group)
        assert (caught.value.field, caught.value.allowed) == (field, "multiples of 2")
    with pytest.raises(UserError, match=r"world_size: the process group has 2 ranks\. Got 3\. Allowed: 2"):
        ColumnParallelLinear(INTO, OUT, 3, group=group)
    with pytest.raises(UserError, match=r"cannot be pickled.*parallel\.tensor"):
        pickle.dumps(ColumnParallelLinear(INTO, OUT, group=group))
    other = dist.group.WORLD
    assert ColumnParallelLinear(INTO, OUT, RANKS).group is other  # the default group


def check_layers(group: Any) -> None:
    for bias in (True, False):
        check_one(group, ColumnParallelLinear, 0, bias)
        check_one(group, RowParallelLinear, 1, bias)
    check_pair(group)
    check_layer_mistakes(group)


def test_parts_of_layers_compute_as_nn_linear(on_ranks: Any) -> None:
    on_ranks(check_layers)


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(INTO, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUT))


def check_models(group: Any) -> None:
    layers = [
        {"in_features": INTO, "out_features": HIDDEN},
        {"in_features": HIDDEN, "out_features": OUT, "bias": False},
    ]
    plan = {"0": "colwise", "2": "rowwise"}
    for given in ((layers,), (perceptron(), plan)):
        model = TensorParallelModel(given[0], group, *given[1:])
        names = dict(model.model.named_parameters())
        reference = copy.deepcopy(
            perceptron()
            if len(given) > 1
            else nn.Sequential(nn.Linear(INTO, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUT, bias=False))
        )
        for name, parameter in reference.named_parameters():
            held: Any = names[name]
            parameter.data = held.full_tensor().detach() if hasattr(held, "full_tensor") else held.detach()
        x = inputs(group, INTO)
        model(x).square().sum().backward()
        reference(x).square().sum().backward()
        model.check_gradients()
        assert {name for name, p in names.items() if hasattr(p, "full_tensor")} >= {"0.weight", "2.weight"}
        for name, parameter in reference.named_parameters():
            grad: Any = names[name].grad
            near(grad.full_tensor() if hasattr(grad, "full_tensor") else grad, parameter.grad)
    check_model_mistakes(group)


def check_model_mistakes(group: Any) -> None:
    with pytest.raises(UserError, match=r"tensor_plan: the model has no plan") as caught:
        TensorParallelModel(perceptron(), group)
    assert "'rowwise'" in str(caught.value)
    with pytest.raises(UserError, match=r"model\[0\]: Linear cannot be built.*Pass in_features"):
        TensorParallelModel([{"in_features": INTO, "out": OUT}], group)
    with pytest.raises(UserError, match=r"a part of the gradient of '1\.weight', and only Trainer adds"):
        TensorParallelModel(
            nn.Sequential(nn.Linear(INTO, HIDDEN), nn.PReLU(), nn.Linear(HIDDEN, OUT)),
            group,
            {"0": "colwise", "1": "replicated_with_grad_allreduce", "2": "rowwise"},
        )
    partial = TensorParallelModel(
        nn.Sequential(nn.Linear(INTO, HIDDEN), nn.PReLU(), nn.Linear(HIDDEN, OUT)),
        group,
        {"0": "colwise", "2": "rowwise"},
    )
    partial(inputs(group, INTO)).square().sum().backward()
    with pytest.raises(UserError, match=r"the gradient of '1\.weight' differs between the ranks"):
        partial.check_gradients()
    for wrong in (
        TensorParallelModel(perceptron(), group, {"0": "colwise", "2": "rowwise"}),
        TensorParallelModel(SKETCHED, group),
    ):
        with pytest.raises(UserError, match="share the layer '0' have computed different inputs"):
            wrong(torch.randn(ROWS, INTO))


SKETCHED = [
    {"in_features": INTO, "out_features": HIDDEN, "sketch_size": 2},
    {"in_features": HIDDEN, "out_features": OUT, "sketch_size": 2},
]


def check_sketched(group: Any) -> None:
    """As the guide of sketched layers writes them: sizes alone, ReLU between the layers."""
    model = TensorParallelModel(SKETCHED, group)
    kinds = [type(layer) for layer in model.model]
    assert kinds == [SKLinear, nn.ReLU, SKLinear]
    whole = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
        for name, p in model.model.named_parameters()
    }
    reference = nn.Sequential(SKLinear(INTO, HIDDEN, 2), nn.ReLU(), SKLinear(HIDDEN, OUT, 2))
    reference.load_state_dict(whole, strict=False)
    x = inputs(group, INTO)
    model(x).square().sum().backward()
    model.check_gradients()
    reference(x).square().sum().backward()
    for name, parameter in reference.named_parameters():
        held: Any = dict(model.model.named_parameters())[name].grad
        near(held.full_tensor() if hasattr(held, "full_tensor") else held, parameter.grad)


def test_layers_with_a_sketch_size_are_sketched(on_ranks: Any) -> None:
    on_ranks(check_sketched)


def test_models_over_a_group_compute_as_whole_ones(on_ranks: Any) -> None:
    on_ranks(check_models)


def test_one_process_has_whole_layers_without_a_group() -> None:
    torch.manual_seed(0)
    layer = ColumnParallelLinear(INTO, OUT, 1, dtype=torch.float64)
    torch.manual_seed(0)
    reference = nn.Linear(INTO, OUT, dtype=torch.float64)
    x = torch.randn(ROWS, INTO, dtype=torch.float64)
    assert torch.equal(layer(x), reference(x))
    rows = RowParallelLinear(INTO, OUT, bias=False)
    rows.load_state_dict({"weight": torch.ones(OUT, INTO)})
    assert torch.equal(pickle.loads(pickle.dumps(rows))(torch.ones(INTO)), torch.full((OUT,), float(INTO)))
    with pytest.raises(UserError, match=r"world_size: the process group has 1 rank\. Got 2"):
        RowParallelLinear(INTO, OUT, 2)
    with pytest.raises(UserError, match=r"tensor_parallel_group: .*setup_distributed.*parallel\.tensor"):
        TensorParallelModel(perceptron(), None, {"0": "colwise"})


class BuildsParts:
    """Builds, in the ranks of a Trainer, a layer of which each rank holds a part."""

    def __call__(self) -> nn.Module:
        return ColumnParallelLinear(1, 2) if dist.is_initialized() else nn.Linear(1, 2)


def test_a_trainer_refuses_parts(rank_pool: RankPool) -> None:
    """Each backend would give all ranks the part of rank 0."""
    trainer: Trainer = make_trainer(
        BuildsParts(), 2, rank_pool, batch_size=1, backend="pytorch-ddp", loss_fn=nn.MSELoss()
    )
    with pytest.raises(UserError, match=r"model: 'weight' is a part.*Set parallel\.tensor"):
        trainer.fit((torch.zeros(4, 1), torch.zeros(4, 2)), max_steps=1)
