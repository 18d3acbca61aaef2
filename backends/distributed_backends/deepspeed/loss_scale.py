"""The loop's loss scale under fp16, by torch's rule or DeepSpeed's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distributed.config import DistributedConfig
from distributed_backends.deepspeed.section import half_of, native_config

__all__ = ["EngineScaler", "NativeScaler", "native_rule"]


class NativeScaler(torch.amp.GradScaler):
    """Moves by torch's rule, or by that of an object of DeepSpeed's, which `follow` sets."""

    _rule: Any = None

    def follow(self, rule: Any) -> None:
        """Start from the scale of `rule`, one of DeepSpeed's loss scalers, and move with it."""
        self._rule, self._init_scale = rule, float(rule.cur_scale)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        if self._rule is not None and new_scale is None:
            found = [state["found_inf_per_device"] for state in self._per_optimizer_states.values()]
            self._rule.update_scale(any(bool(x) for places in found for x in places.values()))
            new_scale = float(self._rule.cur_scale)
        super().update(new_scale)

    def state_dict(self) -> dict[str, Any]:
        """Torch's, in which another backend finds the finite steps since the last change, and DeepSpeed's."""
        state = super().state_dict()
        if getattr(self._rule, "dynamic", False):
            rule, window = self._rule, self._rule.scale_window
            finite = rule.cur_iter - rule.last_overflow_iter - 1
            state["finite_steps"] = finite
            if rule.delayed_shift > 1:  # another rule says nothing of how many overflows are left
                state["hysteresis"] = rule.cur_hysteresis
            state["_growth_tracker"] = max(0, finite - 1) % window
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rule, scale = self._rule, state_dict["scale"]
        if rule is not None and not rule.dynamic:
            scale = self._init_scale
        elif rule is not None:  # an overflow would take a scale below the least one up to it
            scale = max(scale, min(rule.min_scale, self._init_scale))
        super().load_state_dict(state_dict | {"scale": scale})
        if rule is not None and rule.dynamic:
            rule.cur_scale, rule.last_overflow_iter = scale, -1
            rule.cur_iter = state_dict.get("finite_steps", state_dict["_growth_tracker"])
            rule.cur_hysteresis = min(rule.delayed_shift, state_dict.get("hysteresis", rule.delayed_shift))


class EngineScaler(NativeScaler):
    """The loop's loss scale, where DeepSpeed unscales itself and reports an overflow."""

    overflowed = False

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return {found_inf.device: found_inf.fill_(float(self.overflowed))}

    def after_step(self, optimizer: torch.optim.Optimizer, overflowed: bool) -> None:
        """Grow or shrink the scale according to the step's overflow."""
        self.overflowed = overflowed
        self.unscale_(optimizer)
        self.update()


def native_rule(config: DistributedConfig, stage: int) -> Any:
    """DeepSpeed's own loss scaler for the section fp16 of its configuration; None if that is off."""
    if half_of(config) != "fp16":
        return None
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config

    section = {**native_config(config)["fp16"], "enabled": True}
    fp16 = DeepSpeedFP16Config(**section | {"loss_scale_window": config.scaler_growth_interval})
    moves = fp16.dynamic_loss_scale_args() | {"init_scale": config.scaler_init_scale}
    if stage == 0:  # DeepSpeed's optimizer without ZeRO knows no hysteresis, and continues at the least scale
        moves |= {"delayed_shift": 1, "raise_error_at_min_scale": False}
    return CreateLossScaler(torch.float16, fp16.loss_scale, fp16.loss_scale == 0, moves)
