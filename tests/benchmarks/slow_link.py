"""Step time and loss over slow links, for each codec and low-communication mode beside dense gradients.

    python -m tests.benchmarks.slow_link                          # 100 Mbit, 1 Gbit, 20 ms; needs root
    python -m tests.benchmarks.slow_link --links 100mbit --methods none int8 --steps 40 --seconds 30

Two ranks, each in a network namespace, train a byte-level language model of 5 million parameters on the
source of Python's standard library. Every method trains from the same weights on the same samples, for at
least `--steps` optimizer steps and at least `--seconds`. The validation loss is measured after `--steps`
steps and after the last step before `--seconds`; the time of measurements and of the first step is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed import Callback, Trainer
from examples.language_model import read_library
from tests.cluster.hosts import Network
from tests.cluster.links import check_rights, limit_rate, with_delay

LENGTH, WIDTH, LAYERS, BATCH = 64, 256, 6, 8
LINKS = ("100mbit", "1gbit", "20ms")
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "fp16": {"compression": {"codec": "fp16"}},
    "int8": {"compression": {"codec": "int8"}},
    "fp8": {"compression": {"codec": "fp8"}},
    "top-k 1 %": {"compression": {"codec": "top-k", "ratio": 0.01}},
    "random-k 1 %": {"compression": {"codec": "random-k", "ratio": 0.01}},
    "powersgd 4": {"compression": {"codec": "powersgd", "rank": 4}},
    "local SGD, period 4": {"low_communication": {"mode": "local-sgd", "period": 4}},
    "DiLoCo, period 10": {"low_communication": {"mode": "diloco", "period": 10}},
    "streaming DiLoCo, period 10": {"low_communication": {"mode": "streaming-diloco", "period": 10}},
    "asynchronous SGD": {"low_communication": {"mode": "async-sgd", "max_staleness": 2}},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )

    def forward(self, hidden: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1])
        return self.layer(hidden, src_mask=mask, is_causal=True)


class LanguageModel(nn.Module):
    """(N, LENGTH) bytes -> logits (N, LENGTH, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        return self.head(self.blocks(self.tokens(tokens) + self.places(places)))


def windows() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and validation samples: (input, target) of `LENGTH` bytes."""
    data = read_library(2_000_000)
    rows = data[: len(data) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    return (inputs[:-256], targets[:-256]), (inputs[-256:], targets[-256:])


class Clock(Callback):
    """On rank 0: measures steps, and the validation loss at the two points; ends the run after the second."""

    def __init__(self, steps: int, seconds: float, validation: tuple[Tensor, Tensor]) -> None:
        self.steps, self.seconds, self.validation = steps, seconds, validation
        self.elapsed, self.times = 0.0, list[float]()
        self.found: dict[str, Any] = {}
        self.sent = 0
        self._since: float | None = None

    def on_step_end(self, context: Any) -> None:
        now = time.perf_counter()
        if self._since is not None:
            self.times.append(now - self._since)
            self.elapsed += self.times[-1]
        else:
            self.sent = sent_bytes()  # without the model, which is sent at the start
        step = context.progress.step
        if step == self.steps:
            self.found["loss after steps"] = self.loss(context.model)
        over = self.elapsed >= self.seconds
        if over and "loss after seconds" not in self.found:
            self.found |= {"loss after seconds": self.loss(context.model), "steps in time": step}
        if over and step >= self.steps:
            context.request_stop("measured")
        self._since = time.perf_counter()

    def loss(self, model: nn.Module) -> float:
        inputs, targets = self.validation
        model.eval()
        with torch.no_grad():
            found = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
        model.train()
        return found


def train(method: str, steps: int, seconds: float) -> None:
    """One rank; its environment is that of a launcher."""
    torch.set_num_threads(1)
    training, validation = windows()
    clock = Clock(steps, seconds, validation)
    torch.manual_seed(0)
    trainer = Trainer(
        LanguageModel(),
        backend="pytorch-ddp",
        device="cpu",
        batch_size=BATCH // 2,
        learning_rate=0.05,
        optimizer="sgd",
        momentum=0.9,
        gradient_clipping=1.0,
        log_every_n_steps=5,
        divergence_check_steps=None,
        tracking={"progress": "off"},
        callbacks=[clock],
        epochs=100,
        **METHODS[method],
    )
    trainer.fit(training)
    if os.environ["RANK"] == "0":
        print(
            json.dumps(
                {
                    **clock.found,
                    "ms per step": 1000 * statistics.fmean(clock.times[2:]),
                    "MB per step": (sent_bytes() - clock.sent) / len(clock.times) / 1e6,
                }
            )
        )


def sent_bytes() -> int:
    """What this process has written: to sockets, as good as all of it."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


@contextmanager
def linked(link: str, folder: Path) -> Iterator[tuple[Network, str, str]]:
    """Two hosts on a link: (their network, address of the first, name of the device)."""
    with Network(["n1", "n2"], folder) as network:
        if link.endswith("ms"):
            with with_delay(network, "n1", "n2", float(link.removesuffix("ms")) / 2000) as (first, _):
                yield network, first, "tun0"
        else:
            for host in network.hosts.values():
                limit_rate(host, link)
            yield network, network["n1"].address, "eth0"


def measure(link: str, method: str, steps: int, seconds: float) -> dict[str, Any]:
    """What rank 0 of two reports."""
    with TemporaryDirectory() as folder, linked(link, Path(folder)) as (network, address, device):
        command = [sys.executable, "-m", "tests.benchmarks.slow_link", "--rank-of", method]
        command += ["--steps", str(steps), "--seconds", str(seconds)]
        processes = []
        for rank, host in enumerate(network.hosts.values()):
            places = {
                "RANK": rank,
                "LOCAL_RANK": 0,
                "WORLD_SIZE": 2,
                "LOCAL_WORLD_SIZE": 1,
                "GROUP_RANK": rank,
            }
            env = {name: str(value) for name, value in places.items()}
            env |= {"MASTER_ADDR": address, "MASTER_PORT": "29400", "GLOO_SOCKET_IFNAME": device}
            env |= {"OMP_NUM_THREADS": "1", "GROUP_WORLD_SIZE": "2"}
            processes.append(host.start(command, env=env, stdout=subprocess.PIPE, text=True))
        printed = [process.communicate(timeout=1800)[0] for process in processes]
    lines = [line for line in printed[0].splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{method} over {link} printed no result:\n{printed[0]}\n{printed[1]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of a table, one for each link and method; times as ratios to dense gradients on the same link."""
    yield "| link | method | MB per step | time / dense | loss after {steps} steps | loss after {seconds} s |"
    yield "|---|---|---|---|---|---|"
    dense = {row["link"]: row["ms per step"] for row in rows if row["method"] == "none"}
    for row in rows:
        ratio = row["ms per step"] / dense[row["link"]] if row["link"] in dense else float("nan")
        yield (
            f"| {row['link']} | {row['method']} | {row['MB per step']:.3f} | {ratio:.2f}"
            f" ({row['ms per step']:.0f} ms) | {row['loss after steps']:.3f}"
            f" | {row['loss after seconds']:.3f} ({row['steps in time']} steps) |"
        )


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--links", nargs="+", default=LINKS, metavar="LINK")
    parser.add_argument(
        "--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--output", type=Path, help="file for the rows, as JSON")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        train(args.rank_of, args.steps, args.seconds)
        return 0
    check_rights()
    rows = []
    for link in args.links:
        for method in args.methods:
            rows.append({"link": link, "method": method, **measure(link, method, args.steps, args.seconds)})
            print(rows[-1], file=sys.stderr, flush=True)
            if args.output:
                args.output.write_text(json.dumps(rows, indent=1))
    for line in table(rows):
        print(line.format(steps=args.steps, seconds=args.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
