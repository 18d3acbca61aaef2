"""Which modules of a model are cut over the tensor axis, and how: read and checked before any cut.

The plan is ``parallel.tensor_plan``, else the model's own ``_tp_plan`` in the words of Hugging Face, else
pairs of linear layers (`automatic_pairs`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from distributed.errors import UserError, did_you_mean
from distributed.parallel.tensor_layers import DIVIDED, WORDS, Cut, check_word

__all__ = ["check_cuts", "declared_plan", "generic_name", "read_plan", "tied_places", "translated"]

_SUFFIX = "_sequence"
_PARTS = {"packed_colwise": 2}
"""Equal parts of a fused projection, where the word does not state their number."""
_EXPERTS = ("moe_tp_experts", "ep_router", "grouped_gemm")
"""Words of Hugging Face for layers of experts, which `parallel.expert` divides; the tensor axis leaves them
whole."""
_HEADS = (
    *("num_heads", "num_attention_heads", "n_head", "n_heads", "nhead"),
    *("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
)


def declared_plan(model: nn.Module) -> dict[str, str]:
    """The plan that the model, or a model inside it, brings: pattern -> word; empty without one."""
    for prefix, module in model.named_modules():
        plan: Any = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
        if isinstance(plan, Mapping) and plan:
            start = f"{prefix}." if prefix else ""
            return {f"{start}{pattern}": str(word) for pattern, word in plan.items()}
    return {}


def read_plan(model: nn.Module, plan: Mapping[str, str], given: bool) -> list[Cut]:
    """The modules that `plan` cuts.

    Args:
        plan: pattern of module names -> word; ``*`` stands for one part of a name, ``**`` for several.
        given: by the user, who expects each pattern to match.

    Raises:
        UserError: an unknown word, a pattern that matches nothing, or a module that two patterns match.
    """
    modules = dict(model.named_modules())
    found: dict[str, tuple[str, Cut]] = {}
    for pattern, text in plan.items():
        if not given and text in _EXPERTS:
            continue
        expression = re.compile(translated(pattern))
        names = [name for name in modules if expression.fullmatch(name)]
        if not names and given:
            raise UserError(
                "a pattern of the plan matches no module",
                field="parallel.tensor_plan",
                got=pattern,
                remedy="Use names as in model.named_modules(), with * for one part."
                + did_you_mean(pattern, {generic_name(name) for name in modules if name}),
            )
        for name in names:
            cut = _cut(name, modules[name], text)
            other = found.get(name)
            if other is not None and other[1] != cut:
                raise UserError(
                    f"two patterns of the plan match the module '{name}'",
                    field="parallel.tensor_plan",
                    got=f"{other[0]}: {other[1].word}, {pattern}: {cut.word}",
                    remedy="Keep one of them",
                )
            found[name] = (pattern, cut)
    return [cut for _, cut in found.values()]


def _cut(name: str, module: nn.Module, text: str) -> Cut:
    word, _, number = text.partition(":")
    sequence = word.endswith(_SUFFIX)
    word = word.removesuffix(_SUFFIX)
    parts = int(number) if number.isdigit() else _PARTS.get(word, 1)
    slices_alone = word == "embedding" and not sequence
    if word not in WORDS or slices_alone or parts < 1 or (number and not number.isdigit()):
        words = [w if w != "embedding" else "embedding_sequence" for w in WORDS]
        raise UserError(
            f"the plan cuts '{name}' by a word that is not known",
            field="parallel.tensor_plan",
            got=text,
            allowed=", ".join(words) + "; with _sequence behind it for activations that are slices of the"
            " sequence, and :N for a fused projection of N equal parts",
            remedy="Set parallel.tensor_plan to replace a plan that the model brings."
            + did_you_mean(word, words),
        )
    return Cut(name, module, word, parts, sequence or word == "sequence_parallel")


def translated(pattern: str) -> str:
    """The regular expression of a pattern of module names."""
    parts = (re.escape(part) for part in re.split(r"(\*\*|\*)", pattern))
    return "".join({r"\*\*": ".*", r"\*": "[^.]+"}.get(part, part) for part in parts)


def generic_name(name: str) -> str:
    """The name of a module with ``*`` for numbers."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def tied_places(model: nn.Module) -> list[list[tuple[nn.Module, str, str]]]:
    """Of each parameter that has several places, these: (module, its name there, its full name)."""
    places: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                full = f"{prefix}.{name}" if prefix else name
                places.setdefault(id(parameter), []).append((module, name, full))
    return [found for found in places.values() if len(found) > 1]


