"""The kit's tests of the backend that `kit` names; not collected by themselves."""

from __future__ import annotations

import pytest

from distributed.testing.conformance import BackendConformance
from tests.gpu.kit import current
from tests.gpu.ranks import shared_pool


@pytest.mark.starts_processes
class TestBackend(BackendConformance):
    """Every contract, on the device under test."""

    @pytest.fixture(autouse=True)
    def _use_pool(self) -> None:
        case = current()
        self.pool, self.backend, self.sizes = shared_pool(), case.backend, case.sizes
        self.options, self.lengths = case.options, case.lengths
