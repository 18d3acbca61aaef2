"""A small Mixtral of transformers learns Python from Python's own standard library.

    python -m distributed.cli train --script examples/mixtral.py --num-processes 2
    python -m distributed.cli train --script examples/mixtral.py --num-processes 2 --set parallel.expert=2
    python -m distributed.cli train --script examples/mixtral.py --num-processes 4 --set parallel.expert=2

Nothing is downloaded: the model is initialised at random, and the text is the source code of the interpreter
that runs this, as bytes.

Worth a look:

- nothing in this file knows of the ranks: `parallel.expert` divides the experts that the model declares, and
  tokens travel to them (docs/experts.md). Each command trains the same, also with `--backend fsdp`;
- the loss has no load-balancing term (`output_router_logits` is false), which would depend on how a global
  batch is divided into micro-batches;
- targets are shifted by one in the data: a model that gets a batch by name shifts `labels` itself, which
  slices of a sequence (`parallel.context`) do not allow.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import MixtralConfig, MixtralForCausalLM

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
    """A Mixtral of 0.2 million parameters over bytes: 2 of 4 experts for each token."""
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


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
