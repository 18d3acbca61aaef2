"""Windows that are read and copied ahead: the same batches, cursor and bits as without.

No GPU is needed: a rank that takes its device for one that is no CPU reads ahead as on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from distributed import Callback
from distributed.data.rows import reader_of
from distributed.interfaces.backend import MicroBatch, Window
from distributed.interfaces.plan import RunPlan
from distributed.training.batch_transfer import Transfers
from distributed.training.read_ahead import ReadAhead
from distributed.training.torch_backend import TorchBackend
from tests.support.emulated_device import DEVICE, EmulatedDevice
from tests.support.training import make_trainer

NAME = "cpu:0"
"""Of a CPU, and not the name by which ranks know it."""


class Augmented(Dataset[Any]):
    """Draws random numbers of the process that reads it."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.rand(8) + index, torch.tensor(index % 3)


def tensors() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(22, 8, generator=generator), torch.arange(22) % 3)


DATA: dict[str, tuple[Any, bool]] = {
    "tensors": (lambda: DataLoader(tensors(), 4, shuffle=True), True),
    "in order": (lambda: DataLoader(tensors(), 4), True),
    "workers": (lambda: DataLoader(tensors(), 4, shuffle=True, num_workers=1), True),
    "no workers": (lambda: DataLoader(Augmented(), 4, shuffle=True), False),
}
"""What is read, and whether it can be read ahead."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 3))


class Seen(Callback):
    """How many windows were loaded before what follows each step."""

    def __init__(self) -> None:
        self.loaded, self.after_step = 0, list[int]()

    def on_step_end(self, context: Any) -> None:
        self.after_step.append(self.loaded)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """On a device that has another name, the windows that are loaded."""
    monkeypatch.setattr(RunPlan, "device_of", lambda plan, local_rank: NAME)
    seen, load_ahead = Seen(), TorchBackend.load_ahead

    def load(backend: Any, window: Window) -> None:
        seen.loaded += 1
        load_ahead(backend, window)

    monkeypatch.setattr(TorchBackend, "load_ahead", load)
    return seen


def trained(data: Any, seen: Seen, ahead: bool, folder: Path | None = None, **fit: int) -> list[Tensor]:
    """The weights after `fit`, from where a checkpoint in `folder` is."""
    own = model()
    fields: dict[str, Any] = {"data": {"prefetch_to_device": ahead}, "deterministic": True}
    if folder is not None:
        fields |= {"resume_from_checkpoint": True, "checkpoint": {"every_n_steps": 1}}
    make_trainer(own, folder=folder, backend="serial", callbacks=[seen], **fields).fit(data(), **fit)
    return [p.detach().clone() for p in own.parameters()]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", DATA)
def test_the_bits_are_those_without(kind: str, seen: Seen) -> None:
    """Two epochs of six steps each; the last window of an epoch is ragged."""
    data, ahead = DATA[kind]
    plain = trained(data, seen, False, epochs=2)
    assert seen.loaded == 0
    seen.after_step.clear()
    assert same(trained(data, seen, True, epochs=2), plain)
    # The first window of an epoch is read when it is needed, and each other one behind the step before.
    expected = [*range(1, 6), 5, *range(6, 11), 10] if ahead else [0] * 12
    assert seen.after_step == expected


@pytest.mark.parametrize("kind", DATA)
def test_a_run_resumes_at_the_window_that_was_not_used(kind: str, seen: Seen, tmp_path: Path) -> None:
    data, _ = DATA[kind]
    whole = trained(data, seen, True, epochs=2)
    for steps in (3, 5):
        trained(data, seen, True, tmp_path, max_steps=steps)
    assert same(trained(data, seen, True, tmp_path, epochs=2), whole)


def test_as_many_copies_as_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunPlan, "device_of", lambda plan, local_rank: DEVICE)
    device = EmulatedDevice()
    device.counts = True
    given = {"backend": "serial", "log_every_n_steps": 1000}
    with device:
        make_trainer(model(), **given).fit(DataLoader(tensors(), 4), max_steps=5)
    # The sixth is read, too, before the run ends.
    assert (device.to_device[4, 8], device.to_device[2, 8]) == (5, 1)


# -- parts --------------------------------------------------------------------------------


class Host:
    """A backend that notes what it is told to load."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def load_ahead(self, window: Window) -> None:
        self.loaded.append(window.num_samples)


