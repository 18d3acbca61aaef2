"""A small ConvNet on handwritten digits, written as for plain PyTorch.

    python examples/convnet.py --epochs 8
    python -m distributed.cli train --script examples/convnet.py --num-processes 2

Worth a look:

- optimizer and scheduler are ordinary torch objects; the scheduler steps once an epoch;
- `global_batch_size` is fixed, so two ranks take the same steps as one, with half the samples each;
- the augmentation sits in the Dataset; `per_sample_rng` ties its random numbers to (seed, epoch,
  sample), so they too are the same on any number of ranks;
- BatchNorm keeps its statistics per rank, which is what still differs (`--sync-batchnorm` on GPUs).
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from distributed import Trainer
from distributed.commands.bundled.digits import load_digits


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """8 x 8 pixels in 0..1, shape (1, 8, 8), and a label; shifted by up to a pixel in training."""

    def __init__(self, pixels: Tensor, labels: Tensor, augment: bool) -> None:
        self.images, self.labels, self.augment = pixels.view(-1, 1, 8, 8), labels, augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.augment:
            down, right = torch.randint(0, 3, (2,)).tolist()
            image = F.pad(image, (1, 1, 1, 1))[:, down : down + 8, right : right + 8]
        return image, self.labels[index]


class ConvNet(nn.Module):
    """Two convolutions, two linear layers, about 76,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(32)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(64)
        self.fc1 = nn.Linear(64 * 4 * 4, 54)
        self.fc2 = nn.Linear(54, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        x = F.max_pool2d(x, 2).flatten(1)
        logits: Tensor = self.fc2(F.relu(self.fc1(x)))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()

    (x, y), (val_x, val_y) = load_digits()
    torch.manual_seed(0)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.3)

    trainer = Trainer(
        model,
        optimizer=optimizer,
        scheduler=scheduler,
        global_batch_size=64,
        epochs=args.epochs,
        data={"per_sample_rng": True},
        log_every_n_steps=10,
    )
    history = trainer.fit(Digits(x, y, augment=True), Digits(val_x, val_y, augment=False))
    if history.best_accuracy is not None:
        print(f"best validation accuracy {history.best_accuracy:.4f} on {history.world_size} rank(s)")


if __name__ == "__main__":
    main()
