"""`fit` starts ranks from wherever a person writes Python, once, and brings back what they trained."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from distributed import Trainer, UserError
from distributed.system.private_folders import OWNER
from distributed.testing.rank_pool import RankPool
from tests.support import commands

pytestmark = pytest.mark.starts_processes

HELPER = """
import torch
from torch import nn

def make_data(length):
    x = torch.randn(length, 4, generator=torch.Generator().manual_seed(length))
    return x, (x.sum(dim=1) > 0).long()

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.scale
"""

# Everything is defined in the caller, lambdas included; `beside` is a module beside the script.
DEFINITIONS = """
import json, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from distributed import Callback, Trainer
import beside

class Points(Dataset):
    def __init__(self, length):
        self.x, self.y = beside.make_data(length)
    def __len__(self):
        return len(self.y)
    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is not None:
            open(os.path.join(os.environ["HERE"], f"worker-{os.getpid()}"), "w").close()
        return self.x[index], self.y[index]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = beside.Scale(), nn.Linear(4, 2)
    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))

class Mark(Callback):
    all_ranks = True
    def on_run_start(self, context):
        open(os.path.join(os.environ["HERE"], f"rank-{context.world.rank}-{os.getpid()}"), "w").close()

def accuracy(output, target):
    return (output.argmax(dim=1) == target).sum(), len(target)
"""

WORK = """
open(os.path.join(os.environ["HERE"], "around"), "a").write("once ")
torch.manual_seed(0)
model = Net()
trainer = Trainer(model, num_processes=2, device="cpu", learning_rate=0.05, log_every_n_steps=2,
                  optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
                  loss_fn=lambda output, target: nn.functional.cross_entropy(output, target),
                  metrics={"accuracy": lambda output, target: accuracy(output, target)},
                  callbacks=[Mark()])
loader = DataLoader(Points(21), batch_size=4, shuffle=True, num_workers=NUM_WORKERS)
history = trainer.fit(loader, DataLoader(Points(9), batch_size=4), epochs=2)
bits = [value.hex() for p in model.parameters() for value in p.flatten().tolist()]
print("RESULT", json.dumps({"bits": bits, "history": history.to_dict(),
                            "rate": history.samples_per_second, "pid": os.getpid()}))
"""

Result = dict[str, Any]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "beside.py").write_text(HELPER)
    # Would break a rank that imported from its working folder.
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "socket.py").write_text("raise ImportError('the working folder is not the caller\\'s path')")
    return folder


def program(guarded: bool = False, num_workers: int = 0) -> str:
    work = WORK.replace("NUM_WORKERS", str(num_workers))
    if guarded:
        indented = "".join(f"    {line}" for line in work.splitlines(keepends=True))
        work = 'if __name__ == "__main__":\n' + indented
    return DEFINITIONS + work


def execute(
    home: Path, here: Path, *words: str, source: str = "", path: Path | None = None, cwd: str = "elsewhere"
) -> Result:
    """Run fresh Python with `words`; check that code around `fit` ran once and nothing is left over."""
    # Paths of sockets are short.
    scratch = Path(tempfile.mkdtemp(prefix="launch-"))
    env = {**os.environ, "HERE": str(here), "OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)}
    env.pop("PYTHONPATH", None)
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = commands.run(
        [sys.executable, *words],
        input=source,
        env=env,
        cwd=home / cwd,
        capture_output=True,
        timeout=120,
        fresh=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (here / "around").read_text() == "once "
    names = {p.name for p in here.iterdir()}
    assert {name.split("-")[1] for name in names if name.startswith("rank")} == {"0", "1"}
    left = [name for name in names if name[-1].isdigit() and psutil.pid_exists(int(name.rsplit("-", 1)[1]))]
    assert left == []
    assert [p.name for p in scratch.iterdir() if p.name.startswith("distributed")] == []
    shutil.rmtree(scratch)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result: Result = json.loads(line.removeprefix("RESULT "))
    return result


@pytest.fixture(scope="module")
def reference(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """What a script with a ``__main__`` guard gets."""
    script = home / "guarded.py"
    script.write_text(program(guarded=True))
    return execute(home, tmp_path_factory.mktemp("guarded"), str(script))


def test_a_script_with_a_guard(reference: Result) -> None:
    history = reference["history"]
    assert history["total_time"] > history["train_time"] > 0
    assert reference["rate"] > 0
    assert history["best_accuracy"] == max(epoch["val_accuracy"] for epoch in history["epochs"])
    assert [epoch["step"] for epoch in history["epochs"]] == [3, 6]
    assert {len(series) for series in history["steps"].values()} == {6}
    assert history["num_samples"] == 42
    assert history["world_size"] == 2
    torch.manual_seed(0)
    assert reference["bits"][-2:] != [value.hex() for value in nn.Linear(4, 2).bias.tolist()]


def test_a_script_without_a_guard_with_loader_workers(home: Path, tmp_path: Path, reference: Result) -> None:
    script = home / "plain.py"
    script.write_text(program(num_workers=1))
    result = execute(home, tmp_path, str(script))
    assert result["bits"] == reference["bits"]
    assert len([p for p in tmp_path.iterdir() if p.name.startswith("worker-")]) >= 2


def test_train_script(home: Path, tmp_path: Path, reference: Result) -> None:
    script = home / "under_train.py"
    script.write_text(program())
    result = execute(home, tmp_path, "-m", "distributed.cli", "train", "--script", str(script), cwd=".")
    assert result["bits"] == reference["bits"]


def test_python_dash_c(home: Path, tmp_path: Path, reference: Result) -> None:
    assert execute(home, tmp_path, "-P", "-c", program(), path=home)["bits"] == reference["bits"]


def test_an_interactive_session(home: Path, tmp_path: Path, reference: Result) -> None:
    """`python -i` reading what is typed; a blank line ends a class."""
    typed = "\n".join(_typed(program()))
    assert execute(home, tmp_path, "-P", "-i", "-q", source=typed, path=home)["bits"] == reference["bits"]


def _typed(source: str) -> list[str]:
    lines: list[str] = []
    for line in source.splitlines():
        if not line.strip():
            continue
        if lines and lines[-1].startswith((" ", ")")) and not line.startswith((" ", ")")):
            lines.append("")
        lines.append(line)
    return [*lines, ""]


def test_a_notebook(home: Path, tmp_path: Path, reference: Result) -> None:
    """A namespace that is no module, output that is no file, cell after cell."""
    cells = f"""
