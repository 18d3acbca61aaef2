"""For each group of `guards.toml` a fault that the tests of a push pass and a folded test detects."""

from __future__ import annotations

from functools import wraps
from importlib import import_module
from typing import Any

from tests.campaigns.reversions.table import Reversion

__all__ = ["GROUP_MUTANTS", "PREFIX"]

PREFIX = "group: "
"""Before a group's name where one name stands for a fault of either table."""


def _nothing(present: Any) -> Any:
    return lambda *args, **kwargs: None


def _nothing_found(present: Any) -> Any:
    return lambda *args: iter(())


def _asserts_nothing(test: Any) -> Any:
    """Takes the parameters of `test`, and passes."""

    @wraps(test)
    def passes(*args: Any, **kwargs: Any) -> None:
        return None

    return passes


def _stop_of_rank_0_alone(present: Any) -> Any:
    def run_rank(order: Any) -> Any:
        if import_module("ray.train").get_context().get_world_rank():
            import_module("distributed.training.stop_consensus").StopConsensus.request = _nothing(None)
        return present(order)

    return run_rank


def _own_checkpoint(present: Any) -> Any:
    return lambda run: present(run) | {"resume_from_checkpoint": True}


def _without_momentum(present: Any) -> Any:
    def holder(backend: Any) -> Any:
        found = present(backend)
        for variable in found.keras.variables if found is backend._given_optimizer else ():
            if variable.shape:
                variable.assign(0 * variable)
        return found

    return holder


def _in_float32_below_stage_3(present: Any) -> Any:
    def evaluate(backend: Any, batch: Any, num_samples: int) -> Any:
        found = present(backend, batch, num_samples)
        return found if backend.stage == 3 else {name: (a.float(), b) for name, (a, b) in found.items()}

    return evaluate


def _in_float32(present: Any) -> Any:
    def all_reduce(backend: Any, values: Any) -> Any:
        module = getattr(backend, "module", None)
        if module is not None and not module.training:
            torch = import_module("torch")
            values = torch.tensor(list(values), dtype=torch.float32).tolist()
        return present(backend, values)

    return all_reduce


def _means_of_windows(present: Any) -> Any:
    def evaluate_window(backend: Any, window: Any) -> Any:
        found = present(backend, window)
        return {name: (a / max(float(b), 1.0), min(float(b), 1.0)) for name, (a, b) in found.items()}

    return evaluate_window


def _all_but_one(present: Any) -> Any:
    def blocks(backend: Any, model: Any) -> Any:
        found = present(backend, model)
        return found if backend.config.compile == "none" else found[:-1]

    return blocks


def _state_of_two_ranks(present: Any) -> Any:
    def take(sharded: Any, shown: Any) -> None:
        if not sharded.partitioned and import_module("torch.distributed").get_rank() > 1:
            shown.state = {}
        present(sharded, shown)

    return take


def _without_first(present: Any) -> Any:
    def passed(stream: Any, samples: Any, start: int) -> Any:
        found = present(stream, samples, start)
        if stream.size == 1 and not start:
            next(found, None)
        return found

    return passed


def _generous(test: Any) -> Any:
    @wraps(test)
    def passes(suite: Any, kind: str, limit: float) -> None:
        test(suite, kind, 1000 * limit)

    return passes


def _own_weights(present: Any) -> Any:
    def place(backend: Any, model: Any) -> Any:
        backend._joined = False
        return present(backend, model)

    return place


def _another_order(present: Any) -> Any:
    def order(length: int, seed: int, *args: Any, **options: Any) -> Any:
        return present(length, seed + 1, *args, **options)

    return order


def _more_activations(present: Any) -> Any:
    def predict(*args: Any, **options: Any) -> Any:
        found = present(*args, **options)
        return import_module("dataclasses").replace(found, activations=int(1.1 * found.activations))

    return predict


def _every_other_step(present: Any) -> Any:
    def optimizer_step(backend: Any, *args: Any) -> Any:
        backend._steps = getattr(backend, "_steps", 0) + 1
        if backend.mesh is not None and backend._steps % 2 == 0:
            for parameter in backend.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        return present(backend, *args)

    return optimizer_step


def _half_of_it(present: Any) -> Any:
    return lambda mine, theirs: present(mine, theirs / 2)


_KIT = "tests/contracts/test_builtin_conformance.py::"
_C4 = "test_c4_a_second_fit_continues_at_the_exact_sample"
_C5 = "test_c5_every_validation_sample_counts_once"
_C8 = "test_c8_one_ranks_wish_to_stop_stops_all"

