"""Attention of Hugging Face's models over slices of sequences, by the attention interface of transformers.

transformers is never imported here: a model of it has imported it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distributed_kernels.attention.ring import ring_attention, zigzag_positions
from distributed_kernels.attention.ulysses import ulysses_attention
from distributed_kernels.errors import KernelError

_NAME = "distributed_context"
"""Of our function in the attention interface."""
_METHODS = ("ring", "ulysses")
_OTHER = ("softcap", "s_aux", "position_bias", "head_mask")
"""Arguments of attention functions that make another attention of them."""
_models: WeakKeyDictionary[nn.Module, TransformersAttention] = WeakKeyDictionary()


def transformers_models(model: nn.Module) -> list[nn.Module]:
    """The outermost models of transformers in `model`, which may be `model` itself."""
    library: Any = sys.modules.get("transformers")
    kind: Any = getattr(library, "PreTrainedModel", None)
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules() if kind is not None else ():
        if isinstance(module, kind) and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


class TransformersAttention:
    """Attention of models of transformers, whose SDPA is replaced by ring or Ulysses attention.

    Args:
        models: outermost models.
        method: ``ring``, ``ulysses``, or ``auto``: ring where the length allows it, else ulysses.
        size: number of ranks.
        tensor: number of ranks that divide the heads.

    Raises:
        KernelError: another method; a model that takes no positions, or whose attention cannot be replaced.
    """

    def __init__(self, models: Sequence[nn.Module], method: str, size: int, tensor: int) -> None:
        self._models, self._method, self._size = models, method, size
        self._group: ProcessGroup | None = None
        self._mask: Tensor | None = None
        if method not in ("auto", *_METHODS):
            raise KernelError(
                f"method: {method} computes another attention than the dense one of the model",
                got=method,
                allowed=", ".join(("auto", *_METHODS)),
                remedy="Choose one of these",
            )
        for model in models:
            _check_model(model)
        self._causal = any(getattr(m, "is_causal", False) is True for top in models for m in top.modules())
        self._heads = min(_heads(config) // tensor for model in models for config in _configs(model))
        if method == "ulysses" and self._heads % size:
            raise KernelError(
                f"heads: {self._heads} heads of keys cannot be shared by {size} ranks",
                got=method,
                allowed=f"ring, or ulysses on {_divisors(self._heads)} ranks",
                remedy="Choose ring, or another number of ranks",
            )

    def layout(self, length: int) -> str:
        """How a sequence of `length` is cut: ``contiguous`` or ``zigzag``.

        Raises:
            KernelError: the ranks do not divide it so that the method can compute it.
        """
        return "zigzag" if self._chosen(length) == "ring" and self._causal else "contiguous"

    def _chosen(self, length: int) -> str:
        unit = 2 * self._size if self._causal else self._size
        ulysses = length % self._size == 0 and self._heads % self._size == 0
        if self._method != "ulysses" and length % unit == 0:
            return "ring"
        if self._method != "ring" and ulysses:
            return "ulysses"
        unit = self._size if self._method == "ulysses" else unit
        low = length // unit * unit
        raise KernelError(
            f"length: {self._size} ranks cannot hold equal slices of a sequence of {length} for"
            f" {'ring' if self._method == 'auto' else self._method} attention",
            got=length,
            allowed=", ".join(str(n) for n in (low, low + unit) if n),
            remedy="Pad the sequences, or cut them",
        )

    def attach(self) -> None:
        """Register the function that `over` chooses."""
        library: Any = sys.modules["transformers"]
        library.AttentionInterface.register(_NAME, _attention)
        for model in self._models:
            _models.update(dict.fromkeys(model.modules(), self))

    @contextmanager
    def over(self, group: ProcessGroup) -> Iterator[None]:
        """Within the block, the models compute slices of sequences that the ranks of `group` hold."""
        self._group = group
        with ExitStack() as stack:
            stack.callback(self._leave)
            for model in self._models:
                handle = model.register_forward_pre_hook(partial(_before, self), with_kwargs=True)
                stack.callback(handle.remove)
                for config in _configs(model):
                    stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
                    config._attn_implementation = _NAME
            yield

    def _leave(self) -> None:
        self._group = self._mask = None

    def state(self) -> Tensor | None:
        """The mask that layers read, (batch, length)."""
        return self._mask

    def restore(self, state: Tensor | None) -> None:
        """Let layers read the mask of another forward pass: backward may compute them again, when later
        forward passes have begun."""
        self._mask = state

    def release(self) -> None:
        """Forget the models."""
        for model in self._models:
            for module in model.modules():
                _models.pop(module, None)

    # -- inside of `over` ------------------------------------------------------------------

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Positions in the whole sequence of this rank's slice of `length`, int64 (length,)."""
        rank, whole = dist.get_rank(self._group), length * self._size
        if self.layout(whole) == "zigzag":
            return zigzag_positions(whole, rank, self._size).to(device)
        return torch.arange(rank * length, (rank + 1) * length, device=device)

    def take_mask(self, mask: Any) -> None:
        """Keep the mask of the keys of this rank's slice, (batch, length), for all layers."""
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            raise KernelError(
                "attention_mask: only padding can be left out of slices of a sequence",
                got=tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__,
                allowed="None, or a tensor (batch, length) of ones and zeros",
                remedy="Leave the mask out",
            )
        self._mask = None if mask is None else mask.bool()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, dropout_p: float
    ) -> Tensor:
        """(batch, heads, length, head_dim) each, of this rank's slice -> the same."""
        whole, common = q.shape[2] * self._size, {"group": self._group, "key_mask": self._mask}
        options: dict[str, Any] = {"causal": causal, "scale": scale, "dropout_p": dropout_p, **common}
        if self._chosen(whole) == "ulysses":
            return ulysses_attention(q, k, v, **options)
        return ring_attention(q, k, v, layout=self.layout(whole), **options)


