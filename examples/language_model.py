"""A byte-level language model with dilated attention learns Python from Python's own standard library.

    python -m distributed.cli train --script examples/language_model.py --num-processes 2
    python -m distributed.cli train --script examples/language_model.py --max-steps 2000 --num-gpus 8

Nothing is downloaded: the text is the source code of the interpreter that runs this, as bytes.

Worth a look:

- `create_distributed_model("small")` is the same model with 140 million parameters and 16,384 tokens of
  context (docs/kernels.md);
- the model is a *factory*: every rank builds it under the same seed, and no weights are sent;
- the loss is the default cross-entropy; outputs of shape (batch, length, classes) are understood;
- `warmup_steps`, the cosine and `max_steps` count optimizer steps, whatever ranks and accumulation;
- a metric returns (sum, count), which is what makes its mean right over ragged batches and ranks.
"""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from distributed_kernels import create_distributed_model
from torch import Tensor, nn

from distributed import Trainer

NUM_BYTES = 400_000  # of source code, a tenth of it for validation
LENGTH = 128  # bytes of context; with 256 the class axis of (N, 256, 256) could not be told apart


def build_model() -> nn.Module:
    """(N, LENGTH) bytes -> logits (N, LENGTH, 256): near bytes in full, far ones ever thinner."""
    return create_distributed_model(
        embed_dim=96,
        num_heads=4,
        num_layers=2,
        segment_lengths=(32, 64, 128),
        dilation_rates=(1, 2, 4),
        vocab_size=256,
        max_seq_len=LENGTH,
    )


def read_library(limit: int) -> Tensor:
    """The first `limit` bytes of the standard library's source, files in alphabetical order."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8).long()


def windows(data: Tensor) -> tuple[Tensor, Tensor]:
    """Non-overlapping (input, target) of `LENGTH` bytes each; the target is one byte ahead."""
    rows = data[: len(data) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def bits_per_byte(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """(sum of bits, number of bytes)."""
    nats = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return nats / math.log(2), target.numel()


def main() -> None:
    data = read_library(NUM_BYTES)
    split = len(data) * 9 // 10
    trainer = Trainer(
        build_model,
        global_batch_size=64,
        gradient_accumulation_steps=2,
        max_steps=60,
        learning_rate=3e-3,
        weight_decay=0.01,
        scheduler="cosine",
        warmup_steps=10,
        gradient_clipping=1.0,
        log_every_n_steps=10,
        metrics={"bits_per_byte": bits_per_byte},
    )
    history = trainer.fit(windows(data[:split]), windows(data[split:]))
    if history.epochs:
        bits = history.epochs[-1]["val_bits_per_byte"]
        print(f"{bits:.3f} bits per byte of unseen source after {history.epochs[-1]['step']} steps")


if __name__ == "__main__":
    main()