GROUP_MUTANTS = {
    "kit-ray": Reversion(
        "Ranks that Ray starts stop only where rank 0 requests it",
        "distributed_backends.ray.worker", "run_rank", _stop_of_rank_0_alone,
        f"{_KIT}TestRay::{_C8}",
    ),
    "ray": Reversion(
        "The history of a run does not count the restarts of its ranks by Ray",
        "distributed_backends.ray.launcher", "write_restarts", _nothing,
        "tests/backends/test_ray.py::test_ray_starts_all_ranks_anew_where_failures_are_allowed",
    ),
    "tuner": Reversion(
        "Under PBT, a trial continues from its own checkpoint instead of the better trial's",
        "distributed.operations.tuning.trial", "TrialRun._places", _own_checkpoint,
        "tests/backends/test_tuner.py::test_pbt_goes_on_from_the_better_trials_weights",
    ),
    "kit-tensorflow": Reversion(
        "A second fit of a Keras model loses the optimizer's momentum",
        "distributed_backends.tensorflow.backend", "TensorFlowBackend._holder", _without_momentum,
        f"{_KIT}TestTensorFlow::{_C4}",
    ),
    "kit-deepspeed": Reversion(
        "Under ZeRO below stage 3, validation sums are float32",
        "distributed_backends.deepspeed.backend", "DeepSpeedBackend.evaluate", _in_float32_below_stage_3,
        f"{_KIT}TestDeepSpeed1::{_C5}",
    ),
    "kit-horovod": Reversion(
        "Horovod reduces validation sums in float32",
        "distributed_backends.horovod.ranks", "RanksMixin.all_reduce", _in_float32,
        f"{_KIT}TestHorovod::{_C5}",
    ),
    "kit-mesh": Reversion(
        "Ranks that share a model average the validation means of windows, however many samples each has",
        "distributed.parallel.mesh_backend", "MeshBackend.evaluate_window", _means_of_windows,
        f"tests/contracts/test_mesh_conformance.py::TestPipeline::{_C5}",
    ),
    "kit-compilation": Reversion(
        "Under fsdp, compile=blocks leaves the last block out",
        "distributed_backends.fsdp.backend", "FSDPBackend.blocks", _all_but_one,
        f"{_KIT}TestFSDP::test_claimed_compilation_changes_the_last_bits_at_most",
    ),
    "transfers": Reversion(
        "ZeRO 1 and 2 load optimizer state on two ranks at most",
        "distributed_backends.deepspeed.state", "ShardedOptimizer.take", _state_of_two_ranks,
        "tests/campaigns/test_transfers.py::"
        "test_any_backend_goes_on_from_any_other[serial-on-1-deepspeed-1-on-3]",
    ),
    "mutants": Reversion(
        "The kit's limits for float32 are a thousand times as large",
        "distributed.testing.contracts.step", "StepContracts.test_c2_parity_in_float32", _generous,
        "tests/campaigns/test_mutants.py::test_mutant_is_caught[RoundsToHalf]",
    ),
    "reversions": Reversion(
        "The test of a single class asserts nothing",
        "tests.training.test_task_checks", "test_a_cross_entropy_of_one_class_is_refused", _asserts_nothing,
        "tests/campaigns/test_reversions.py::test_a_fault_that_is_put_back_is_found[one class]",
    ),
    "zoo": Reversion(
        "A stream that a single process reads loses its first sample",
        "distributed.data.stream", "DealtStream._passed", _without_first,
        "tests/campaigns/test_zoo.py::test_a_model_is_trained_exactly_or_refused[serial-IterableDataset]",
    ),
    "kills": Reversion(
        "The campaign of kills misses a restart that passes over the newest checkpoint",
        "distributed.testing.kill_runs", "_check_going_on", _nothing,
        "tests/campaigns/test_kills.py::test_what_is_broken_is_found",
    ),
    "launchers": Reversion(
        "Under DeepSpeed, ranks that another launcher started keep weights of their own",
        "distributed_backends.deepspeed.backend", "DeepSpeedBackend.place", _own_weights,
        "tests/backends/test_deepspeed_state.py::test_ranks_of_torchrun_are_joined",
    ),
    "elastic-hosts": Reversion(
        "Nothing is printed when an elastic run continues with another number of ranks",
        "distributed.resilience.elastic", "Elastic._announce", _nothing,
        "tests/resilience/test_elastic.py::test_four_hosts_three_two_and_four_again",
    ),
    "third-party": Reversion(
        "The oracle of the kit reads the samples in another order",
        "distributed.testing.oracle", "sample_order", _another_order,
        "tests/registry/test_third_party.py::test_it_passes_the_kit",
    ),
    "measured-memory": Reversion(
        "Activations are predicted a tenth too large",
        "distributed.planner.estimates.memory", "predict_memory", _more_activations,
        "tests/operations/planning/test_measured_memory.py::test_predictions_are_within_one_percent[qwen2]",
    ),
    "examples": Reversion(
        "Ranks that share a model lose the gradients of every other step",
        "distributed.parallel.mesh_backend", "MeshBackend.optimizer_step", _every_other_step,
        "tests/test_examples.py::test_a_mixtral_learns_the_same_when_ranks_divide_its_experts",
    ),
    "gpu-dry-run": Reversion(
        "A check of kernels on GPUs compares with half of the reference",
        "tests.gpu.kernels", "relative", _half_of_it,
        "tests/gpu/test_dry_run.py::test_every_row_passes_but_those_that_need_a_gpu",
    ),
    "cluster": Reversion(
        "Preflight reports no slow link",
        "distributed.operations.doctor.check_hosts", "_links", _nothing_found,
        "tests/cluster/test_preflight.py::test_healthy_hosts_pass_and_a_slow_one_is_named",
    ),
}  # fmt: skip
"""Group -> fault; `caught_by` is one of the tests that a push folds."""
