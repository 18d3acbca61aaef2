"""The codec of the guide, installed as a package: it passes the kit, and trains by its name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import commands
from tests.test_docs import ROOT, blocks

ENTRY_POINT = "[distributed.plugins]\nacme-codecs = acme_codecs\n"

TRAINING = """
import torch
from torch import nn

from distributed import Trainer, UserError


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def main():
    inputs, targets = torch.randn(40, 6, dtype=torch.float64), torch.randint(3, (40,))
    fields = {"num_processes": 2, "device": "cpu", "batch_size": 4, "optimizer": "sgd", "learning_rate": 0.1}
    fields |= {"data": {"shuffle": False}, "tracking": {"progress": "off"}}
    model = build()
    Trainer(model, compression={"codec": "sign"}, **fields).fit((inputs, targets), epochs=1)

    # The same in one process: each rank sends signs times its mean magnitude, and keeps the rest.
    plain, kept = build(), {}
    for x, y in zip(inputs.split(8), targets.split(8)):
        totals = [torch.zeros_like(p) for p in plain.parameters()]
        for rank in range(2):
            loss = nn.functional.cross_entropy(plain(x.split(4)[rank]), y.split(4)[rank]) / 2
            for index, gradient in enumerate(torch.autograd.grad(loss, plain.parameters())):
                values = gradient + kept.get((rank, index), 0)
                sent = torch.where(values > 0, 1.0, -1.0) * values.abs().mean().float().double()
                kept[rank, index] = values - sent
                totals[index] += sent
        with torch.no_grad():
            for parameter, total in zip(plain.parameters(), totals):
                parameter -= 0.1 * total
    print("off by", max(float((a - b).abs().max()) for a, b in zip(model.parameters(), plain.parameters())))

    try:
        Trainer(build(), compression={"codec": "sing"}, **fields).fit((inputs, targets), epochs=1)
    except UserError as error:
        print(error)


if __name__ == "__main__":
    main()
"""

KIT = """
from distributed.testing import CodecConformance


class TestSign(CodecConformance):
    codec = "sign"
"""


@pytest.fixture
def acme(make_distribution: Callable[..., Path], tmp_path: Path) -> Callable[..., str]:
    """Runs Python where the codec of docs/plugins.md is installed."""
    page = ROOT / "docs" / "plugins.md"
    hooks, codec = (
        next(source for _, source, _ in blocks(page, "python") if text in source)
        for text in ("def register_codecs", "class SignCodec")
    )
    site = make_distribution("acme-codecs", {"acme_codecs": hooks, "acme_sign": codec}, ENTRY_POINT)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))

    def run(*words: str) -> str:
        done = commands.run(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=240,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return run


@pytest.mark.starts_processes
def test_a_codec_of_a_plugin_trains_by_its_name(acme: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    shown = acme("train.py")
    assert "compression.codec=sign: each of 2 ranks sends 0.131 MB" in shown
    found = re.search(r"^off by (\S+)$", shown, re.MULTILINE)
    assert found is not None
    assert float(found[1]) < 1e-9
    assert "no codec is called 'sing'. Did you mean 'sign'?" in shown


@pytest.mark.starts_processes
def test_a_codec_of_a_plugin_passes_the_kit(acme: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "test_sign.py").write_text(KIT)
    shown = acme("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_sign.py")
    assert "17 passed, 2 skipped" in shown  # no oracle, no bound
