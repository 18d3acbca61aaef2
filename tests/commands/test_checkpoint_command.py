"""``checkpoint``: what it says of a directory, and weights that other programs read."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from distributed import Trainer
from distributed.checkpoint.diff import differences
from distributed.checkpoint.export import bytes_of
from distributed.checkpoint.reader import PortableReader
from distributed.cli import main
from distributed.errors import UserError


class Tied(nn.Module):
    """An embedding whose weight is the head's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.embed(words)))
        return out


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """(a directory with steps 2, 4, 6, 8; the model as it was at step 8)."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    model = Tied()
    trainer = Trainer(
        model, batch_size=4, num_processes=1, device="cpu", checkpoint_dir=folder, max_steps=8,
        checkpoint={"every_n_steps": 2, "keep_last": None, "keep_best": False}, backend="serial",
    )  # fmt: skip
    trainer.fit((torch.randint(0, 7, (64,)), torch.randint(0, 7, (64,))))
    return folder, model


def step(folder: Path, number: int) -> Path:
    return folder / f"step_{number:08d}"


@pytest.fixture
def folder(saved: tuple[Path, nn.Module], tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    import shutil

    return Path(shutil.copytree(saved[0], tmp_path / "saved"))


def spoil(folder: Path, number: int) -> Path:
    path = next(step(folder, number).glob("shard_*"))
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.chmod(stat.S_IRUSR | stat.S_IWUSR)
    path.write_bytes(data)
    return path


def said(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    assert main(["checkpoint", *map(str, words)]) == code
    return capsys.readouterr().out


def test_ls_lists_newest_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(said(capsys, "ls", folder, "--json"))
    assert [(row["step"], row["ranks"], row["backend"], row["state"]) for row in rows] == [
        (number, 1, "serial", "complete") for number in (8, 6, 4, 2)
    ]
    (step(folder, 6) / "manifest.json").unlink()
    table = said(capsys, "ls", folder)
    assert "no complete checkpoint" in next(line for line in table.splitlines() if line.split()[:1] == ["6"])


def test_show_tells_progress_and_tensors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(said(capsys, "show", folder, "--json"))
    assert (facts["step"], facts["total_samples"], facts["ranks"]) == (8, 32, 1)
    assert facts["tied"] == {"head.weight": "embed.weight"}
    assert facts["tensors"]["optimizer.exp_avg embed.weight"] == [[7, 4], "float32"]
    assert facts["config"]["batch_size"] == 4
    table = said(capsys, "show", step(folder, 4))
    assert "model embed.weight" in table
    assert "elements: model 45" in table  # 28 + 4 + 4 + 4 + 4 + 1


def test_verify_names_the_damaged_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "verify", folder).count(": good") == 4
    path = spoil(folder, 6)
    table = said(capsys, "verify", folder, code=1)
    assert table.count(": good") == 3
    assert f"{path}: the checksum of" in table
    assert said(capsys, "verify", step(folder, 8)).count("good") == 1


# -- export --------------------------------------------------------------------------------------


def test_diff_compares_bit_for_bit(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "diff", str(folder), str(step(folder, 8))]) == 0
    assert "equal, bit for bit" in capsys.readouterr().out
    assert main(["checkpoint", "diff", str(step(folder, 6)), str(step(folder, 8))]) == 1
    out = capsys.readouterr().out
    assert "differ\n" in out
    assert "progress step: 6 and 8" in out
    assert re.search(r"model 'embed.weight': \d+ of 28 elements, the first at \d+: \S+ and \S+", out)
    assert "random number generators" not in out  # nothing was drawn


def test_the_last_bit_decides(tmp_path: Path) -> None:
    def saved(name: str, values: list[float]) -> PortableReader:
        model = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(model.weight)
        model.register_buffer("note", torch.tensor(values))
        Trainer(
            model, num_processes=1, device="cpu", checkpoint_dir=tmp_path / name, backend="serial",
            optimizer="sgd", loss_fn=nn.functional.mse_loss,
        ).fit((torch.zeros(4, 3), torch.zeros(4, 1)))  # fmt: skip
        return PortableReader(str(step(tmp_path / name, 1)))

    one = saved("one", [1.0, float("nan"), 0.0])
    assert list(differences(one, saved("same", [1.0, float("nan"), 0.0]))) == []
    (found,) = differences(one, saved("other", [1.0 + 2**-23, float("nan"), -0.0]))
    assert found.startswith("model 'note': 2 of 3 elements, the first at 0: 1.0 and 1.0000001")


def test_export_is_what_safetensors_loads(
    saved: tuple[Path, nn.Module], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, model = saved
    out = tmp_path / "weights"
    said(capsys, "export", folder, "--output", out)
    found = load_file(out / "model.safetensors")
    assert found.keys() == model.state_dict().keys() - {"head.weight"}
    for name, tensor in found.items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    other = Tied()
    assert load_model(other, out / "model.safetensors") == (set(), [])
    assert torch.equal(other.head.weight, model.get_parameter("embed.weight"))
    assert stat.S_IMODE((out / "model.safetensors").stat().st_mode) == 0o600


def test_export_in_several_files_with_an_index(
    saved: tuple[Path, nn.Module], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The layout of Hugging Face's: every tensor in the file that the index names."""
    folder, model = saved
    said(capsys, "export", folder, "--output", tmp_path, "--max-shard-size", "60B", "--dtype", "bf16")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert set(index["weight_map"].values()) == set(files)
    total = 0
    for name, file in index["weight_map"].items():
        tensor = load_file(tmp_path / file)[name]
        expected = model.state_dict()[name]
        wanted = expected.to(torch.bfloat16) if expected.is_floating_point() else expected
        assert torch.equal(tensor, wanted), name
        assert tensor.dtype == wanted.dtype
        total += tensor.nbytes
    assert index["metadata"]["total_size"] == total
    assert not list(tmp_path.glob(".tmp*"))


