"""What a pipeline refuses: models that it cannot divide exactly, and steps that differ from the first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from distributed.errors import UserError
from distributed.planner.pipeline import PipelineShape
from distributed.training.model_traits import META, SPARSE, refuse

__all__ = ["begins_to_draw", "check_model", "own_parameters_alone"]

_CANNOT = {
    META: "it has no values",
    SPARSE: "a pipeline adds up dense gradients",
}


def check_model(model: nn.Module, shape: PipelineShape, backend: str) -> None:
    """Raise a UserError if a pipeline cannot train `model` exactly, whatever its stages.

    Args:
        backend: name of the backend, for the error.
    """
    refuse(model, backend, _CANNOT)
    if getattr(model, "is_gradient_checkpointing", False):
        raise UserError(
            "the model recomputes activations by itself, in backward, when another stage may be computing",
            field="parallel.pipeline",
            got="model.gradient_checkpointing_enable()",
            remedy="Call model.gradient_checkpointing_disable(), and set activation_checkpointing=full",
        )
    norm = next((name for name, m in model.named_modules() if isinstance(m, _BatchNorm)), None)
    if shape.pieces > 1 and norm is not None:
        raise UserError(
            f"'{norm}' normalizes over the samples of a micro-batch, of which a pipeline has"
            f" {shape.pieces} pieces at a time",
            field="parallel.num_microbatches",
            got=shape.pieces,
            allowed="1",
            remedy="Set parallel.num_microbatches=1 and raise gradient_accumulation_steps, or use another"
            " normalization",
        )


@contextmanager
def own_parameters_alone(stage: int) -> Iterator[None]:
    """Explain torch's error about parameters without data, which other stages hold."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if not re.search(r"\bmeta\b", str(error)):
            raise
        raise UserError(
            f"stage {stage} of the pipeline used a parameter that another stage holds: the forward pass calls"
            f" other modules than for the first samples ({type(error).__name__}: {error})",
            field="parallel.pipeline",
            got=f"stage {stage}",
            allowed="models that call the same modules for all samples",
            remedy="Use parallel.tensor or parallel.data",
        ) from error


def begins_to_draw() -> UserError:
    """The error for a model that draws random numbers, and drew none in the first step."""
    return UserError(
        "the model draws random numbers in this step and drew none in the first: the ranks of a pipeline"
        " would continue with different ones. The step was not taken",
        field="parallel.pipeline",
        got="random numbers from torch's default generator",
        allowed="models that draw in every step, or that have dropout, or a generator of their own",
        remedy="Let the model draw from the first step on, for instance with a rate of 1e-9, or use"
        " parallel.data",
    )
