"""Facts about one rank's part of a model that ranks divide: counted by hand, and refused as backends do."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.errors import UserError
from distributed.operations.planning.collect_facts import collect_facts, facts_source
from distributed.operations.planning.cut_model import CutOptions
from distributed.planner.estimates.model_facts import Collective, Cut, Kind, ModelFacts, Size, Timeline
from tests.operations.planning.saved_bytes import saved_bytes

WIDTH, INNER, LENGTH, CLASSES = 16, 64, 8, 10
PLAN = CutOptions(tensor_plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
HIDDEN = Size(0, LENGTH * WIDTH * 4)


class Block(nn.Module):
    """A feed-forward layer around which its input goes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Chain(nn.Module):
    """Four blocks between an embedding and a layer of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def batch() -> tuple[Tensor, Tensor]:
    return torch.zeros(4, LENGTH, dtype=torch.long), torch.zeros(4, LENGTH, dtype=torch.long)


def facts_of(model: nn.Module | None = None, cut: Cut | None = None, **given: Any) -> ModelFacts:
    given = {"options": PLAN, **given}
    return collect_facts(model or Chain(), batch(), cut=cut or Cut(), **given)


BLOCK = WIDTH * INNER + INNER + INNER * WIDTH + WIDTH
ENDS = CLASSES * WIDTH + WIDTH * CLASSES + CLASSES


def test_tensor_ranks_hold_parts_and_add_up_once_in_each_direction() -> None:
    facts = facts_of(cut=Cut(tensor=2))
    # All but the bias of `down` is divided.
    assert facts.num_parameters == ENDS + 4 * ((BLOCK - WIDTH) // 2 + WIDTH)
    assert facts.first.collectives == 8 * (Collective("all_reduce", "tensor", HIDDEN),)
    forward = facts.first.events.index((Kind.BACKWARD, 0))
    assert [e.kind for e in facts.first.events[:forward]].count(Kind.COLLECTIVE) == 4


def test_slices_of_a_sequence_halve_what_forward_saves() -> None:
    whole, part = facts_of(), facts_of(cut=Cut(context=2))
    assert part.num_parameters == whole.num_parameters
    assert saved_bytes(part, 1) == Size(0, saved_bytes(whole, 1).per_sample / 2)
    # The batch is that of all slices, of which this rank has views.
    assert part.first.inputs == whole.first.inputs == 2 * (Size(0, LENGTH * 8),)


def test_stages_hold_what_they_compute() -> None:
    source = facts_source(Chain(), batch())
    first, last = (source(Cut(pipeline=2, stage=stage)) for stage in (0, 1))
    assert first.num_parameters == CLASSES * WIDTH + 2 * BLOCK
    assert last.num_parameters == 2 * BLOCK + WIDTH * CLASSES + CLASSES
    assert [len(facts.blocks) for facts in (first, last)] == [3, 3]
    assert first.received == (Size(0), HIDDEN)
    assert last.received == (HIDDEN, Size(0))
    names = {p.name for facts in (first, last) for p in facts.parameters}
    assert names == {name for name, _ in Chain().named_parameters()}
    assert sorted(first.first.gradients) == list(range(len(first.parameters)))


def test_a_rank_may_have_several_stages() -> None:
    source = facts_source(Chain(), batch())
    parts = [source(Cut(pipeline=2, schedule="interleaved-1f1b", stage=stage)) for stage in range(4)]
    # Stages 0 and 2 are on one rank, which holds the parameters of both, and computes one at a time.
    assert parts[0].parameters == parts[2].parameters
    assert parts[0].num_parameters + parts[1].num_parameters == ENDS + 4 * BLOCK
    assert sorted(parts[0].first.gradients | parts[2].first.gradients) == list(range(9))
    assert not parts[0].first.gradients.keys() & parts[2].first.gradients.keys()


def live_at(line: Timeline, kind: Kind) -> float:
    """Bytes of each sample that are live when an event of this kind comes."""
    sizes: dict[int, float] = {}
    for event in line.events[: line.events.index((kind, 0))]:
        if event.kind == Kind.ALLOCATE:
            sizes[event.number] = line.sizes[event.number].per_sample
        elif event.kind == Kind.FREE:
            del sizes[event.number]
    return sum(sizes.values())


def test_the_second_half_of_backward_has_all_gradients_of_weights() -> None:
    source = facts_source(Chain(), batch())
    for stage in range(4):
        facts = source(Cut(pipeline=2, schedule="interleaved-zero-bubble", stage=stage))
        line = facts.first_halves
        assert line is not None
        assert line.gradients.keys() == facts.first.gradients.keys()
        halves = line.events.index((Kind.WEIGHTS, 0))
        assert not any(e.kind == Kind.GRADIENT for e in line.events[:halves])
        # What ReLU returns is kept for the weights of `down`. The first half adds the gradients of the input
        # and of what `up` returns; that of what `down` returns was received.
        more = LENGTH * (INNER + WIDTH) * 4
        if stage in (1, 2):
            assert live_at(line, Kind.WEIGHTS) == live_at(line, Kind.BACKWARD) + more
        elif not stage:
            assert live_at(line, Kind.WEIGHTS) == live_at(line, Kind.BACKWARD)
    assert source(Cut(pipeline=2)).first_halves is None


def test_cuts_of_several_axes_are_products() -> None:
    facts = facts_of(cut=Cut(tensor=2, context=2, pipeline=2, stage=1))
    assert facts.num_parameters == 2 * ((BLOCK - WIDTH) // 2 + WIDTH) + WIDTH * CLASSES + CLASSES
    half = Size(0, HIDDEN.per_sample / 2)
    assert facts.received == (half, Size(0))
    assert set(facts.first.collectives) == {Collective("all_reduce", "tensor", half)}


def test_each_cut_is_collected_once_and_without_data() -> None:
    with torch.device("meta"):
        hollow = Chain()
    source = facts_source(hollow, batch(), options=PLAN)
    cut = Cut(tensor=2, pipeline=2)
    assert source(cut) is source(cut)
    assert source(cut) == facts_of(cut=cut)


def test_nothing_of_the_cut_remains() -> None:
    model, hook = Chain(), sys.excepthook
    before = dict(model.named_parameters())
    facts_of(model, Cut(tensor=2, pipeline=2))
    assert all(p is before[name] for name, p in model.named_parameters())
    assert all("forward" not in vars(m) and "_compiled_call_impl" not in vars(m) for m in model.modules())
    assert not dist.is_initialized()
    assert sys.excepthook is hook
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize(
    ("cut", "field", "message"),
    [
        (Cut(tensor=3), "parallel.tensor", "which 3 ranks cannot divide"),
        (Cut(context=3), "parallel.context", "3 ranks"),
        (Cut(pipeline=8), "parallel.pipeline", "no chain of 8 blocks"),
        (Cut(pipeline=2, stage=2), "stage", "no stage of this index"),
        (Cut(pipeline=2, schedule="first-come"), "parallel.schedule", "first-come|schedule"),
        (Cut(expert=2), "parallel.expert", "no layer of the model has experts"),
    ],
)
def test_a_cut_that_backends_refuse_is_refused(cut: Cut, field: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        facts_of(cut=cut)
    assert caught.value.field == field
    assert not dist.is_initialized()


def test_a_step_over_slices_that_the_backend_refuses_is_refused() -> None:
    with pytest.raises(UserError, match="call the model and the loss themselves") as caught:
        facts_of(cut=Cut(context=2), training_step=step)
    assert caught.value.field == "training_step"


def test_a_rank_of_a_real_group_is_not_disturbed(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match="a process of its own"):
            facts_of(cut=Cut(tensor=2))
        assert facts_of().cut == Cut()
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


def test_routing_by_values_has_no_facts() -> None:
    """Which expert a token goes to depends on values."""
    from distributed_kernels import MoELayer

    model = nn.Sequential(MoELayer(WIDTH, INNER, num_experts=4))
    data = torch.zeros(4, LENGTH, WIDTH), torch.zeros(4, LENGTH, WIDTH)
    with pytest.raises(UserError, match="depends on values"):
        collect_facts(model, data, loss_fn=nn.MSELoss(), cut=Cut(expert=2))
