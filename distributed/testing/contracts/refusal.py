"""Contract of refusal (C11): what a backend cannot train exactly is refused, never trained differently.

Each case brings a habit of real models or callbacks: parameters that only some samples use, hooks on
tensors, attributes of parameters, layers in evaluation mode. A backend passes a case if the trained
weights equal those of plain PyTorch, or if `fit` raises a `UserError` with a remedy.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from distributed.errors import UserError
from distributed.testing.oracle import oracle_fit
from distributed.testing.refusal_cases import CASES, CHANGE_AFTER, Case
from distributed.testing.suite import EXACT, Suite

__all__ = ["RefusalContracts"]

_BATCH_SIZE = 2
_LENGTH = 48


class RefusalContracts(Suite):
    """Cases of `distributed.testing.refusal_cases`: exact or refused."""

    @pytest.mark.parametrize("habit", CASES)
    def test_c11_exact_or_refused(self, habit: str) -> None:
        """The weights equal plain PyTorch's, or `fit` refuses. A backend of one process has nothing to
        refuse."""
        if self.spec.framework != "torch":
            pytest.skip("the cases are torch modules")
        case, ranks = CASES[habit], self.sizes[-1]
        if case.accumulation > 1 and not self.capabilities.accumulation:
            pytest.skip("does not claim accumulation")
        data = case.data(_LENGTH * case.accumulation)
        refusal: UserError | None = None
        try:
            trained = self._fit_case(case, ranks, data)
        except UserError as error:
            refusal = error
        if refusal is not None:
            assert self.capabilities.multi_process, f"one process can train this: {refusal}"
            assert refusal.remedy, f"a refusal needs a remedy: {refusal}"
            return
        reference = self._fit_plain(case, ranks, data)
        assert self.distance(trained, reference) < EXACT

    def _fit_case(self, case: Case, ranks: int, data: tuple[Tensor, Tensor]) -> nn.Module:
        built = None if case.factory else case.build()
        trainer = self.trainer(
            built or case.build,
            ranks,
            batch_size=_BATCH_SIZE,
            optimizer=case.optimizer(built) if built is not None else case.optimizer,
            gradient_accumulation_steps=case.accumulation,
            data={"shuffle": False},
            callbacks=case.callbacks(),
            **case.options,
        )
        trainer.fit(self.bench.data(*data), max_steps=2 * CHANGE_AFTER)
        trained: nn.Module = trainer.model
        return trained

    def _fit_plain(self, case: Case, ranks: int, data: tuple[Tensor, Tensor]) -> nn.Module:
        """The same steps in one process without any backend."""
        model = case.build()
        optimizer = case.optimizer(model)
        x, y = data
        size = _BATCH_SIZE * case.accumulation * self.slices(ranks)
        middle = CHANGE_AFTER * size
        options: Any = {"global_batch_size": size, "steps": CHANGE_AFTER, "shuffle": False}
        oracle_fit(model, optimizer, x[:middle], y[:middle], **options)
        case.change(model, optimizer)
        oracle_fit(model, optimizer, x[middle:], y[middle:], **options)
        return model
