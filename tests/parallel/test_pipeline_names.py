"""Names that scripts have for pipelines elsewhere, with the meaning that the docs give them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from distributed_kernels import KernelError, PipelineParallelSketchedModel, SKLinear
from torch import nn
from torch.nn.functional import cross_entropy

from distributed import MicrobatchPipelineTrainer, UserError
from distributed.testing.rank_pool import RankPool
from distributed.testing.suite import EXACT
from tests.planner.test_mesh import plan
from tests.support.training import make_trainer

WIDTHS = (8, 32, 32, 32, 6)
CONFIGS = [{"in_features": a, "out_features": b, "sketch_size": 4} for a, b in pairwise(WIDTHS)]


def problem(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(0, WIDTHS[-1], (samples,), generator=generator)
    return torch.randn(samples, WIDTHS[0], generator=generator, dtype=torch.float64), targets


def sketched(devices: int) -> nn.Module:
    torch.manual_seed(0)
    return PipelineParallelSketchedModel(CONFIGS, ["cpu"] * devices).double()


def test_a_sketched_model_in_stages_is_the_chain_of_its_layers(rank_pool: RankPool) -> None:
    model = sketched(3)
    layers = [m for m in model.modules() if isinstance(m, SKLinear)]
    assert [len(stage) for stage in model.stages] == [2, 2, 3]  # type: ignore[arg-type, union-attr]
    x, _ = problem(5)
    expected = x
    for number, layer in enumerate(layers):
        expected = layer(expected) if number == len(layers) - 1 else layer(expected).relu()
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    trained = []
    for ranks, parallel in ((1, {}), (2, {"pipeline": 2})):
        own = sketched(3)
        make_trainer(
            own, ranks, rank_pool if ranks > 1 else None, parallel=parallel, global_batch_size=8
        ).fit(problem(20), max_steps=5)
        trained.append(own)
    pairs = zip(*(own.parameters() for own in trained), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) < EXACT


@pytest.mark.parametrize(
    ("configs", "devices", "text"),
    [
        (CONFIGS, [], "0 stages"),
        (CONFIGS, ["cpu"] * 5, "4 layers cannot be divided into 5 stages"),
        ([{"in_features": 2, "out_features": 2}], ["cpu"], r"layer_configs\[0\]: sketch_size is missing"),
    ],
)
def test_stages_that_cannot_be_built_are_refused(
    configs: list[dict[str, int]], devices: list[str], text: str
) -> None:
    with pytest.raises(KernelError, match=text):
        PipelineParallelSketchedModel(configs, devices)


def test_pieces_of_other_sizes_and_masks_take_the_step_of_the_whole_batch() -> None:
    data, targets = problem(7)
    targets[:3] = -100
    steps = []
    for pieces in (1, 3):
        model = sketched(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = MicrobatchPipelineTrainer(model, pieces)
        loss = trainer.forward_backward_pipeline(data, targets, nn.CrossEntropyLoss(), optimizer)
        expected = float(cross_entropy(sketched(1)(data), targets))
        assert loss == pytest.approx(expected, abs=EXACT)
        steps.append([p.detach().clone() for p in model.parameters()])
    plain = sketched(1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    cross_entropy(plain(data), targets).backward()
    optimizer.step()
    for own in steps:
        for a, b in zip(own, plain.parameters(), strict=True):
            assert float((a - b).detach().abs().max()) < EXACT


def test_pieces_that_are_not_there_are_refused() -> None:
    model = sketched(1)
    with pytest.raises(UserError, match="at least one piece"):
        MicrobatchPipelineTrainer(model, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match="cannot be cut into 4 pieces"):
        MicrobatchPipelineTrainer(model).forward_backward_pipeline(*problem(3), cross_entropy, optimizer)


def test_data_8_tensor_4_pipeline_2_on_64_ranks() -> None:
    """The example of three axes: DP = 64 / (4 * 2)."""
    made = plan("pytorch-ddp", 64, {"global_batch_size": 512}, tensor=4, pipeline=2)
    assert str(made.dims) == "pipeline 2 x data 8 x tensor 4"
    # Neighbours along tensor are on one host, and the stages half the ranks apart.
    assert [made.dims.coordinates(rank)["pipeline"] for rank in (0, 31, 32, 63)] == [0, 0, 1, 1]
    assert [made.dims.index(rank, "pipeline", "data") for rank in range(0, 64, 4)] == list(range(16))
