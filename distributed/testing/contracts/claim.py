"""A backend has the capabilities that it claims; others are refused before a process starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.errors import UserError
from distributed.interfaces.callback import Callback, Context
from distributed.interfaces.history import History
from distributed.testing.checkpoint_compare import ExportOnLoad, state_differences
from distributed.testing.reference_problem import problem
from distributed.testing.suite import EXACT, Run, Suite

__all__ = ["ClaimContracts"]

_HALF_DIGITS = 0.02
"""Largest distance of ten steps in half precision from float32: bfloat16 keeps 8 bits."""


_ROUNDING = 1e-12
"""Largest distance of a few steps in float64 that are compiled from the plain ones."""

_LEVERS = {"activation_checkpointing": "full", "compile": "blocks"}
"""Settings of memory and speed, each with a value that is not the default."""


class _Runs(Callback):
    """Fail where Python ran the forward of a block another number of times in a step than `times`."""

    all_ranks = True

    def __init__(self, times: int) -> None:
        self.times = times

    def on_step_end(self, context: Context) -> None:
        for block in context.model.blocks:
            calls, block.calls = block.calls, 0
            # Another stage of a pipeline has a block without data.
            times = 0 if any(p.is_meta for p in block.parameters()) else self.times
            assert calls == times, f"Python ran a block {calls} times in a step"


class ClaimContracts(Suite):
    """Capabilities and checkpoints."""

    def test_what_is_not_claimed_is_refused(self, tmp_path: Path) -> None:
        """A configuration that needs an ability the backend does not claim fails in the plan."""
        claimed = self.capabilities
        needs: list[tuple[bool, dict[str, Any]]] = [
            (claimed.accumulation, {"gradient_accumulation_steps": 2}),
            (claimed.accumulation, {"global_batch_size": 4, "batch_size": 2}),
            (claimed.auto_batch, {"global_batch_size": 4, "batch_size": "auto"}),
            (claimed.clipping, {"gradient_clipping": 1.0}),
            (claimed.sync_batchnorm, {"sync_batchnorm": True}),
            (claimed.find_unused_parameters, {"find_unused_parameters": True}),
            (bool(claimed.zero_stages), {"zero_stage": 1}),
            (claimed.checkpoint, {"checkpoint_dir": str(tmp_path)}),
            *((field in claimed.levers, {field: value}) for field, value in _LEVERS.items()),
            # On the CPU: with too few GPUs the number of ranks would be refused first.
            (claimed.multi_process, {"num_processes": 2, "device": "cpu"}),
            *((name in claimed.precisions, {"mixed_precision": name}) for name in ("bf16", "fp16")),
        ]
        for able, fields in needs:
            if not able:
                trainer = self.trainer(self.bench.model(torch.float32), self.sizes[0], **fields)
                with pytest.raises(UserError, match=rf"'{re.escape(self.spec.label)}' cannot"):
                    trainer.fit(self.bench.data(*problem(4, torch.float32)), max_steps=1)

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_a_claimed_precision_is_used_and_stays_close(self, precision: str) -> None:
        """Half precision ends near float32, and not on it: that would be float32 by another name."""
        if precision not in self.capabilities.precisions:
            pytest.skip(f"does not claim {precision}")
        given = {"mixed_precision": precision, "scaler_init_scale": 1024.0}
        clip = 1.0 if self.capabilities.clipping else None
        run = Run(1, 10, dtype=torch.float32, rate=0.1, max_norm=clip, given=given)
        for ranks in {self.sizes[0], self.sizes[-1]}:
            found = self.compare(ranks, problem(25, torch.float32), run)
            assert 1e-7 < found.distance < _HALF_DIGITS
            assert found.history.num_skipped_steps == 0

    def test_claimed_activation_checkpointing_changes_no_bit(self) -> None:
        """With dropout in the blocks, the weights are the same to the bit, and the blocks run twice."""
        if "activation_checkpointing" not in self.capabilities.levers:
            pytest.skip("does not claim activation checkpointing")
        ranks = self.sizes[-1]
        plain = self._train_deep(ranks, 0.3)
        for mode in ("full", "selective", "offload"):
            found = self._train_deep(ranks, 0.3, _Runs(2), activation_checkpointing=mode)
            assert all(map(torch.equal, found, plain)), f"{ranks} ranks: {mode}"

    def test_claimed_compilation_changes_the_last_bits_at_most(self) -> None:
        """Compiled blocks give the same weights in float64 and do not run in Python; or they are refused."""
        if "compile" not in self.capabilities.levers:
            pytest.skip("does not claim to compile")
        # Full micro-batches alone: each shape costs a C++ compiler's seconds.
        ranks, samples = self.sizes[-1], 12
        plain = self._train_deep(ranks, 0.0, samples=samples)
        try:
            found = self._train_deep(ranks, 0.0, _Runs(0), samples=samples, compile="blocks")
        except UserError as error:
            if error.field != "compile":
                raise
            return
        assert max(float((a - b).abs().max()) for a, b in zip(found, plain, strict=True)) < _ROUNDING

    def _train_deep(
        self, ranks: int, dropout: float, *callbacks: Callback, samples: int | None = None, **given: Any
    ) -> list[torch.Tensor]:
        """The weights of `Deep` after a few steps; each rank has a sample in the last one of an epoch."""
        samples = 12 + ranks if samples is None else samples
        model = self.bench.deep_model(dropout)
        given |= {"optimizer": self.bench.optimizer("momentum"), "learning_rate": 0.1, "deterministic": True}
        trainer = self.trainer(model, ranks, batch_size=2, **given)
        trainer.callbacks = list(callbacks)
        trainer.fit(self.bench.data(*problem(samples)), max_steps=6)
        return self.bench.weights(model)

    def test_c9_checkpoints_resume_on_any_number_of_ranks(self, tmp_path: Path) -> None:
        """Saved in the middle of an epoch and resumed by more or fewer ranks, and (torch) by and
        from plain PyTorch, a run holds the saved bits by name and ends where the oracle does."""
        if not self.capabilities.checkpoint:
            pytest.skip("does not claim checkpoints")
        reference, _ = self.train_oracle(12, problem(25), Run(steps=11, optimizer="momentum"))
        for index, (first, second) in enumerate(self._ways()):
            folder, loaded = str(tmp_path / str(index)), str(tmp_path / f"loaded-{index}")
            saved = self._train_part(first, 5, folder)[1].checkpoint or ""
            model, _ = self._train_part(second, 11, folder, ExportOnLoad(loaded))
            changed = state_differences(saved, str(Path(loaded, Path(saved).name)))
            assert not changed, f"saved by {first}, loaded by {second}: {'; '.join(changed)}"
            off = self.distance(model, reference)
            assert self.lossy or off < EXACT, f"saved by {first}, resumed by {second}: {off:.1e}"

    def _ways(self) -> list[tuple[tuple[str, int], tuple[str, int]]]:
        few, many = (self.backend, self.sizes[0]), (self.backend, self.sizes[-1])
        ways = [(many, few), (few, many)] if few != many else [(few, few)]
        if self.spec.framework == "torch" and self.backend != "serial":
            ways += [(many, ("serial", 1)), (("serial", 1), many)]
        return ways

    def _train_part(
        self, who: tuple[str, int], until_step: int, folder: str, *callbacks: Callback
    ) -> tuple[Any, History]:
        """Train to `until_step`, from the newest checkpoint if there is one, and save."""
        backend, ranks = who
        model = self.bench.model(torch.float64)
        trainer = self.trainer(
            model,
            ranks,
            backend=backend,
            global_batch_size=12,
            gradient_accumulation_steps=1,
            optimizer=self.bench.optimizer("momentum"),
            learning_rate=0.3,
            checkpoint_dir=folder,
            checkpoint={"keep_last": None},
            resume_from_checkpoint=True,
        )
        trainer.callbacks = list(callbacks)
        return model, trainer.fit(self.bench.data(*problem(25)), max_steps=until_step)
