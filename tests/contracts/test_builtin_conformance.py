"""Every built-in backend passes the kit that third parties get."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distributed.plugin_manager import missing_modules
from distributed.testing.conformance import EXACT, BackendConformance
from distributed.testing.pool import RankPool


class TestSerial(BackendConformance):
    backend = "serial"
    sizes = (1,)


class TestPyTorchDDP(BackendConformance):
    backend = "pytorch-ddp"
    sizes = (1, 2, 3)


class TestFSDP(BackendConformance):
    backend = "fsdp"


@pytest.mark.skipif(bool(missing_modules(["horovod"])), reason="make horovod builds it")
class TestHorovod(BackendConformance):
    backend = "horovod"
    sizes = (1, 2, 3)


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

    @pytest.mark.parametrize("inner", ["fsdp", "horovod"])
    def test_the_ranks_may_run_another_backend(self, inner: str) -> None:
        if inner == "horovod" and missing_modules(["horovod"]):
            pytest.skip("make horovod builds it")
        for accumulation, length in ((1, 25), (2, 13)):
            given = {"max_norm": 0.05, "ray": {"inner": inner}}
            off, history, seen = self.compare(3, accumulation, length, **given)
            assert off < EXACT
            assert history.steps["loss"] == pytest.approx(seen.losses, abs=EXACT)
