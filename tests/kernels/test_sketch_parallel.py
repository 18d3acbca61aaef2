"""Sketched layers cut over 2 and 4 ranks, sketches compared over groups: one set of ranks for all checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_kernels import (
    KernelError,
    SKColwiseParallel,
    SketchedMLP,
    SKLinear,
    SKRowwiseParallel,
    TensorParallelSKLinear,
    check_sketch_sync,
    synchronize_sketches,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from distributed import Callback
from distributed.interfaces.callback import Context
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer

F64 = torch.float64
RANKS = 4
INTO, OUT, ROWS = 24, 16, 5


class Calls(Callback):
    """Runs a check on every rank, in the group of `size` ranks that the rank is in."""

    all_ranks = True

    def __init__(self, check: Callable[..., None], size: int, given: dict[str, Any]) -> None:
        self.check, self.size, self.given = check, size, given

    def on_run_start(self, context: Context) -> None:
        groups = [dist.new_group(list(range(i, i + self.size))) for i in range(0, RANKS, self.size)]
        torch.manual_seed(dist.get_rank())  # ranks do not agree by luck
        self.check(groups[dist.get_rank() // self.size], **self.given)


@pytest.fixture
def on_ranks(rank_pool: RankPool) -> Callable[..., None]:
    def run(check: Callable[..., None], size: int, **given: Any) -> None:
        fields = {"batch_size": 1, "backend": "pytorch-ddp", "callbacks": [Calls(check, size, given)],
                  "loss_fn": nn.MSELoss()}  # fmt: skip
        data = torch.zeros(4, 1), torch.zeros(4, 1)
        make_trainer(nn.Linear(1, 1), RANKS, rank_pool, **fields).fit(data, max_steps=1)

    return run


def seeded(make: Callable[[], Any]) -> Any:
    """What `make` makes, the same on all ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def layer(frozen: bool, given: bool = False) -> SKLinear:
    sketch: Any = (torch.randn(3, OUT, dtype=F64), torch.randn(INTO, 3, dtype=F64)) if given else "sign"
    return SKLinear(INTO, OUT, 6, train_both=not frozen, seed=9, sketch=sketch, dtype=F64)


