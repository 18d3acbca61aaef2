"""Models with experts that the tests of meshes train."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tests.parallel.models import LENGTH, VOCABULARY, WIDTH, Entry, dilated, seeded

__all__ = ["EXPERTS", "EXPERT_ENTRIES"]

EXPERTS, TOP_K = 4, 2


def _moe() -> nn.Module:
    """The dilated language model, tied, whose second block has experts in the place of its MLP."""
    from distributed_kernels import MoELayer

    model: Any = dilated()
    model.blocks[1].mlp = MoELayer(WIDTH, 2 * WIDTH, EXPERTS, TOP_K)
    return model  # type: ignore[no-any-return]


def _frozen_router() -> nn.Module:
    model = _moe()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("router" not in name)
    return model


class Router(nn.Module):
    """Mixtral's, in the dtype of its weight: theirs computes in float32, whose rounding would hide what is
    looked for."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden, self.weight)
        weights, index = logits.softmax(-1).topk(TOP_K, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True), index


def mixtral(**given: Any) -> nn.Module:
    """A Mixtral of transformers, as it is."""
    from transformers import MixtralConfig, MixtralForCausalLM

    fields = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH,
        "use_cache": False,
        "experts_implementation": "eager",  # the others have no float64
    }
    return MixtralForCausalLM(MixtralConfig(**{**fields, **given}))


def _exact_mixtral(**given: Any) -> nn.Module:
    model = mixtral(**given)
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "MixtralRMSNorm":
            model.set_submodule(name, nn.RMSNorm(WIDTH, eps=1e-5))
        elif type(module).__name__ == "MixtralTopKRouter":
            model.set_submodule(name, Router(module.weight))
    return model


EXPERT_ENTRIES: dict[str, Entry] = {
    "moe": Entry(seeded(_moe)),
    "moe, frozen router": Entry(seeded(_frozen_router)),
    "mixtral": Entry(seeded(_exact_mixtral)),
    "mixtral tied": Entry(seeded(lambda: _exact_mixtral(tie_word_embeddings=True))),
}