def _before(
    attention: TransformersAttention, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the model its positions, and take the mask that it would read as one of whole sequences."""
    signature = inspect.signature(model.forward)
    named: dict[str, Any] = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(named.pop(name, {}))
    if named.get("position_ids") is not None:
        raise KernelError(
            "position_ids: slices of a sequence get theirs from its length",
            got="position_ids in the batch",
            remedy="Leave them out of the batch",
        )
    attention.take_mask(named.get("attention_mask"))
    first = next(x for x in named.values() if isinstance(x, Tensor) and x.dim() > 1)
    positions = attention.positions(first.shape[1], first.device)
    named.update(attention_mask=None, position_ids=positions.expand(first.shape[0], -1))
    return (), named


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for the attention of a layer; (batch, heads, length, head_dim) each."""
    attention = _models[module]
    other = [name for name in _OTHER if kwargs.get(name) is not None]
    window = kwargs.get("sliding_window")
    if window is not None and window < query.shape[2] * attention._size:
        other.append("sliding_window")
    if attention_mask is not None:
        other.append("attention_mask")
    if other:
        raise KernelError(
            f"{', '.join(other)}: the model's attention has more than ring and Ulysses attention compute",
            got=type(module).__name__,
            allowed="causal or full attention, with padding left out",
            remedy="Train this model without slices of sequences",
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mixed = attention.attend(query, key, value, causal=causal, scale=scaling, dropout_p=dropout)
    return mixed.transpose(1, 2).contiguous(), None


def _configs(model: nn.Module) -> list[Any]:
    """Configurations of a model and of the models inside, each once."""
    kind = sys.modules["transformers"].PreTrainedModel
    found: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, kind):
            found[id(module.config)] = module.config
    return list(found.values())


def _check_model(model: Any) -> None:
    name = type(model).__name__
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise KernelError(
            f"model: {name}.forward takes no position_ids, so that a slice of a sequence has no positions",
            got=name,
            allowed="models with position_ids",
            remedy="Choose another model",
        )
    replaceable = ("_supports_attention_backend", "_supports_sdpa")
    if not any(getattr(model, name, False) for name in replaceable):
        raise KernelError(
            f"model: the attention of {name} cannot be replaced",
            got=name,
            allowed="models that use the attention interface of transformers",
            remedy="Choose another model",
        )


def _heads(config: Any) -> int:
    """Heads of keys, which are those that the ranks share under Ulysses attention."""
    return int(getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 0) or 1)


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
