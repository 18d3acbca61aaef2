"""Loaders and datasets of other libraries, with one small model."""

from __future__ import annotations

import atexit
import io
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.campaigns.zoo.entry import BATCH, Entry

__all__ = ["ENTRIES"]

LENGTH, WIDTH, CLASSES = 24, 6, 3


def points() -> tuple[Tensor, Tensor]:
    x = torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(LENGTH) % CLASSES


def pairs() -> list[tuple[Tensor, Tensor]]:
    return list(zip(*points(), strict=True))


def rows() -> list[dict[str, Tensor]]:
    return [{"x": x, "y": y} for x, y in pairs()]


class Pairs(nn.Module):
    """(N, WIDTH) -> (N, CLASSES)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        return result


class Named(Pairs):
    """The same for columns by name, with its loss."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = super().forward(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def of_pair(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def of_columns(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch)["loss"]
    return loss


# -- torch and torchdata -----------------------------------------------------------------------------


def with_workers() -> Any:
    return DataLoader(TensorDataset(*points()), batch_size=BATCH, num_workers=2)


def stateful() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(TensorDataset(*points()), batch_size=BATCH)


# -- datasets ----------------------------------------------------------------------------------------


def table() -> Any:
    import datasets

    x, y = points()
    return datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()}).with_format("torch")


def stream(shuffled: bool = False) -> Any:
    found = table().to_iterable_dataset(num_shards=3)
    return found.shuffle(seed=5, buffer_size=7) if shuffled else found


def of_table() -> Any:
    return DataLoader(table(), batch_size=BATCH)


def of_stream(shuffled: bool = False) -> Any:
    return DataLoader(stream(shuffled), batch_size=BATCH)


# -- webdataset --------------------------------------------------------------------------------------


def shards() -> str:
    """The pattern of three archives, which this process removes at its end."""
    folder = TemporaryDirectory(prefix="zoo-")
    atexit.register(folder.cleanup)
    for shard in range(3):
        with tarfile.open(Path(folder.name, f"{shard}.tar"), "w") as archive:
            for number in range(shard * LENGTH // 3, (shard + 1) * LENGTH // 3):
                x, y = pairs()[number]
                for ending, value in (("x.pth", x.clone()), ("y.pth", y.clone())):
                    content = io.BytesIO()
                    torch.save(value, content)
                    member = tarfile.TarInfo(f"{number:03d}.{ending}")
                    member.size = content.tell()
                    content.seek(0)
                    archive.addfile(member, content)
    return str(Path(folder.name, "{0..2}.tar"))


def from_archives() -> Any:
    import webdataset

    found = webdataset.WebDataset(shards(), shardshuffle=False, nodesplitter=None)
    return DataLoader(found.decode().to_tuple("x.pth", "y.pth"), batch_size=BATCH)


def _row(library: str, loader: Callable[[], Any], columns: bool = False) -> Entry:
    if columns:
        return Entry(library, Named, rows, loss=of_columns, loader=loader)
    return Entry(library, Pairs, pairs, loss=of_pair, loader=loader)


ENTRIES = {
    "DataLoader with workers": _row("torch", with_workers),
    "StatefulDataLoader": _row("torchdata", stateful),
    "Dataset": _row("datasets", of_table, columns=True),
    "IterableDataset": _row("datasets", of_stream, columns=True),
    "IterableDataset, shuffled": Entry(
        "datasets", Named, lambda: list(stream(shuffled=True)), loss=of_columns,
        loader=partial(of_stream, shuffled=True),
    ),
    "WebDataset": _row("webdataset", from_archives),
}  # fmt: skip
