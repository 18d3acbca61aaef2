"""Compile a model's forward, or that of its blocks, by torch.compile; in place, so that all names stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor.exc import InductorError

from distributed.errors import UserError
from distributed.training.lever import Forwards
from distributed.training.mean_losses import is_watching, leave_uncompiled

__all__ = ["FIELD", "Compiled", "compile_blocks", "compile_model"]

FIELD = "compile"


def compile_model(model: nn.Module, recomputes: str, deterministic: bool) -> Compiled:
    """Compile the forward of `model` as a whole.

    Args:
        recomputes: how the activations of blocks in it are recomputed.
        deterministic: see `Compiled`.

    Raises:
        UserError: the compiler cannot do so.
    """
    if recomputes == "offload":
        raise UserError(
            "a compiled model stores its activations by itself, and not in host memory",
            field=FIELD,
            got="model",
            allowed="none, blocks with activation_checkpointing=offload",
        )
    return Compiled([model], whole=True, deterministic=deterministic)


def compile_blocks(model: nn.Module, blocks: Sequence[nn.Module], deterministic: bool) -> Compiled:
    """Compile the forward of each of `blocks` in `model`.

    Raises:
        UserError: there are none.
    """
    if not blocks:
        raise UserError(
            f"found no blocks in {type(model).__name__} that could be compiled",
            field=FIELD,
            got="blocks",
            allowed="model, or the name of a class in block_classes",
        )
    return Compiled(blocks, whole=False, deterministic=deterministic)


class Compiled(Forwards):
    """Modules whose forward was replaced by a compiled one, in place: names stay.

    Their hooks run outside of it, as those that shard parameters have to.

    Args:
        modules: blocks, or the whole model.
        whole: whether the one module is the whole model, which may compute its loss.
        deterministic: compile for each shape by itself, so that the bits do not depend on the shapes that the
            process has seen before.
    """

    def __init__(self, modules: Sequence[nn.Module], whole: bool, deterministic: bool) -> None:
        leave_uncompiled()
        self._deterministic = deterministic
        super().__init__([(m, _Forward(m.forward, whole, deterministic)) for m in modules])

    def explained(self) -> AbstractContextManager[None]:
        """Raise errors of the compiler in the block as errors of the configuration; backward is compiled when
        it is first called."""
        return _explained(self._deterministic)


class _Forward:
    """A compiled forward."""

    def __init__(self, forward: Callable[..., Any], whole: bool, deterministic: bool) -> None:
        self.__wrapped__ = forward
        self._compiled: Callable[..., Any] | None = None
        self._whole, self._deterministic, self._watched = whole, deterministic, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._whole and is_watching():
            return self._watch(*args, **kwargs)
        if self._compiled is None:
            self._compiled = torch.compile(self.__wrapped__, dynamic=False if self._deterministic else None)
        with _explained(self._deterministic):
            return self._compiled(*args, **kwargs)

    def _watch(self, *args: Any, **kwargs: Any) -> Any:
        """The first micro-batch is not compiled: which function computes the loss has to be seen."""
        self._watched += 1
        if self._watched > 1:
            raise UserError(
                "the model computes its loss by a function that it imported by its own name, of which a"
                " compiled model does not show what it averages over",
                field=FIELD,
                got="model",
                allowed="none, blocks, for such a model",
                remedy="Use one of these, or call the loss as torch.nn.functional.cross_entropy(...)",
            )
        return self.__wrapped__(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_compiled": None}


@contextmanager
def _explained(deterministic: bool) -> Iterator[None]:
    # torch would continue without compiling after too many shapes, and with other bits.
    patched = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True) if deterministic else nullcontext()
    try:
        with patched:
            yield
    except FailOnRecompileLimitHit as error:
        limit = torch._dynamo.config.recompile_limit
        raise UserError(
            f"the inputs have more than {limit} different shapes, of which each is compiled by itself"
            " under deterministic",
            field=FIELD,
            got="more shapes",
            allowed=f"at most {limit} shapes with deterministic",
            remedy="Pad batches to one size, set deterministic=false, or compile=none",
        ) from error
    except (TorchDynamoException, InductorError) as error:
        first, *others = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join([first, *others[: first.endswith(":")]])
        raise UserError(
            f"torch.compile cannot compile the model: {reason}",
            field=FIELD,
            remedy="Set compile=none, or block_classes to blocks that it can compile. On a CPU it needs a C++"
            " compiler (g++)",
        ) from error