def test_export_overwrites_nothing_and_takes_nothing_damaged(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "weights"
    said(capsys, "export", folder, "--output", out)
    before = (out / "model.safetensors").read_bytes()
    assert main(["checkpoint", "export", str(folder), "--output", str(out)]) == 2
    assert "it holds exported weights already" in capsys.readouterr().err
    assert (out / "model.safetensors").read_bytes() == before
    spoil(folder, 8)
    assert main(["checkpoint", "export", str(step(folder, 8)), "--output", str(tmp_path / "none")]) == 2
    assert "the checkpoint is damaged" in capsys.readouterr().err
    assert not list((tmp_path / "none").iterdir())


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 kb", 1500), ("2GiB", 2**31), ("60B", 60), ("7", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "5TB", "five"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UserError, match="such as 5GB"):
        bytes_of(text)


# -- prune ---------------------------------------------------------------------------------------


def left(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step_*"))


def test_prune_keeps_the_newest_the_best_and_every_nth(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from distributed.checkpoint.checkpointer import PortableCheckpointer

    PortableCheckpointer(str(folder), keep_last=None).mark_best(str(step(folder, 2)))
    words: list[Any] = ["prune", folder, "--keep-last", 1, "--keep-every", 4]
    assert said(capsys, *words, "--dry-run") == f"would remove {step(folder, 6)}\n"
    assert left(folder) == [2, 4, 6, 8]
    assert said(capsys, *words) == f"removed {step(folder, 6)}\n"
    assert left(folder) == [2, 4, 8]
    said(capsys, "prune", folder, "--keep-last", 1)
    assert left(folder) == [2, 8]
    assert not list(folder.glob(".*"))


def test_prune_counts_good_ones_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be read is neither kept as the newest nor removed."""
    (step(folder, 8) / "manifest.json").unlink()
    said(capsys, "prune", folder, "--keep-last", 1)
    assert left(folder) == [6, 8]


def test_wrong_places_and_numbers(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for words in (["ls", empty], ["show", empty], ["verify", empty], ["prune", empty, "--keep-last", 1]):
        assert main(["checkpoint", *map(str, words)]) == 2
        assert "no checkpoint found" in capsys.readouterr().err
    assert main(["checkpoint", "prune", str(folder), "--keep-last", "0"]) == 2
    assert "--keep-last" in capsys.readouterr().err
    assert left(folder) == [2, 4, 6, 8]
    assert main(["checkpoint", "show", str(step(folder, 99))]) == 2
    assert "no complete checkpoint" in capsys.readouterr().err