class Traffic(TorchDispatchMode):
    """Elements that collectives are given, by the collective's name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            counts = [t.numel() for t in tensors if isinstance(t, Tensor)]
            if counts and "wait" not in function.__name__:
                self.seen.append((function.__name__.split(".")[0].strip("_"), sum(counts)))
        return function(*args, **(kwargs or {}))


def part(tensor: Tensor, group: Any, dim: int) -> Tensor:
    return tensor.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def near(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def check_one_layer(group: Any, style: str, frozen: bool, given: bool) -> None:
    """Values, gradients and traffic of one layer, whole inputs and outputs or cut ones."""
    whole = seeded(lambda: layer(frozen, given))
    cut = seeded(lambda: layer(frozen, given))
    x, weights = seeded(lambda: (torch.randn(ROWS, INTO, dtype=F64), torch.randn(ROWS, OUT, dtype=F64)))
    x_whole = x.clone().requires_grad_()
    (whole(x_whole) * weights).sum().backward()

    column = style == "colwise"
    parallelize_module(
        cut, DeviceMesh.from_group(group, "cpu"), SKColwiseParallel() if column else SKRowwiseParallel()
    )
    own = (x if column else part(x, group, 1)).clone().requires_grad_()
    with Traffic() as forward:
        y = cut(own)
    near(y, part(whole(x), group, 1) if column else whole(x))
    with Traffic() as backward:
        (y * (part(weights, group, 1) if column else weights)).sum().backward()
    sent = [("allreduce", ROWS * whole.rank)]
    assert (forward.seen, backward.seen) == (([], sent) if column else (sent, []))

    near(own.grad, x_whole.grad if column else part(x_whole.grad, group, 1))
    for (name, a), b in zip(cut.named_parameters(), whole.parameters(), strict=True):
        near(a.grad.full_tensor(), b.grad)
        assert a.to_local().numel() == b.numel() // (
            dist.get_world_size(group)
            if name in (("factor_out", "bias") if column else ("factor_in",))
            else 1
        )
    near(cut.dense_weight(), whole.dense_weight())
    if frozen:
        check_sketch_sync(cut, group)


def check_pair(group: Any, frozen: bool) -> None:
    """Column-wise into row-wise: activations stay cut between, and one all-reduce each way is all."""

    def make() -> nn.Sequential:
        pair = SKLinear(INTO, OUT, 6, dtype=F64), SKLinear(OUT, INTO, 4, dtype=F64, seed=3)
        if frozen:
            pair = (
                SKLinear(INTO, OUT, 6, dtype=F64, train_both=False),
                SKLinear(OUT, INTO, 4, dtype=F64, train_both=False, seed=3),
            )
        return nn.Sequential(pair[0], nn.GELU(), pair[1])

    whole, cut = seeded(make), seeded(make)
    styles = {"0": SKColwiseParallel(), "2": SKRowwiseParallel()}
    parallelize_module(cut, DeviceMesh.from_group(group, "cpu"), styles)
    x = seeded(lambda: torch.randn(2, ROWS, INTO, dtype=F64))
    with Traffic() as traffic:
        y = cut(x)
        y.square().sum().backward()
    near(y, whole(x))
    whole(x).square().sum().backward()
    for a, b in zip(cut.parameters(), whole.parameters(), strict=True):
        near(a.grad.full_tensor(), b.grad)
    assert traffic.seen == [("allreduce", 2 * ROWS * 4), ("allreduce", 2 * ROWS * 6)]

    rate = torch.optim.AdamW(cut.parameters(), lr=0.01), torch.optim.AdamW(whole.parameters(), lr=0.01)
    for optimizer in rate:
        optimizer.step()
    near(cut(x), whole(x))


def check_the_seeds_layer(group: Any, gather: bool, frozen: bool) -> None:
    torch.manual_seed(1000 + dist.get_rank())
    made = TensorParallelSKLinear(INTO, OUT, 6, group, gather, train_both=not frozen, dtype=F64)
    x = seeded(lambda: torch.randn(ROWS, INTO, dtype=F64)).requires_grad_()
    dense = made.dense_weight()
    expected = x @ dense.T + made.bias.full_tensor()
    y = made(x)
    near(y, expected if gather else part(expected, group, 1))
    y.square().sum().backward()
    grad, x.grad = x.grad, None
    (x @ dense.detach().T + made.bias.full_tensor().detach()).square().sum().backward()
    near(grad, x.grad)
    torch.manual_seed(dist.get_rank())
    made.reset_parameters()  # all take the first rank's
    expected = x @ made.dense_weight().T + made.bias.full_tensor()
    near(made(x), expected if gather else part(expected, group, 1))


def check_dtensors_pass_through(group: Any) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    whole, cut = seeded(lambda: layer(False)), seeded(lambda: layer(False))
    style = SKColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    parallelize_module(cut, mesh, style)
    x = seeded(lambda: torch.randn(8, INTO, dtype=F64))
    y = cut(DTensor.from_local(part(x, group, 0), mesh, [Shard(0)]))
    assert isinstance(y, DTensor)
    near(y.to_local(), whole(x))


def check_mistakes(group: Any) -> None:
    size = dist.get_world_size(group)
    mesh = DeviceMesh.from_group(group, "cpu")
    with pytest.raises(KernelError, match=f"out_features: not divisible by the group's {size} ranks. Got 17"):
        TensorParallelSKLinear(INTO, 17, 4, group)
    odd = SKLinear(25, OUT, 4)
    with pytest.raises(KernelError, match=f"in_features: not.*Got 25. Allowed: a multiple of {size}"):
        SKRowwiseParallel()._apply(odd, mesh)
    assert type(odd.factor_in.data) is Tensor, "nothing was changed"
    with pytest.raises(KernelError, match=r"only sketched layers\. Got 'Linear'"):
        SKColwiseParallel()._apply(nn.Linear(4, 4), mesh)
    square = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    with pytest.raises(KernelError, match="Got 'a mesh of 2 dimensions'"):
        SKColwiseParallel()._apply(layer(False), square)
    cut = SKRowwiseParallel()._apply(layer(False), mesh)
    with pytest.raises(KernelError, match=f"over {size} ranks. Got {INTO}. Allowed: {INTO // size}"):
        cut(torch.zeros(2, INTO, dtype=F64))  # what a group of one would get
    others = [dist.new_group([r for r in range(RANKS) if r % 2 == parity]) for parity in (0, 1)]
    with pytest.raises(KernelError, match="this rank is not in it"):
        TensorParallelSKLinear(INTO, OUT, 4, others[1 - dist.get_rank() % 2])


def check_sync(group: Any, given: bool) -> None:
    """The group's second rank has another sketch in the second layer."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)

    def make() -> nn.Sequential:
        return nn.Sequential(layer(True), nn.ReLU(), layer(True, given) if given else layer(True))

    model = seeded(make)
    check_sketch_sync(model, group)
    with Traffic() as nothing:
        assert synchronize_sketches(model, group) == []
    if rank == 1:
        if given:
            model[2].sketch.frozen_in[0, 1].neg_()
        else:
            model[2].sketch.set_extra_state({**model[2].sketch.get_extra_state(), "seed": 10})
    with pytest.raises(KernelError, match=r"differ from rank 0's: layer '2' on rank 1\. Got"):
        check_sketch_sync(model, group)
    with Traffic() as something:
        assert synchronize_sketches(model, group, src=size - 1) == ["2"]
    assert len(something.seen) > len(nothing.seen)
    check_sketch_sync(model, group)
    if size > 2 and not given:
        assert model[2].sketch.seed == 9
    with pytest.raises(KernelError, match=f"not a rank of the group. Got {size}. Allowed: 0 to {size - 1}"):
        synchronize_sketches(model, group, src=size)
    wrapped = nn.parallel.DistributedDataParallel(seeded(make), process_group=group)
    if rank == 1:
        sketch = wrapped.module[0].sketch
        sketch.set_extra_state({**sketch.get_extra_state(), "seed": 10})
    with pytest.raises(KernelError, match="layer '0' on rank 1"):
        check_sketch_sync(wrapped, group)

    # Where one rank trains both factors, at the shapes that another has of the trained halves.
    shape: dict[str, Any] = {"train_both": True, "rank": 3} if rank else {"train_both": False, "rank": 6}
    other = nn.Sequential(SKLinear(INTO, OUT, **shape))
    with pytest.raises(KernelError, match="have different sketched layers"):
        synchronize_sketches(other, group)