def numbered(end: int) -> Iterator[Window]:
    """Windows with 1, 2, ... samples; then the data fails."""
    for number in range(1, end):
        yield Window([MicroBatch(number, number)], number)
    raise ValueError("a broken file")


def test_an_error_is_raised_in_place_of_its_window() -> None:
    """Not behind the step before, which is complete and may have to be saved."""
    host: Any = Host()
    windows, found = ReadAhead(numbered(3), host), []
    windows.load()
    windows.load()
    for _ in range(2):
        found.append(next(windows).num_samples)
        windows.load()
    with pytest.raises(ValueError, match="a broken file"):
        next(windows)
    assert (found, host.loaded) == ([1, 2], [1, 2])


def test_each_batch_is_taken_once_and_others_are_copied() -> None:
    transfers, batch, other = Transfers(NAME), {"x": torch.ones(2)}, [torch.zeros(2)]
    transfers.begin(batch)
    batch["x"] += 1.0
    begun = transfers.take(batch)
    assert begun["x"].tolist() == [1.0, 1.0]
    assert transfers.take(batch)["x"].tolist() == [2.0, 2.0]
    transfers.begin(other)
    transfers.forget()
    assert transfers.take(other) is not other


class Stream:
    """Notes in which order a stream is used."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def record_event(self) -> str:
        self.calls.append(f"{self.name} records")
        return "copied"

    def wait_event(self, event: str) -> None:
        self.calls.append(f"{self.name} waits for {event}")


class Opaque:
    """Copies itself, and does not say what."""

    def to(self, device: str) -> Opaque:
        return self


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of CUDA's streams, of which this machine need have none."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("other", calls))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(calls.append(f"in {stream.name}")))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("own", calls))
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: tensor.dtype == torch.float32)

    def used(tensor: Tensor, stream: Stream) -> None:
        calls.append(f"{stream.name} uses {tuple(tensor.shape)}")

    monkeypatch.setattr(Tensor, "record_stream", used)
    return calls


def beside() -> Transfers:
    transfers = Transfers(NAME)
    transfers._has_streams = True
    return transfers


def test_a_large_batch_is_copied_on_a_stream_of_its_own(streams: list[str]) -> None:
    transfers, batch = beside(), [torch.ones(600, 600), {"y": torch.zeros(3)}]
    transfers.begin(batch)
    assert streams == ["in other", "other records"]
    taken = transfers.take(batch)
    assert streams[2:] == ["own waits for copied", "own uses (600, 600)", "own uses (3,)"]
    assert torch.equal(taken[0], batch[0])


@pytest.mark.parametrize(
    "batch",
    [
        [torch.ones(8, 8)],
        [torch.ones(600, 600, dtype=torch.float64)],
        [torch.ones(600, 600), torch.ones(2, dtype=torch.int64)],
        [torch.ones(600, 600), Opaque()],
    ],
    ids=["small", "pageable", "partly pageable", "opaque"],
)
def test_other_batches_are_copied_behind_the_step(batch: list[Any], streams: list[str]) -> None:
    transfers = beside()
    transfers.begin(batch)
    assert len(transfers.take(batch)) == len(batch)
    assert streams == []


DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 2), (6, 0)], ids=str)
def test_rows_are_those_of_an_index(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(6 * 4).remainder(7)[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    for where in (torch.tensor([4, 0, 4, 5]), slice(1, 4), torch.tensor([], dtype=torch.int64)):
        read = reader_of(tensor, pinned=False, ranges=isinstance(where, slice))
        found, expected = read(where), tensor[where]
        assert (found.dtype, found.shape) == (dtype, expected.shape)
        assert found.view(torch.uint8).equal(expected.view(torch.uint8)) if found.numel() else True


def test_rows_of_other_layouts() -> None:
    base = torch.randn(40)
    for tensor in (base.as_strided((10, 5), (3, 1)), base.reshape(5, 8).T, base[::2]):
        where = torch.tensor([3, 3, 1])
        assert torch.equal(reader_of(tensor, pinned=False, ranges=False)(where), tensor[where])