def check_cuts(model: nn.Module, cuts: list[Cut], size: int) -> None:
    """Refuse a plan that would train something else.

    Args:
        size: ranks of the tensor axis.

    Raises:
        UserError: a module cannot be cut by its word; tied weights are cut differently; heads that the ranks
            do not divide; or slices of the sequence in a part of the model only.
    """
    _check_tied(model, cuts)
    for cut in cuts:
        check_word(cut, size)
        if cut.word in ("colwise", "packed_colwise"):
            _check_heads(model, cut, size)
    if any(cut.sequence for cut in cuts):
        _check_sequence(model, cuts)


def _layout(cut: Cut, name: str) -> tuple[int, int] | None:
    """(dimension, parts) of the cut of a parameter of the module; None if it stays whole."""
    _, what = DIVIDED.get(cut.word, (None, ""))
    if what == "in_features":
        return (1, 1) if name == "weight" else None
    return (0, cut.parts) if what else None


def _check_tied(model: nn.Module, cuts: list[Cut]) -> None:
    by_module = {cut.module: cut for cut in cuts}
    for places in tied_places(model):
        # A module that is no layer itself holds a layer's parameter only to have a name for it.
        layouts = {
            full: _layout(by_module[module], name) if module in by_module else None
            for module, name, full in places
            if module in by_module or not any(module.children())
        }
        if len(set(layouts.values())) > 1:
            words = [f"{full}: {_word_of(by_module.get(module))}" for module, _, full in places]
            raise UserError(
                "tied weights are cut in different ways",
                field="parallel.tensor_plan",
                got=", ".join(words),
                allowed="embedding_rowwise with colwise, colwise_gather_output or colwise_loss_parallel; or"
                " none of them",
                remedy="Cut them in the same way, or build the model without tied weights",
            )


def _word_of(cut: Cut | None) -> str:
    return cut.word if cut is not None else "whole"


def _check_heads(model: nn.Module, cut: Cut, size: int) -> None:
    """The number of heads has to be a multiple of the ranks, or a rank has a part of a head."""
    for name, module in _surrounding(model, cut.name):
        sources = [module, *([module.config] if hasattr(module, "config") else [])]
        numbers = {h: getattr(source, h, None) for source in sources for h in _HEADS}
        wrong = {h: n for h, n in numbers.items() if isinstance(n, int) and n % size}
        for heads, number in wrong.items():
            raise UserError(
                f"'{cut.name}' computes the heads of '{name}', which has {heads}={number}, and {size} ranks"
                " cannot divide them",
                field="parallel.tensor",
                got=size,
                allowed=", ".join(str(n) for n in range(1, number + 1) if number % n == 0),
                remedy="Or leave attention whole with parallel.tensor_plan, and cut the MLP alone",
            )


def _surrounding(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules of attention around the module `name`."""
    path = name.split(".")
    for length in range(1, len(path)):
        prefix = ".".join(path[:length])
        module = model.get_submodule(prefix)
        if "attention" in type(module).__name__.lower():
            yield prefix, module


def _check_sequence(model: nn.Module, cuts: list[Cut]) -> None:
    """With slices of the sequence between layers, each layer has to take slices, and each parameter that is
    not cut has to be one whose gradients are added."""
    whole = [cut for cut in cuts if not cut.sequence and cut.word != "replicated_with_grad_allreduce"]
    if whole:
        raise UserError(
            f"a part of the plan takes slices of the sequence, and '{whole[0].name}' takes whole sequences",
            field="parallel.tensor_plan",
            got=whole[0].word,
            allowed=f"{whole[0].word}{_SUFFIX}",
            remedy="Use words with _sequence for all modules, or for none",
        )
    covered = {id(p) for cut in cuts for p in cut.module.parameters()}
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in covered]
    if missing:
        raise UserError(
            f"the plan takes slices of the sequence, and does not name the module of '{missing[0]}': its"
            " gradient would be that of a slice",
            field="parallel.tensor_plan",
            got=f"{len(missing)} parameters without a word",
            remedy="Add their modules, such as norms, with sequence_parallel",
        )
