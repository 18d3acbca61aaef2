"""Settings of memory and speed in the plan: backends that cannot apply them, and ranks without an effect."""

from __future__ import annotations

from typing import Any

import pytest

from distributed import UserError
from distributed.config import DistributedConfig
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog


def plan_of(gpus: int = 0, **fields: Any) -> RunPlan:
    config = DistributedConfig(**{"num_processes": 2, **fields})
    return resolve(config, get_catalog(), Facts(), Resources(gpus))


@pytest.mark.parametrize(
    ("fields", "able"),
    [
        ({"activation_checkpointing": "full"}, "deepspeed, fsdp, horovod, pytorch-ddp, serial"),
        ({"compile": "model"}, "deepspeed, fsdp, horovod, pytorch-ddp, serial"),
    ],
)
def test_tensorflow_refuses_them_and_names_the_backends_that_can(fields: dict[str, Any], able: str) -> None:
    (name,) = fields
    with pytest.raises(UserError) as caught:
        plan_of(backend="tensorflow", **fields)
    assert caught.value.field == name
    assert f"Backends that can: {able}" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"activation_checkpointing": "offload"}, "saves no more memory than full on CPU ranks")],
)
def test_what_has_no_effect_on_cpu_ranks_gets_a_note(fields: dict[str, Any], text: str) -> None:
    assert [note for note in plan_of(**fields).notes if text in note]
    assert not plan_of(gpus=2, **fields).notes


def test_the_field_of_fsdp_is_an_alias() -> None:
    for section, field in ((True, "full"), (False, "none"), (True, None)):
        given = {} if field is None else {"activation_checkpointing": field}
        plan_of(backend="fsdp", fsdp={"activation_checkpointing": section}, **given)
    for section, field in ((True, "selective"), (False, "full"), (True, "none")):
        with pytest.raises(UserError, match=f"activation_checkpointing={field} contradicts it"):
            plan_of(
                backend="fsdp", fsdp={"activation_checkpointing": section}, activation_checkpointing=field
            )