def check_seeds_need_no_synchronising(group: Any) -> None:
    """Each rank draws its own weights; the sketches are equal all the same."""
    torch.manual_seed(dist.get_rank())
    model = SketchedMLP(INTO, [32], 8, [0.4, 0.2], train_both=False)
    check_sketch_sync(model, group)
    model(torch.zeros(2, INTO))  # the matrices are made
    check_sketch_sync(model, group)
    if dist.get_rank(group) == 1:  # compared as used
        sketch = model.model[0].sketch
        sketch.matrices(torch.device("cpu"), torch.float32)[0][0, 0].neg_()
    with pytest.raises(KernelError, match=r"'model.0' on rank 1"):
        check_sketch_sync(model, group)
    assert synchronize_sketches(model, group) == ["model.0"]
    check_sketch_sync(model, group)


def check_fsdp2_from_the_meta_device(group: Any, frozen: bool) -> None:
    """Sharded before it has values, then reset on ranks that draw different numbers."""
    size = dist.get_world_size(group)
    cut = nn.Sequential(SKLinear(INTO, OUT, 6, train_both=not frozen, dtype=F64, device="meta"))
    fully_shard(cut, mesh=DeviceMesh.from_group(group, "cpu"))
    cut.to_empty(device="cpu")
    cut[0].reset_parameters()
    whole = seeded(lambda: nn.Sequential(layer(frozen)))
    whole[0].sketch = cut[0].sketch
    for a, b in zip(whole.parameters(), cut.parameters(), strict=True):
        a.data = b.full_tensor().detach().clone()
    x = seeded(lambda: torch.randn(8, INTO, dtype=F64))
    near(whole[0].dense_weight(), cut[0].dense_weight())
    cut(part(x, group, 0)).square().sum().backward()
    whole(x).square().sum().backward()
    for a, b in zip(whole.parameters(), cut.parameters(), strict=True):
        near(b.grad.full_tensor() * size, a.grad)


SIZES = pytest.mark.parametrize("size", [2, 4])
FROZEN = pytest.mark.parametrize("frozen", [False, True], ids=["both", "frozen"])


@SIZES
@pytest.mark.parametrize("style", ["colwise", "rowwise"])
@pytest.mark.parametrize(("frozen", "given"), [(False, False), (True, False), (True, True)])
def test_one_layer(on_ranks: Any, size: int, style: str, frozen: bool, given: bool) -> None:
    on_ranks(check_one_layer, size, style=style, frozen=frozen, given=given)


@SIZES
@FROZEN
def test_a_pair_sends_rank_numbers_a_row_each_way(on_ranks: Any, size: int, frozen: bool) -> None:
    on_ranks(check_pair, size, frozen=frozen)


@SIZES
@pytest.mark.parametrize("gather", [True, False])
def test_the_seeds_layer(on_ranks: Any, size: int, gather: bool) -> None:
    on_ranks(check_the_seeds_layer, size, gather=gather, frozen=size == 4)


@SIZES
@FROZEN
def test_fsdp2_from_the_meta_device(on_ranks: Any, size: int, frozen: bool) -> None:
    on_ranks(check_fsdp2_from_the_meta_device, size, frozen=frozen)


def test_dtensors_pass_through(on_ranks: Any) -> None:
    on_ranks(check_dtensors_pass_through, 4)


@SIZES
def test_mistakes(on_ranks: Any, size: int) -> None:
    on_ranks(check_mistakes, size)


@SIZES
@pytest.mark.parametrize("given", [False, True])
def test_sketches_are_compared_and_made_equal(on_ranks: Any, size: int, given: bool) -> None:
    on_ranks(check_sync, size, given=given)


def test_seeds_need_no_synchronising(on_ranks: Any) -> None:
    on_ranks(check_seeds_need_no_synchronising, 4)


def test_without_a_group_there_is_nobody_to_differ_from() -> None:
    model = SketchedMLP(INTO, [32], 8, [0.4, 0.2], train_both=False)
    check_sketch_sync(model)
    assert synchronize_sketches(model) == []
