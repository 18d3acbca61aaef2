"""Every built-in backend passes the kit that third parties get."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import ClassVar

import pytest

from distributed.testing.conformance import BackendConformance
from distributed.testing.rank_pool import RankPool
from distributed.testing.reference_problem import problem
from distributed.testing.suite import EXACT, Run

FEWER = range(1, 14)
"""Lengths of validation sets. Serial and DDP try more, which repeat what ranks can be left with."""


class OwnRanks(BackendConformance):
    """With ranks that end with the class: what the framework leaves running would slow others."""

    @pytest.fixture(scope="class")
    @classmethod
    def rank_pool(cls) -> Iterator[RankPool]:
        with closing(RankPool()) as pool:
            yield pool


class TestSerial(BackendConformance):
    backend = "serial"
    sizes = (1,)


class TestPyTorchDDP(BackendConformance):
    backend = "pytorch-ddp"


class TestFSDP(BackendConformance):
    backend = "fsdp"
    lengths = FEWER


class TestTensorFlow(OwnRanks):
    backend = "tensorflow"
    lengths = FEWER


class TestHorovod(OwnRanks):
    backend = "horovod"
    lengths = FEWER


class TestHorovodKeras(OwnRanks):
    """Keras models, which `tensorflow` trains on Horovod's ranks."""

    backend = "horovod"
    framework = "tensorflow"
    lengths = FEWER


class OnDeepSpeed(BackendConformance):
    backend = "deepspeed"
    lengths = FEWER


class TestDeepSpeed0(OnDeepSpeed):
    options: ClassVar = {"zero_stage": 0}


class TestDeepSpeed1(OnDeepSpeed):
    options: ClassVar = {"zero_stage": 1}


class TestDeepSpeed2(OnDeepSpeed):
    options: ClassVar = {"zero_stage": 2}


class TestDeepSpeed3(OnDeepSpeed):
    options: ClassVar = {"zero_stage": 3}


class TestRay(BackendConformance):
    """Ranks in live workers of Ray Train."""

    backend = "ray"
    sizes = (1, 3)
    lengths = FEWER

    @pytest.fixture(scope="class")
    @classmethod
    def rank_pool(cls, ray_cluster: None) -> Iterator[RankPool]:
        with pytest.MonkeyPatch.context() as patch, closing(RankPool()) as pool:
            # Here epochs take milliseconds, and Ray takes a report at each of its looks.
            patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.02")
            yield pool

    @pytest.mark.parametrize("inner", ["fsdp", "horovod"])
    def test_the_ranks_may_run_another_backend(self, inner: str) -> None:
        for accumulation, length in ((1, 25), (2, 13)):
            run = Run(accumulation, max_norm=0.05, given={"ray": {"inner": inner}})
            found = self.compare(3, problem(length), run)
            assert found.distance < EXACT
            assert found.history.steps["loss"] == pytest.approx(found.oracle.losses, abs=EXACT)
