"""Every built-in backend passes the kit that third parties get."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest

from distributed.testing.conformance import BackendConformance
from distributed.testing.pool import RankPool


class TestSerial(BackendConformance):
    backend = "serial"
    sizes = (1,)


class TestPyTorchDDP(BackendConformance):
    backend = "pytorch-ddp"
    sizes = (1, 2, 3)


class TestFSDP(BackendConformance):
    backend = "fsdp"


class TestTensorFlow(BackendConformance):
    backend = "tensorflow"
    sizes = (1, 2, 3)


class TestHorovod(BackendConformance):
    backend = "horovod"
    sizes = (1, 2, 3)


class TestDeepSpeed0(BackendConformance):
    backend = "deepspeed"
    options: ClassVar = {"zero_stage": 0}


class TestDeepSpeed1(BackendConformance):
    backend = "deepspeed"
    options: ClassVar = {"zero_stage": 1}


class TestDeepSpeed2(BackendConformance):
    backend = "deepspeed"
    options: ClassVar = {"zero_stage": 2}


class TestDeepSpeed3(BackendConformance):
    backend = "deepspeed"
    options: ClassVar = {"zero_stage": 3}


class TestRay(BackendConformance):
    """Ranks in live workers of Ray Train."""

    backend = "ray"
    sizes = (1, 3)

    @pytest.fixture(scope="class")
    @classmethod
    def rank_pool(cls, ray_cluster: None) -> Iterator[RankPool]:
        pool = RankPool()
        with pytest.MonkeyPatch.context() as patch:
            # Here epochs take milliseconds, and Ray takes a report at each of its looks.
            patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.02")
            yield pool
        pool.close()
