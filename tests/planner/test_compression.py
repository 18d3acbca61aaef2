"""Which codecs a run may have: refused in the plan, or stated with the bytes that they save."""

from __future__ import annotations

from typing import Any

import pytest

from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog


def plan_of(codec: str, ranks: int = 2, backend: str = "pytorch-ddp", **fields: Any) -> RunPlan:
    """The plan of a run; options of the codec are fields ``compression__...``."""
    options = {name.removeprefix("compression__"): fields.pop(name) for name in [*fields] if "__" in name}
    config = DistributedConfig(
        num_processes=ranks,
        backend=backend,
        device="cpu",
        batch_size=4,
        compression={"codec": codec, **options},
        **fields,
    )
    return resolve(config, get_catalog(), Facts(), Resources())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"codec": "topk"}, "Did you mean 'top-k'"),
        ({"codec": "top-k", "compression__ratio": 0.0}, "above 0 and at most 1"),
        ({"codec": "top-k", "compression__ratio": 1.5}, "above 0 and at most 1"),
        ({"codec": "int8", "compression__ratio": 0.5}, "'int8' does not read it"),
        ({"codec": "top-k", "compression__rank": 2}, "'top-k' does not read it"),
        ({"codec": "none", "compression__error_feedback": True}, "'none' does not read it"),
        ({"codec": "powersgd", "compression__rank": 0}, "a whole number above 0"),
        ({"codec": "top-k", "mixed_precision": "fp16"}, "cannot send values of a loss scale"),
        ({"codec": "powersgd", "mixed_precision": "fp16"}, "cannot send values of a loss scale"),
        (
            {"codec": "fp16", "compression__error_feedback": True, "mixed_precision": "fp16"},
            "units of a loss scale that changes",
        ),
    ],
)
def test_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        plan_of(**given)


@pytest.mark.parametrize("backend", ["serial", "tensorflow"])
@pytest.mark.parametrize("codec", sorted(get_catalog().codecs))
def test_a_backend_that_cannot_names_those_that_can(backend: str, codec: str) -> None:
    pytest.importorskip(backend if backend == "tensorflow" else "torch")
    with pytest.raises(UserError, match=f"'{backend}' cannot send gradients by the codec") as refused:
        plan_of(codec, 1, backend)
    assert "pytorch-ddp" in str(refused.value.remedy)


@pytest.mark.parametrize(
    ("codec", "ranks", "expected"),
    [
        ("top-k", 2, "sends 0.0839 MB of a float32 gradient of 1024 x 1024 in a step, 50 times less"),
        ("top-k", 8, "12.5 times less"),
        ("fp16", 2, "2 times less"),
        ("fp16", 8, "2 times less"),
        ("int8", 4, "3.94 times less"),
        ("int8", 16, "3.94 times less"),
        ("random-k", 8, "100 times less"),
        ("powersgd", 4, "128 times less"),
    ],
)
def test_what_it_saves_is_stated(codec: str, ranks: int, expected: str) -> None:
    assert expected in plan_of(codec, ranks).summary()


def test_what_saves_nothing_is_stated() -> None:
    text = plan_of("top-k", 2, compression__ratio=0.9).summary()
    assert "each of 2 ranks sends 7.55 MB" in text
    assert "without compression 4.19 MB: it saves nothing on so many ranks" in text
    assert "one rank sends no gradients" in plan_of("int8", 1).summary()
