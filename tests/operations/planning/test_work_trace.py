"""Operations of small models, counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import flop_registry

from distributed import UserError
from distributed.operations.planning.collect_facts import collect_facts
from distributed.operations.planning.optimizer_facts import optimizer_work
from distributed.operations.planning.work_trace import RawOperation, WorkTrace, count, merge
from distributed.parallel.pipeline_trace import ATTENTION
from distributed.planner.estimates.size import Size
from distributed.planner.estimates.work_facts import Operations

FLOAT = 4


def traced(call: Callable[[], object]) -> list[RawOperation]:
    """The operations of `call` that move or compute something."""
    trace = WorkTrace()
    with trace:
        call()
    return [operation for operation in trace.take() if operation.kind != "view"]


def sides(*lengths: int | None) -> tuple[Size, ...]:
    """Sides of factors; None is the number of samples."""
    return tuple(Size(0, 1) if length is None else Size(length) for length in lengths)


def test_whether_a_product_is_thin_depends_on_the_samples() -> None:
    """A factor of (n, 1024) is thin for up to 64 samples, whatever the number at which it was recorded."""
    model = nn.Linear(1024, 1024, bias=False)
    facts = collect_facts(
        model, (torch.zeros(2, 1024),), training_step=lambda model, batch: model(batch[0]).mean()
    )
    (product,) = (o for o in facts.work.blocks[0].forward if o.sides)
    assert [product.kind_at(number) for number in (1, 64, 65, 512)] == ["thin-matmul"] * 2 + ["matmul"] * 2


def test_a_perceptron_by_hand() -> None:
    """8 -> 16 -> 4, without biases: products of (n, 8) and (8, 16), and so on; backward needs no gradient of
    the input, and the gradient of a sum is copied from one number."""
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    facts = collect_facts(
        model, (torch.zeros(2, 8),), training_step=lambda model, batch: model(batch[0]).mean()
    )
    (work,) = facts.work.blocks
    first, second = 2 * 8 * 16, 2 * 16 * 4
    products = [o for o in work.forward if "matmul" in o.kind]
    assert products == [
        Operations(
            "matmul", 1, Size(0, first), Size(8 * 16 * FLOAT, (8 + 16) * FLOAT), sides(None, 8, 8, 16)
        ),
        Operations(
            "matmul", 1, Size(0, second), Size(16 * 4 * FLOAT, (16 + 4) * FLOAT), sides(None, 16, 16, 4)
        ),
    ]
    assert Operations("elementwise", 1, Size(0), Size(0, 2 * 16 * FLOAT)) in work.forward
    # The mean reads all outputs, and writes one number.
    assert Operations("reduction", 1, Size(0), Size(FLOAT, 4 * FLOAT)) in work.forward
    back = sum(o.number * o.flops.at(1) for o in work.backward if "matmul" in o.kind)
    assert back == first + 2 * second
    # The derivative of ReLU reads a gradient and an output, and writes a gradient.
    assert Operations("elementwise", 1, Size(0), Size(0, 3 * 16 * FLOAT)) in work.backward
    assert facts.work.flops(5) == 5 * (2 * first + 3 * second)


@pytest.mark.parametrize(("channels", "prefix"), [(4, "narrow-"), (32, "")])
def test_a_convolution_by_hand(channels: int, prefix: str) -> None:
    images = torch.zeros(2, channels, 6, 6, requires_grad=True)
    layer = nn.Conv2d(channels, 8, 3, padding=1, bias=False)
    forward, *_, back = traced(lambda: layer(images).backward(torch.zeros(2, 8, 6, 6)))
    flops = 2 * 2 * 8 * 6 * 6 * channels * 9
    moved = FLOAT * (2 * channels * 36 + 2 * 8 * 36 + 8 * channels * 9)
    assert forward == (0, False, f"{prefix}convolution", flops, moved, ())
    assert back[2:4] == (f"{prefix}convolution-backward", 2 * flops)


@pytest.mark.parametrize(("causal", "prefix"), [(False, ""), (True, "causal-")])
def test_attention_by_hand(causal: bool, prefix: str) -> None:
    """Two products forward, and four backward; what a causal mask leaves out is counted."""
    query, key, value = (torch.zeros(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    found = traced(
        lambda: scaled_dot_product_attention(query, key, value, is_causal=causal).backward(
            torch.zeros(2, 3, 16, 8)
        )
    )
    product = 2 * 2 * 3 * 16 * 16 * 8
    by_kind = {o.kind: o.flops for o in found if "attention" in o.kind}
    assert by_kind == {f"{prefix}attention": 2 * product, f"{prefix}attention-backward": 4 * product}


@pytest.mark.parametrize(
    ("call", "kind", "nbytes"),
    [
        (lambda x: x.add_(x), "elementwise", 3 * 64 * FLOAT),
        (lambda x: x + torch.zeros(()), "elementwise", (2 * 64 + 1) * FLOAT),
        (lambda x: torch.ops.aten.add(x, x[:1].expand(8, 8)), "elementwise", (2 * 64 + 8) * FLOAT),
        (lambda x: x.exp(), "transcendental", 2 * 64 * FLOAT),
        (lambda x: x.pow(2), "elementwise", 2 * 64 * FLOAT),
        (lambda x: x.sum(), "reduction", (64 + 1) * FLOAT),
        # Statistics first, which reads the input once more than the operation returns.
        (lambda x: nn.BatchNorm1d(8)(x), "reduction", None),
        (lambda x: torch.index_select(x, 0, torch.tensor([1, 2])), "indexing", 2 * 2 * 8 * FLOAT + 2 * 8),
        (lambda x: torch.bernoulli(x), "random", 2 * 64 * FLOAT),
        (lambda x: nn.functional.max_pool2d(x.view(1, 8, 8), 2), "pooling", (64 + 16) * FLOAT + 16 * 8),
        (lambda x: x[:1] @ torch.zeros(8, 32), "thin-matmul", (8 + 8 * 32 + 32) * FLOAT),
    ],
)  # fmt: skip
def test_kinds_and_bytes(call: Callable[[Tensor], object], kind: str, nbytes: int | None) -> None:
    values = torch.rand(8, 8)
    found = [o for o in traced(lambda: call(values)) if o.kind == kind]
    assert found
    assert nbytes is None or nbytes in [o.nbytes for o in found]


@pytest.mark.parametrize("causal", [True, False])
def test_attention_of_gpus(causal: bool) -> None:
    """The mask is an argument by name: another one is true in the operations of GPUs. torch before 2.12
    counts no attention whose keys have fewer heads than its queries."""
    query, key = torch.zeros(2, 4, 8, 16), torch.zeros(2, 2, 8, 16)
    aten = torch.ops.aten
    memory_efficient = (query, key, key, None, True, 0.0, causal)
    for operation, arguments in (
        (aten._scaled_dot_product_efficient_attention.default, memory_efficient),
        (aten._scaled_dot_product_flash_attention.default, (query, key, key, 0.0, causal)),
    ):
        kind, flops, _, _ = count(operation, arguments, {}, (query,))
        assert kind == ("causal-attention" if causal else "attention")
        assert flops == 2 * 2 * (2 * 4 * 8 * 8) * 16


def test_stages_weigh_attention_whose_keys_have_fewer_heads() -> None:
    for operation, formula in ATTENTION.items():
        assert operation in flop_registry
        shapes = (2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 32)
        assert formula(*shapes, out_shape=None) == 2 * (2 * 4 * 8 * 8) * (16 + 32)


def test_views_and_empty_tensors_move_nothing() -> None:
    values = torch.zeros(4, 6)
    assert traced(lambda: (values.t(), values.view(6, 4), values[1:], torch.empty(8), values.detach())) == []


def test_backward_belongs_to_the_block_of_its_forward() -> None:
    """Three layers of different widths are blocks in a list; the output layer lies outside of them."""
    layers = [nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*layers, nn.Linear(8, 2, bias=False))
    facts = collect_facts(
        model, (torch.zeros(2, 8),), training_step=lambda model, batch: model(batch[0]).mean()
    )
    products = [
        [sum(o.number for o in side if "matmul" in o.kind) for side in (block.forward, block.backward)]
        for block in facts.work.blocks
    ]
    # The first layer has no gradient of its input.
    assert products == [[1, 2], [1, 1], [1, 2], [1, 2]]


def test_adamw_by_hand() -> None:
    """Decay, first moment, second moment (two), root, division, epsilon, and the update; and a step count."""
    work = optimizer_work("adamw", weight_decay=0.0)
    moved = sum(o.number * o.nbytes.per_sample for o in work.operations)
    assert moved == FLOAT * (2 + 3 + 2 + 4 + 2 + 2 + 2 + 4 - 2)
    assert sum(o.number for o in work.operations if o.kind != "view") == 8
    assert optimizer_work("adamw", foreach=True).at_once


def test_other_operations_for_another_number_of_samples() -> None:
    one, other = RawOperation(0, False, "matmul", 8, 8), RawOperation(0, True, "matmul", 8, 8)
    with pytest.raises(UserError, match="depends on the number of samples"):
        merge([one, one], [one, other], 1, (11, 23))
