"""Every built-in backend passes the kit that third parties get."""

from __future__ import annotations

from distributed.testing.conformance import BackendConformance


class TestSerial(BackendConformance):
    backend = "serial"
    sizes = (1,)


class TestPyTorchDDP(BackendConformance):
    backend = "pytorch-ddp"
    sizes = (1, 2, 3)


class TestFSDP(BackendConformance):
    backend = "fsdp"


class TestHorovod(BackendConformance):
    backend = "horovod"
    sizes = (1, 2, 3)
