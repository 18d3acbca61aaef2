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


class TestHorovod(BackendConformance):
    backend = "horovod"
    sizes = (1, 2, 3)
