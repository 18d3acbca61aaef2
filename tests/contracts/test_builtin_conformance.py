"""Every built-in backend passes the kit that third parties get."""

from __future__ import annotations

from typing import ClassVar

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
