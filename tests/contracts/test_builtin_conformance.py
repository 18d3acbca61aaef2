"""Every built-in backend passes the kit that third parties get."""

from __future__ import annotations

import pytest

from distributed.plugin_manager import missing_modules
from distributed.testing.conformance import BackendConformance


class TestSerial(BackendConformance):
    backend = "serial"
    sizes = (1,)


class TestPyTorchDDP(BackendConformance):
    backend = "pytorch-ddp"
    sizes = (1, 2, 3)


class TestFSDP(BackendConformance):
    backend = "fsdp"


@pytest.mark.skipif(bool(missing_modules(["tensorflow"])), reason="pip install tensorflow")
class TestTensorFlow(BackendConformance):
    backend = "tensorflow"
    sizes = (1, 2, 3)


@pytest.mark.skipif(bool(missing_modules(["horovod"])), reason="make horovod builds it")
class TestHorovod(BackendConformance):
    backend = "horovod"
    sizes = (1, 2, 3)
