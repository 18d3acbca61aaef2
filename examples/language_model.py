"""A byte-level language model that learns to write Python from Python's own standard library.

    python -m distributed.cli train --script examples/language_model.py --num-processes 2
    python -m distributed.cli train --script examples/language_model.py --max-steps 2000 --num-gpus 8

Nothing is downloaded: the text is the source code of the interpreter that runs this, as bytes.

Worth a look:

- the model is a *factory*: every rank builds it under the same seed, and nothing has to travel;
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
from torch import Tensor, nn

from distributed import Trainer

NUM_BYTES = 400_000  # of source code, a tenth of it for validation
LENGTH = 64  # bytes of context; with 256 the class axis of (N, 256, 256) could not be told apart
WIDTH = 96


class ByteModel(nn.Module):
    """A causal transformer over bytes: (N, length) int64 -> logits (N, length, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, num_layers=2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        hidden = self.bytes(x) + self.places(torch.arange(length, device=x.device))
        logits: Tensor = self.head(self.norm(self.blocks(hidden, mask=mask, is_causal=True)))
        return logits


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
        ByteModel,
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
