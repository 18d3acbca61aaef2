"""Training goes on while a checkpoint is written, and what is written is the state of its step."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import nn

from distributed import Callback, Trainer
from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.filesystem import FileLayer
from distributed.checkpoint.reader import PortableReader, verify
from distributed.interfaces.callback import Context
from tests.campaigns.thread_ranks import on_ranks
from tests.training.test_saving import Run, configured, started


class HeldLayer(FileLayer):
    """Writes nothing before it is let go."""

    def __init__(self) -> None:
        self.go, self.reached = threading.Event(), threading.Event()

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        self.reached.set()
        assert self.go.wait(30)
        super().write(file, data)


class FullLayer(FileLayer):
    """A disk with no room."""

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "disk")


def held(directory: Path, **values: Any) -> tuple[Run, HeldLayer]:
    run, layer = started(directory, checkpoint={"every_n_steps": 2, **values}), HeldLayer()
    assert run.saver.checkpointer is not None
    run.saver.checkpointer.files = layer
    return run, layer


def steps(run: Run, number: int) -> None:
    for _ in range(number):
        end = run.step()
        run.saver.save_if_due(epoch_end=end)


def test_training_goes_on_and_what_is_saved_is_the_step_it_was_begun_at(tmp_path: Path) -> None:
    expected = started(tmp_path / "other")
    steps(expected, 2)
    run, layer = held(tmp_path / "mine")
    steps(run, 3)  # the third step changes weights, moments, schedule and progress in place
    assert layer.reached.wait(30)
    assert run.saver.checkpointer is not None
    assert run.saver.checkpointer.latest() is None
    assert not run.saver.has_finished()
    layer.go.set()
    path = run.finish_saving()
    assert path == run.history.checkpoint == str(tmp_path / "mine" / "step_00000002")
    assert verify(path) == []
    again = Run(configured(None))
    again.resumer.load(path)
    assert again.snapshot() == expected.snapshot()
    assert run.snapshot() != expected.snapshot()


def test_one_save_at_a_time(tmp_path: Path) -> None:
    """The second waits for the first to be committed before it copies anything."""
    run, layer = held(tmp_path)
    steps(run, 3)
    assert layer.reached.wait(30)
    thread = threading.Thread(target=steps, args=(run, 1))
    thread.start()  # step 4 is due, and the first save is held
    thread.join(0.2)
    assert thread.is_alive()
    assert run.history.checkpoint is None
    layer.go.set()
    thread.join(30)
    assert run.history.checkpoint == str(tmp_path / "step_00000002")
    assert run.finish_saving() == str(tmp_path / "step_00000004")


def test_without_it_a_save_is_there_on_return(tmp_path: Path) -> None:
    run = started(tmp_path, checkpoint={"every_n_steps": 2, "asynchronous": False})
    steps(run, 2)
    assert run.history.checkpoint == str(tmp_path / "step_00000002")
    assert run.finish_saving() is None


def test_a_failure_is_news_and_the_stated_number_of_them_stops_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = started(tmp_path, checkpoint={"every_n_steps": 1, "max_failures": 2})
    assert run.saver.checkpointer is not None
    run.saver.checkpointer.files = FullLayer()
    steps(run, 1)
    assert run.saver.pending is not None
    run.saver.pending[0]._written.wait(30)
    run.saver.pending[0]._thread.join(30)  # type: ignore[union-attr]
    assert run.saver.has_finished()
    with caplog.at_level(logging.WARNING, "distributed"):
        assert run.finish_saving() is None
    assert "checkpoint of step 1 not saved (failure 1 in a row): [Errno 28]" in caplog.text
    steps(run, 1)
    with pytest.raises(OSError, match="No space left"):
        run.finish_saving()
    run.saver.release()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("full", [0, 1, 2])
def test_one_ranks_failure_is_everybodys(full: int, tmp_path: Path) -> None:
    def work(rank: int, meeting: Any) -> Any:
        run = Run(configured(tmp_path, checkpoint={"every_n_steps": 1}), rank, meeting)
        run.saver.prepare()
        assert run.saver.checkpointer is not None
        if rank == full:
            run.saver.checkpointer.files = FullLayer()
        steps(run, 1)
        outcome = run.finish_saving(), run.saver.failures
        run.saver.release()
        return outcome

    assert on_ranks(3, work) == [(None, 1)] * 3
    assert os.listdir(tmp_path) == []


def test_a_run_that_fails_abandons_its_save(tmp_path: Path) -> None:
    """Nothing is committed after the end, and nothing lies about."""

    def work(rank: int, meeting: Any) -> None:
        run = Run(configured(tmp_path, checkpoint={"every_n_steps": 1}), rank, meeting)
        run.saver.prepare()
        assert run.saver.checkpointer is not None
        layer = HeldLayer()
        if rank == 1:
            run.saver.checkpointer.files = layer  # rank 0 has written, and waits for rank 1
        steps(run, 1)
        if rank == 0:
            assert run.saver.pending is not None
            run.saver.pending[0]._written.wait(30)
            run.saver.abandon()
            run.saver.release()
            assert os.listdir(tmp_path) == []
        meeting.barrier.wait()
        layer.go.set()
        run.saver.abandon()

    assert on_ranks(2, work) == [None, None]
    assert os.listdir(tmp_path) == []


def exported(run: Run) -> list[int]:
    """Where in memory the chunks of the next export lie."""
    assert run.saver.checkpointer is not None
    with run.saver.checkpointer._lent_buffers():
        return [chunk.data.data_ptr() for chunk in run.backend.export_state().chunks]


def test_the_memory_of_the_first_save_is_allocated_before_it(tmp_path: Path) -> None:
    expected = started(tmp_path / "other")
    steps(expected, 2)
    run, layer = held(tmp_path / "mine")
    buffers = run.saver.checkpointer._buffers  # type: ignore[union-attr]
    assert buffers is not None
    steps(run, 1)
    run.saver.reserve()
    assert buffers._reserving is not None
    buffers._reserving.join()
    reserved = [buffer.data_ptr() for buffer in buffers._kept]
    chunks = run.backend.export_state().chunks
    assert [chunk.data.numel() for chunk in chunks] == [buffer.numel() for buffer in buffers._kept]
    assert len(reserved) == len({*reserved}) > 2  # of weights and of the optimizer's state
    steps(run, 1)
    assert layer.reached.wait(30)
    assert [buffer.data_ptr() for buffer in buffers._kept] == reserved
    layer.go.set()
    run.finish_saving()
    path = run.saver.checkpointer.latest()  # type: ignore[union-attr]
    assert path is not None
    reader = PortableReader(path)
    for chunk in expected.backend.export_state().chunks:
        assert torch.equal(reader.read(chunk.key, chunk.name).view(-1), chunk.data)


def test_the_memory_of_a_save_serves_the_next_one_and_never_two_at_a_time(tmp_path: Path) -> None:
    run, layer = held(tmp_path)
    steps(run, 3)
    assert layer.reached.wait(30)
    kept = run.saver.checkpointer._buffers._kept  # type: ignore[union-attr]
    first = [buffer.data_ptr() for buffer in kept]
    assert not set(exported(run)) & set(first)  # they are being written
    layer.go.set()
    run.finish_saving()
    assert exported(run) == first
    run.model.double()  # another dtype, other buffers: of weight and bias
    assert len(set(exported(run)) - set(first)) == 2


# -- in a whole run --------------------------------------------------------------------------------


class Notes(Callback):
    """Writes down which checkpoints it was told of, and whether they were whole by then."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_checkpoint(self, context: Context, path: str) -> None:
        state = "whole" if not verify(path) else "torn"
        with self.path.open("a") as file:
            reserved = context.saver.reserved  # type: ignore[attr-defined]
            print(os.path.basename(path), context.world.rank, state, reserved, file=file)


@pytest.mark.parametrize("ranks", [1, 2])
def test_callbacks_are_told_of_each_checkpoint_once_it_is_there(ranks: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Linear(4, 2), global_batch_size=4, num_processes=ranks, device="cpu", log_every_n_steps=1,
        checkpoint_dir=tmp_path / "saved", checkpoint={"every_n_steps": 2},
        callbacks=[Notes(tmp_path / "notes")],
    )  # fmt: skip
    x = torch.randn(16, 4)
    history = trainer.fit((x, (x[:, 0] > 0).long()), epochs=2)
    told = (tmp_path / "notes").read_text().splitlines()
    assert told == [f"step_{step:08d} 0 whole True" for step in (2, 4, 6, 8)]
    assert history.checkpoint == PortableCheckpointer(str(tmp_path / "saved"), keep_last=None).latest()
    assert PortableReader(str(history.checkpoint)).step == 8
