"""Tasks with objects that pickle cannot take: those of libraries go by name, and others are named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import UserError
from distributed.communication.task_file import load_task, save_task
from distributed.communication.unpicklable import find_unpicklable
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer


@pytest.mark.parametrize(
    "path",
    [
        "backends",
        "backends.cudnn",
        "backends.mkldnn",
        "backends.cuda.matmul",
        "ops",
        "ops.aten",
        "ops.aten.add",
        "ops.aten.add.Tensor",
        "ops.aten.relu.default",
        "classes",
        "nn.functional",
    ],
)
def test_a_function_may_name_what_pickle_cannot_take(path: str, tmp_path: Path) -> None:
    obj: Any = torch
    for name in path.split("."):
        obj = getattr(obj, name)

    def holds() -> Any:
        return obj

    save_task(holds, tmp_path / "task")
    assert load_task(tmp_path / "task")() is obj


LOCK = threading.Lock()


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.table = {"held": [1, LOCK]}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)


def loss_of_closure(held: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        with held:
            return nn.functional.cross_entropy(output, target)

    return loss


class Inherited:
    """Its state is not in attributes."""

    def __reduce__(self) -> Any:
        raise ValueError("never")


@pytest.mark.parametrize(
    ("obj", "place"),
    [
        (LOCK, "loss"),
        (loss_of_closure(LOCK), "held (used by loss)"),
        (partial(loss_of_closure, LOCK), "loss.args[0]"),
        (partial(loss_of_closure, held=LOCK), "loss.keywords['held']"),
        (Counter(), "loss.table['held'][1]"),
        (nn.Sequential(nn.Linear(2, 2), Counter()), "loss.1.table['held'][1]"),
        (Counter().score, "loss.table['held'][1]"),
        ({"first": Inherited()}, "loss['first']"),
        ((1, 2), None),
    ],
)
def test_what_cannot_be_pickled_is_found(obj: Any, place: str | None) -> None:
    found = find_unpicklable(obj, "loss")
    assert (None if found is None else found[0]) == place
    assert found is None or found[1] is LOCK or isinstance(found[1], Inherited)


def test_an_object_that_holds_itself_ends_the_search() -> None:
    table: dict[str, Any] = {}
    table |= {"itself": [table], "then": LOCK}
    found = find_unpicklable({"outer": table}, "model")
    assert found == ("model['outer']['then']", LOCK)


def test_the_refusal_names_the_object(rank_pool: RankPool) -> None:
    trainer = make_trainer(
        nn.Linear(4, 2), 2, rank_pool, loss_fn=loss_of_closure(LOCK), global_batch_size=4, max_steps=1
    )
    with pytest.raises(UserError, match=r"Got 'held \(used by loss_fn\), a _thread\.lock'"):
        trainer.fit((torch.randn(8, 4), torch.randint(0, 2, (8,))))
