"""MeshFramework: what the caller's process checks of a model that ranks divide between them."""

from __future__ import annotations

from typing import Any

from distributed.interfaces.plan import RunPlan
from distributed.training.torch_framework import TorchFramework

__all__ = ["MeshFramework"]


class MeshFramework(TorchFramework):
    """`TorchFramework` for backends that can have several ranks along other axes than ``data``."""

    def check_split(self, model: Any, plan: RunPlan) -> None:
        if not self.is_model(model):
            return
        # Imported only where it is needed: a mesh takes a while to import.
        if plan.dims.context > 1:
            from distributed.parallel.context_axis import attention_of

            attention_of(model, plan)
        if plan.dims.expert > 1:
            from distributed.parallel.expert_layers import check_experts

            check_experts(model, plan.dims.expert)
        if plan.dims.tensor > 1:
            self._check_layers(model, plan)

    def _check_layers(self, model: Any, plan: RunPlan) -> None:
        from distributed.parallel.tensor_plan import check_cuts, declared_plan, read_plan

        given = plan.config.parallel.tensor_plan
        cuts = read_plan(model, given or declared_plan(model), given=bool(given))
        check_cuts(model, cuts, plan.dims.tensor)
