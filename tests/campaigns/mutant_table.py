"""Every broken backend with the conformance test that is meant to catch it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from distributed.interfaces.backend_spec import BackendSpec
from distributed.registry.catalog import Catalog
from tests.campaigns import mutants as broken
from tests.campaigns import mutants_that_refuse_nothing as silent

__all__ = ["MUTANTS", "Mutant", "mutant_spec"]


@dataclass(frozen=True)
class Mutant:
    """A broken backend and the test that is meant to catch it.

    Attributes:
        kind: the backend's class.
        caught_by: name of the conformance test.
        arguments: the test's parameters by name.
    """

    kind: type[Any]
    caught_by: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name it is registered under."""
        return f"mutant-{self.kind.__name__}"


_PARITY = "test_c2_c3_parity_with_the_oracle"
_ONCE = "test_c3_every_sample_is_used_once_an_epoch"
_CLIPS = "test_c6_clips_the_whole_gradient_once"
_EVALUATES = "test_c5_every_validation_sample_counts_once"
_CONTINUES = "test_c4_a_second_fit_continues_at_the_exact_sample"
_SCHEDULES = "test_c7_schedules_count_optimizer_steps"
_REFUSES = "test_c11_exact_or_refused"
_PRECISION = "test_a_claimed_precision_is_used_and_stays_close"
_RECOMPUTES = "test_claimed_activation_checkpointing_changes_no_bit"

MUTANTS = [
    Mutant(broken.NeedsTheWholeBatch, "test_c1_global_batch_is_kept_on_any_number_of_ranks"),
    Mutant(broken.SumsGradients, _PARITY, {"accumulation": 1, "length": 24}),
    Mutant(broken.AveragesTwice, _PARITY, {"accumulation": 1, "length": 24}),
    Mutant(broken.AveragesMicroBatches, _PARITY, {"accumulation": 2, "length": 13}),
    Mutant(broken.ForgetsToReduce, _PARITY, {"accumulation": 1, "length": 24}),
    Mutant(broken.DividesByAccumulationTwice, _PARITY, {"accumulation": 2, "length": 24}),
    Mutant(broken.SkipsTheLastSync, _PARITY, {"accumulation": 2, "length": 24}),
    Mutant(broken.ReportsOneRanksLoss, _PARITY, {"accumulation": 1, "length": 24}),
    Mutant(broken.RoundsToHalf, "test_c2_parity_in_float32", {"kind": "sgd", "limit": 1e-6}),
    Mutant(broken.IgnoresTheTrueCount, "test_c2_masked_tokens_weigh_alike", {"accumulation": 2}),
    Mutant(broken.WeighsMeansBySamples, "test_c2_a_model_may_compute_its_own_loss"),
    Mutant(broken.DropsSamples, _ONCE),
    Mutant(broken.RepeatsTheFirstSlice, _ONCE),
    Mutant(broken.PadsTheLastBatch, _PARITY, {"accumulation": 1, "length": 23}),
    Mutant(broken.DropsTheRaggedBatch, _ONCE),
    Mutant(broken.LosesMomentum, _CONTINUES),
    Mutant(broken.ResumesAtTheEpochsStart, _CONTINUES),
    Mutant(broken.EvaluatesStandIns, _EVALUATES),
    Mutant(broken.ForgetsOtherRanksInEvaluation, _EVALUATES),
    Mutant(broken.ValidatesRankMeans, _EVALUATES),
    Mutant(broken.EvaluatesInFloat32, _EVALUATES),
    Mutant(broken.ClipsLocally, _CLIPS),
    Mutant(broken.ClipsEveryMicroBatch, _CLIPS),
    Mutant(broken.ClipsBeforeReduction, _CLIPS),
    Mutant(broken.ClipsScaledGradients, _PRECISION, {"precision": "fp16"}),
    Mutant(broken.ZeroesWhatIsNotFinite, "test_c6_c7_a_step_that_is_not_finite_is_left_out_by_all"),
    Mutant(broken.StepsTheScheduleTwice, _SCHEDULES),
    Mutant(broken.StepsTheSchedulePerMicroBatch, _SCHEDULES),
    Mutant(broken.ScalesTheRateByRanks, "test_c7_a_users_scheduler_steps_once_an_epoch"),
    Mutant(broken.StopsAlone, "test_c8_one_ranks_wish_to_stop_stops_all"),
    Mutant(broken.SavesOneRanksShare, "test_c9_checkpoints_resume_on_any_number_of_ranks"),
    Mutant(broken.RoundsWhatItLoads, "test_c9_checkpoints_resume_on_any_number_of_ranks"),
    Mutant(broken.DrawsWhenTrainingBegins, "test_c10_a_killed_run_ends_with_the_same_bits"),
    Mutant(silent.TrainsEveryModule, _REFUSES, {"habit": "norm-in-eval"}),
    Mutant(silent.SetsEveryMode, _REFUSES, {"habit": "norm-frozen-by-train"}),
    Mutant(silent.OverlooksMicroBatches, _REFUSES, {"habit": "renormalized-embedding"}),
    Mutant(silent.DiscardsWrites, _REFUSES, {"habit": "clamped-in-forward"}),
    Mutant(silent.OverlooksThawing, _REFUSES, {"habit": "thawed-layer"}),
    Mutant(silent.ComparesNoSettings, _REFUSES, {"habit": "rate-changed-by-rank-0"}),
    Mutant(silent.ForgetsHooks, _REFUSES, {"habit": "tensor-hook"}),
    Mutant(silent.CallsHooksInBackward, _REFUSES, {"habit": "clamping-hooks"}),
    Mutant(silent.StepsWithZeros, _REFUSES, {"habit": "idle-layer"}),
    Mutant(silent.MixesGradients, _REFUSES, {"habit": "branches"}),
    Mutant(silent.LosesAttributes, _REFUSES, {"habit": "parameter-attributes-factory"}),
    Mutant(silent.ReadsMemoryInOrder, _REFUSES, {"habit": "transposed"}),
    Mutant(broken.ComputesInFullPrecision, _PRECISION, {"precision": "bf16"}),
    Mutant(broken.RecomputesAnew, _RECOMPUTES),
    Mutant(broken.RecomputesNothing, _RECOMPUTES),
    Mutant(broken.NarrowsWhatItCompiles, "test_claimed_compilation_changes_the_last_bits_at_most"),
]
"""Every mutant with its test."""


def mutant_spec(mutant: Mutant, catalog: Catalog) -> BackendSpec:
    """The mutant as a backend like any other; ``pytorch-ddp`` says what it claims to do."""
    return replace(
        catalog.backend("pytorch-ddp"),
        name=mutant.name,
        target=f"{mutant.kind.__module__}:{mutant.kind.__name__}",
    )
