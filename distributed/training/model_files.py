"""What the loaders of other libraries read beside a model's weights, such as Hugging Face's config.json.

Models are recognised by their methods, because none of these libraries is imported here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from distributed.checkpoint.torch_state import named_tensors

__all__ = ["describe"]


def describe(model: Any) -> dict[str, Any]:
    """What an export of the model's weights needs, as plain data.

    Returns:
        ``files``: name -> text. For adapters of PEFT also ``names``: parameter -> its name in the exported
        file, which holds nothing else. Empty for models of other kinds.
    """
    if hasattr(model, "peft_config"):
        return _adapter(model)
    config: Any = getattr(model, "config", None)
    generation: Any = getattr(model, "generation_config", None)
    if not hasattr(config, "to_json_string"):
        return {}
    content = {**json.loads(config.to_json_string()), "architectures": [type(model).__name__]}
    files = {"config.json": json.dumps(content, indent=2)}
    if hasattr(generation, "to_json_string"):
        files["generation_config.json"] = generation.to_json_string()
    return {"files": files}


def _adapter(model: Any) -> dict[str, Any]:
    """Of the active adapter; PEFT's own function names its parameters."""
    name = model.active_adapter
    config = {**model.peft_config[name].to_dict(), "inference_mode": True}
    tensors, _ = named_tensors(model)
    own = {id(tensor): parameter for parameter, tensor in tensors.items()}
    named: Mapping[str, Any] = sys.modules["peft"].get_peft_model_state_dict(
        model, state_dict=tensors, adapter_name=name, save_embedding_layers=False
    )
    return {
        "files": {"adapter_config.json": json.dumps(_plain(config), indent=2, sort_keys=True)},
        "names": {own[id(tensor)]: exported for exported, tensor in named.items() if id(tensor) in own},
    }


def _plain(value: Any) -> Any:
    """`value` with sets as sorted lists, as PEFT writes them."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return sorted(value) if isinstance(value, (set, frozenset)) else value
