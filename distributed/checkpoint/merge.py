"""Merge the adapter of a checkpoint into its base model, by PEFT's own function."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from distributed.checkpoint.export import DTYPES, export_safetensors
from distributed.checkpoint.reader import PortableReader
from distributed.errors import UserError
from distributed.system.private_folders import PrivateFolder

__all__ = ["export_merged"]


def export_merged(path: str, base: str, output: str, *, dtype: str | None = None) -> list[str]:
    """Write the base model with the adapter of the checkpoint at `path` merged into its weights.

    Args:
        path: a committed checkpoint of a model of PEFT.
        base: directory of the base model, as its ``save_pretrained`` wrote it. Nothing is downloaded.
        output: a directory, made when missing.
        dtype: as in `export_safetensors`; None keeps that of the base model.

    Returns:
        The paths written.

    Raises:
        UserError: the checkpoint has no adapter, `base` is no such directory, `output` holds weights, or
            transformers or peft is not installed.
    """
    files = PortableReader(path).extra.get("model_files", {}).get("files", {})
    if "adapter_config.json" not in files:
        raise UserError(
            "the checkpoint has no adapter of PEFT", field="PATH", got=path, remedy="Leave --merge-into out"
        )
    if Path(output, "model.safetensors").exists():
        raise UserError("it holds exported weights already", field="--output", got=output,
                        remedy="Choose another directory, or remove them")  # fmt: skip
    with PrivateFolder("distributed-adapter-") as adapter:
        export_safetensors(path, adapter)
        merged = _merged(base, adapter)
    if dtype is not None:
        import torch

        merged = merged.to(getattr(torch, DTYPES[dtype]))
    merged.save_pretrained(output)
    return [os.path.join(output, name) for name in sorted(os.listdir(output))]


def _merged(base: str, adapter: str) -> Any:
    try:
        config = json.loads(Path(base, "config.json").read_text(encoding="utf-8"))
        (architecture,) = config["architectures"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"not a directory of a base model: {error}",
            field="--merge-into",
            got=base,
            allowed="a directory with config.json and model.safetensors",
            remedy="Save the base model there with its save_pretrained",
        ) from None
    try:
        import peft
        import transformers
    except ImportError as error:
        raise UserError(
            f"merging needs {error.name}", field="--merge-into", remedy="pip install transformers peft"
        ) from None
    model = getattr(transformers, architecture).from_pretrained(base, local_files_only=True)
    return peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