import code, io, sys

class CellOutput(io.StringIO):
    def fileno(self):
        raise io.UnsupportedOperation("fileno")

real, sys.stdout = sys.stdout, CellOutput()
shell = code.InteractiveInterpreter({{"__name__": "__console__"}})
for cell in ({DEFINITIONS!r}, {program().removeprefix(DEFINITIONS)!r}):
    shell.runcode(compile(cell, "<cell>", "exec"))
text = sys.stdout.getvalue()
assert "pytorch-ddp: 2 ranks on CPU" in text
print(text, file=real, flush=True)
"""
    assert execute(home, tmp_path, "-P", "-c", cells, path=home)["bits"] == reference["bits"]


# With ranks that stay alive


def data(length: int = 21) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(length, 4, generator=torch.Generator().manual_seed(length))
    return x, (x.sum(dim=1) > 0).long()


def trainer(pool: RankPool, model: Any, **given: Any) -> Trainer:
    made = Trainer(model, num_processes=2, device="cpu", **{"batch_size": 4, "learning_rate": 0.05, **given})
    made.launcher = pool
    return made


def linear() -> nn.Module:
    return nn.Linear(4, 2)


def test_a_factory_is_built_alike_and_returned_trained(rank_pool: RankPool) -> None:
    seeded = {"seed": 3, "epochs": 2}
    by_factory = trainer(rank_pool, lambda: nn.Linear(4, 2), **seeded)
    by_factory.fit(data())
    with torch.random.fork_rng():
        torch.manual_seed(3)
        by_object = trainer(rank_pool, nn.Linear(4, 2), **seeded)
    by_object.fit(data())
    assert torch.equal(by_factory.model.weight, by_object.model.weight)


def test_a_second_fit_goes_on_and_the_first_ones_folder_goes(rank_pool: RankPool) -> None:
    made = trainer(rank_pool, linear())
    made.fit(data(), epochs=1)
    assert made._outcome is not None
    assert made._outcome.state is not None
    folder = Path(made._outcome.state.name)
    left = sorted(path.name for path in folder.iterdir() if not path.name.startswith(OWNER))
    assert left == ["result.json", "state", "sys_path.json"]
    second = made.fit(data(), epochs=1)
    assert not folder.exists()
    assert [epoch["epoch"] for epoch in second.epochs] == [1]
    assert second.steps["step"] == [4, 5, 6]
    last = Path(made._outcome.state.name)
    del made
    gc.collect()
    assert not last.exists()


def test_without_weights_a_second_fit_cannot_go_on(rank_pool: RankPool) -> None:
    model = linear()
    before = model.weight.detach().clone()
    made = trainer(rank_pool, model, return_weights="none")
    made.fit(data(), epochs=1)
    assert torch.equal(model.weight, before)
    with pytest.raises(UserError, match="return_weights"):
        made.fit(data(), epochs=1)


def test_a_failed_fit_leaves_the_trainer_as_it_was(rank_pool: RankPool) -> None:
    made = trainer(rank_pool, linear())
    made.fit(data(), epochs=1)
    state = {name: value.clone() for name, value in made.model.state_dict().items()}
    with pytest.raises(UserError, match="train_loader"):
        made.fit((data()[0], data(20)[1]), epochs=1)
    assert all(torch.equal(value, state[name]) for name, value in made.model.state_dict().items())
    assert made.fit(data(), epochs=1).steps["step"] == [4, 5, 6]
