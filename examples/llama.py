"""A small Llama of transformers learns Python from Python's own standard library, on a mesh or without.

    python -m distributed.cli train --script examples/llama.py --num-processes 2
    python -m distributed.cli train --script examples/llama.py --num-processes 2 --set parallel.tensor=2
    python -m distributed.cli train --script examples/llama.py --num-processes 4 --set parallel.tensor=2
    python -m distributed.cli train --script examples/llama.py --num-processes 2 --set parallel.context=2

Nothing is downloaded: the model is initialised at random, and the text is the source code of the interpreter
that runs this, as bytes.

Worth a look:

- nothing in this file knows of the mesh: `parallel.tensor` divides the model by the plan that it brings
  (docs/tensor-parallelism.md), `parallel.context` the sequences (docs/context-parallelism.md), and each
  command trains the same, with `--backend fsdp`, too;
- targets are shifted by one in the data: a model that gets a batch by name shifts `labels` itself, which
  slices of a sequence do not allow.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from distributed import Trainer

NUM_BYTES, LENGTH = 200_000, 64


class Bytes(Dataset[tuple[Tensor, Tensor]]):
    """Non-overlapping windows of `LENGTH` bytes, and the byte after each of them."""

    def __init__(self, text: bytes) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * LENGTH
        return self.bytes[start : start + LENGTH], self.bytes[start + 1 : start + LENGTH + 1]


def build_model() -> nn.Module:
    """A Llama of 0.2 million parameters over bytes."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= NUM_BYTES:
            break
    split = NUM_BYTES * 9 // 10
    trainer = Trainer(
        build_model,
        global_batch_size=32,
        max_steps=60,
        learning_rate=3e-3,
        gradient_clipping=1.0,
        warmup_steps=10,
    )
    history = trainer.fit(Bytes(text[:split]), Bytes(text[split:NUM_BYTES]))
    if history.epochs:
        print(
            f"validation loss {history.epochs[-1]['val_loss']:.4f} after {history.epochs[-1]['step']} steps"
        )


if __name__ == "__main__":
    main()
