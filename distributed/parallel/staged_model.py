"""StagedModel: the user's own forward pass, of which one stage of a pipeline computes its part.

All stages call the whole forward of the model with the same inputs. Modules of other stages do not compute:
a block passes its input through, and a module before the chain returns zeros of the shape that it had. The
first own block takes what was received; after the last own block the forward pass ends. Masks and positions
are computed on each stage from the inputs, and one tensor passes between stages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from distributed.errors import UserError
from distributed.parallel.pipeline_layout import Block, Layout, fill
from distributed.parallel.pipeline_trace import Key, calls_replaced, main_tensor

__all__ = ["StagedModel"]


class _EndOfStage(BaseException):
    """Ends the forward pass of a stage. Not an Exception, because a model or a loss may catch these."""

    def __init__(self, output: Tensor) -> None:
        self.output = output


class StagedModel:
    """Lets calls of `model` compute one stage at a time, between `install` and `remove`.

    Args:
        model: the model.
        layout: which blocks each stage has.
        device: of this rank.
    """

    def __init__(self, model: nn.Module, layout: Layout, device: str) -> None:
        self._model, self._layout, self._device = model, layout, device
        self._stage: int | None = None
        self._received: Tensor | None = None
        self._passed: Any = None
        self._next = self._rows = 0
        self._calls: dict[str, int] = {}
        self._stack = ExitStack()

    def install(self) -> None:
        """Change what calls of the modules do."""
        calls = {block.name: partial(self._call_block, i) for i, block in enumerate(self._layout.blocks)}
        calls |= {name: partial(self._call_before, name) for name in self._layout.before}
        absent: dict[nn.Module, Callable[..., Any]] = {
            module: partial(self._call_absent, name)
            for name, module in self._model.named_modules()
            if any(p is not None and p.is_meta for p in module._parameters.values())
        }
        replaced = {self._model.get_submodule(name): call for name, call in calls.items()}
        self._stack.enter_context(calls_replaced(absent | replaced))

    def remove(self) -> None:
        """Let calls of the modules do what they did before."""
        self._stack.close()

    def run(self, stage: int, received: Tensor | None, rows: int, forward: Callable[[], Any]) -> Any:
        """Compute a stage.

        Args:
            received: what the stage before has returned, for `rows` samples; None for the first stage.
            rows: number of samples.
            forward: calls the model, with the same inputs on all stages.

        Returns:
            What `forward` returns, for the last stage; the output of its last block for others.

        Raises:
            UserError: the forward pass did not call the blocks in the order of the chain.
        """
        self._stage, self._received, self._rows = stage, received, rows
        self._passed, self._next, self._calls = None, 0, {}
        try:
            result = forward()
        except _EndOfStage as end:
            result = self._checked(end.output)
        else:
            if self._next != len(self._layout.blocks):
                raise self._other_order(self._layout.blocks[self._next].name)
        finally:
            self._stage = self._received = self._passed = None
        return result

    def form_after(self, stage: int) -> Any:
        """Form of the tensor that `stage` gives to the next."""
        return self._layout.blocks[self._layout.blocks_of(stage)[-1]].form

    def _call_before(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._stage or self._next:
            return call(*args, **kwargs)
        times = self._calls[name] = self._calls.get(name, 0) + 1
        outputs = self._layout.before[name]
        return fill(outputs[min(times, len(outputs)) - 1], self._rows, self._device)

    def _call_absent(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Some operations return memory that was never written for parameters without data (torch 2.13).
        raise UserError(
            f"stage {self._stage} of the pipeline called '{name}', whose parameters another stage holds: the"
            " forward pass calls other modules than for the first samples",
            field="parallel.pipeline",
            got=f"stage {self._stage}",
            allowed="models that call the same modules for all samples, in training and in evaluation",
            remedy="Use parallel.tensor or parallel.data",
        )

    def _call_block(self, index: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._stage is None:
            return call(*args, **kwargs)
        block, own = self._layout.blocks[index], self._layout.blocks_of(self._stage)
        if index != self._next:
            raise self._other_order(block.name)
        self._next += 1
        if index <= own[0] and index and _argument(block.key, args, kwargs) is not self._passed:
            raise self._other_order(block.name)
        if index < own[0]:
            self._passed = _argument(block.key, args, kwargs)
            return _like(block, self._passed)
        if index == own[0] and self._stage:
            args, kwargs = _with(block.key, args, kwargs, self._received)
        output = call(*args, **kwargs)
        if index == own[-1] and self._stage < self._layout.num_stages - 1:
            tensor = main_tensor(output)
            if tensor is None:
                raise self._other_order(block.name)
            raise _EndOfStage(tensor)
        return output

    def _checked(self, output: Tensor) -> Tensor:
        assert self._stage is not None
        form, block = self.form_after(self._stage), self._layout.blocks[self._next - 1]
        if tuple(output.shape) != form.sized(self._rows) or output.dtype != form.dtype:
            raise UserError(
                f"'{block.name}', the last block of stage {self._stage}, returned another shape than for the"
                " first samples, and the next stage expects that one",
                field="parallel.pipeline",
                got=f"{tuple(output.shape)}, {output.dtype}",
                allowed=f"{form.sized(self._rows)}, {form.dtype}",
                remedy="Pad all samples to one length in the dataset or in collate_fn",
            )
        return output

    def _other_order(self, name: str) -> UserError:
        return UserError(
            f"the forward pass did not come to block '{name}' as it did for the first samples: between the"
            " blocks of the chain it computes something, or it leaves blocks out",
            field="parallel.pipeline",
            got=f"{self._layout.num_stages} stages",
            allowed="models whose blocks each take what the one before returns, in every forward pass",
            remedy="Name stages that begin elsewhere in parallel.stages, or use parallel.tensor or"
            " parallel.data",
        )


def _argument(key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(key, str):
        return kwargs.get(key)
    return args[key] if key < len(args) else None


def _with(
    key: Key, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(key, str):
        return args, {**kwargs, key: value}
    return (*args[:key], value, *args[key + 1 :]), kwargs


def _like(block: Block, tensor: Any) -> Any:
    """What a block returns that does nothing to `tensor`."""
    form = block.output
    return type(form)((tensor, *form[1:])) if type(form) in (tuple, list) else tensor
