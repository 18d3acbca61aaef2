"""A loss and a training step are called in copies: nothing that the user holds changes, and no values of a
large model are copied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from distributed.operations.planning.apart import without_values
from distributed.operations.planning.collect_facts import collect_facts
from distributed.operations.planning.private_copies import LARGE, private_copies
from distributed.planner.estimates.model_facts import Kind, ModelFacts

WIDTH = 128  # a weight of 64 KiB
Step = Callable[..., Any]


def counting() -> tuple[Step, list[int]]:
    """A training step, and the list in its closure that it adds to."""
    calls: list[int] = []

    def step(model: nn.Module, batch: Any, factor: float = 1.0) -> Tensor:
        calls.append(1)
        return factor * (model(batch[0]) - batch[1]).square().mean()

    return step, calls


class Holder:
    """Calls a function that it holds in one of its attributes."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        (held,) = vars(self).values()
        while not callable(held):
            held = next(iter(held.values())) if isinstance(held, dict) else next(iter(held))
        return held(model, batch)

    def method(self, model: nn.Module, batch: Any) -> Any:
        return self(model, batch)


def wrapped(step: Step) -> Step:
    def outer(model: nn.Module, batch: Any, _steps: tuple[Step, ...] = (step,)) -> Any:
        return _steps[0](model, batch)

    return outer


FORMS: dict[str, Callable[[Step], Step]] = {
    "closure": lambda step: step,
    "partial": lambda step: partial(step, factor=2.0),
    "partial of a partial": lambda step: partial(partial(step), factor=2.0),
    "attribute": lambda step: Holder(step=step),
    "list": lambda step: Holder(steps=[step]),
    "dict of a tuple": lambda step: Holder(steps={"a": (step,)}),
    "set of partials": lambda step: Holder(steps={partial(step)}),
    "method": lambda step: Holder(step=step).method,
    "default argument": wrapped,
}


def batch(number: int = 3) -> tuple[Tensor, Tensor]:
    return torch.zeros(number, WIDTH), torch.zeros(number, WIDTH)


@pytest.mark.parametrize("form", FORMS)
def test_recording_changes_nothing_that_a_training_step_holds(form: str) -> None:
    step, calls = counting()
    given = FORMS[form](step)
    collect_facts(nn.Linear(WIDTH, WIDTH), batch(), training_step=given)
    assert calls == []
    given(nn.Linear(WIDTH, WIDTH), batch())
    assert calls == [1]  # it is the step that counts


def test_a_copy_that_follows_no_functions_changes_them() -> None:
    """The mutant: `copy.deepcopy` takes functions for constants."""
    step, calls = counting()
    copy.deepcopy(partial(step, factor=2.0))(nn.Linear(WIDTH, WIDTH), batch())
    assert calls == [1]


def test_functions_that_share_a_variable_still_share_one() -> None:
    number = 0

    def add() -> None:
        nonlocal number
        number += 1

    def read() -> int:
        return number

    other_add, other_read = private_copies((add, [read]), {}, torch.empty_like)
    other_add()
    assert (other_read[0](), read()) == (1, 0)


class Distilled:
    """A loss with a teacher: the mean distance to its output."""

    def __init__(self, teacher: nn.Module) -> None:
        self.teacher = teacher

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch[0])
        return (model(batch[0]) - wanted).square().mean()


def closed_over(teacher: nn.Module) -> Step:
    own = Distilled(teacher)
    return lambda model, batch: own(model, batch)


def most_alive(facts: ModelFacts) -> float:
    """Bytes at the peak of the first micro-batch of one sample, beside the model."""
    now = most = 0.0
    for kind, index in facts.first.events:
        size = facts.first.sizes[index] if kind in (Kind.ALLOCATE, Kind.FREE) else None
        if size is not None:
            now += (1 if kind == Kind.ALLOCATE else -1) * (size.fixed + size.per_sample)
            most = max(most, now)
    return most


@pytest.mark.parametrize("hold", [Distilled, closed_over], ids=["attribute", "closure"])
def test_no_values_of_a_teacher_are_copied(hold: Callable[[nn.Module], Step]) -> None:
    teacher = nn.Linear(WIDTH, WIDTH)
    small = nn.Linear(4, 4)
    assert teacher.weight.nbytes >= LARGE > small.weight.nbytes
    copied: list[Tensor] = []

    def empty(tensor: Tensor) -> Tensor:
        copied.append(tensor)
        return torch.empty_like(tensor, device="meta")

    memo: dict[int, Any] = {}
    private_copies((hold(nn.Sequential(teacher, small)),), memo, empty)
    assert [tensor is teacher.weight for tensor in copied] == [True]
    assert memo[id(teacher.weight)].is_meta
    assert isinstance(memo[id(teacher.weight)], nn.Parameter)
    assert torch.equal(memo[id(small.weight)], small.weight)  # numbers that code may read


def test_facts_with_a_teacher_are_those_of_its_values() -> None:
    """A teacher without values, on the meta device, gives the same facts, and neither changes."""
    found = []
    for device in ("cpu", "meta"):
        teacher = nn.Linear(WIDTH, WIDTH, device=device)
        facts = collect_facts(nn.Linear(WIDTH, WIDTH), batch(), training_step=closed_over(teacher))
        assert not isinstance(teacher.weight, FakeTensor)
        assert teacher.weight.device.type == device
        found.append((facts.first, most_alive(facts)))
    assert found[0] == found[1]
    assert found[0][1] >= 3 * WIDTH * 4


def test_a_memo_has_no_address_of_an_object_that_is_gone() -> None:
    """`copy.deepcopy` keeps its list of what it has copied under the address of its memo. The attributes of a
    loss may lie there later, and were taken for the list."""
    model, memo = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), dict[int, Any]()
    without_values(model, memo=memo)
    kept = memo.pop(id(memo))
    assert kept
    assert not [value for value in memo.values() if type(value) is list and value]
