"""Each fault as one function with its code before the repair, and the test that is meant to catch it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["REVERSIONS", "Reversion"]

Make = Callable[[Any], Any]
_REPOSITORY = Path(__file__).parents[3]
_ROOTS = (Path(), Path("backends"), Path("kernels"), Path("plugins"))


@dataclass(frozen=True)
class Reversion:
    """A fault, put back.

    Attributes:
        fault: what happens without a word.
        module: where the function is defined.
        name: the function, with its class if it has one.
        make: the present function -> the one that takes its place.
        caught_by: the test's id.
    """

    fault: str
    module: str
    name: str
    make: Make
    caught_by: str

    @property
    def file(self) -> str:
        """Path of `module` in the repository. Found by name: a search for its spec would import torch."""
        name = f"{self.module.replace('.', '/')}.py"
        (found,) = (path for path in (folder / name for folder in _ROOTS) if (_REPOSITORY / path).exists())
        return found.as_posix()

    def apply(self) -> None:
        """Replace the function, for the rest of this process."""
        owner: Any = import_module(self.module)
        *parts, last = self.name.split(".")
        for part in parts:
            owner = getattr(owner, part)
        present = vars(owner)[last]
        made = self.make(present.fget if isinstance(present, property) else present)
        setattr(owner, last, property(made) if isinstance(present, property) else made)


def _nothing(present: Any) -> Any:
    return lambda *args, **kwargs: None


def _empty(present: Any) -> Any:
    return lambda *args, **kwargs: ""


def _none_of(present: Any) -> Any:
    return lambda *args, **kwargs: {}


def _unchanged(present: Any) -> Any:
    return lambda plan: plan


def _without_group(present: Any) -> Any:
    def build(self: Any, *args: Any, group: Any = None, **options: Any) -> None:
        present(self, *args, **options)

    return build


def _as_any_trainer(present: Any) -> Any:
    return lambda self, task: import_module("distributed.trainer").Trainer._loader_batch_size(self, task)


def _drop_after_the_record(present: Any) -> Any:
    def log(self: Any, name: str, value: float) -> bool:
        logs, step = self.history.logs, self.state.progress.step
        if not (not self.state.open_epoch.steps and logs and logs[-1]["step"] == step):
            self._logged[name] = float(value)
        return False

    return log


def _hand_everything_to_the_script(present: Any) -> Any:
    return lambda args: [*args.unknown, *args.rest]


def _leave_unused_out(present: Any) -> Any:
    def reduce(self: Any, group: Any, members: Any, post_backward: Any, *args: Any) -> None:
        for number, member in members:
            self._used[number] = member._unsharded_param.grad is not None
        post_backward(*args)

    return reduce


def _evaluate_placeholders(present: Any) -> Any:
    def evaluate_window(self: Any, window: Any) -> Any:
        return present(
            self, window._replace(micro_batches=[m._replace(num_samples=max(m[1], 1)) for m in window[0]])
        )

    return evaluate_window


def _read_all_parameters(present: Any) -> Any:
    def build(self: Any, parameters: Any) -> None:
        present(self, parameters)
        self.unread = set()

    return build


_WRITES = "tests/training/test_callback_writes.py::"
_FITS = "tests/training/test_between_fits.py::"
_STREAMS = "tests/data/test_stream_checks.py::"
_LOADERS = "tests/data/test_loader_classes.py::"
_PLACEHOLDERS = "tests/data/test_placeholders.py::"
_SAMPLERS = "tests/data/test_samplers_on_ranks.py::"
_TASKS = "tests/training/test_task_checks.py::"

REVERSIONS = {
    "gather order": Reversion(
        "Under fsdp, ranks that call different blocks mix their weights, or end in an abort",
        "distributed.training.gather_order", "GatherOrder._compare", _nothing,
        "tests/training/test_gather_order.py::"
        "test_fsdp_refuses_blocks_that_ranks_do_not_all_call[experts-later]",
    ),
    "unused parameters": Reversion(
        "Under fsdp, gradients of different parameters are added if ranks use different ones",
        "distributed_backends.fsdp.sharded_model", "ShardedModel._reduce", _leave_unused_out,
        "tests/training/test_gather_order.py::"
        "test_fsdp_trains_parameters_that_only_some_ranks_or_steps_use[branches]",
    ),
    "streams of one rank": Reversion(
        "Half the samples of a stream that splits itself by rank are never used",
        "distributed.data.stream_reader", "StreamReader._compare", _nothing,
        f"{_STREAMS}test_a_stream_of_one_ranks_samples_is_refused_before_the_first_step[ByRank-0]",
    ),
    "shuffle buffers": Reversion(
        "A run over a Hugging Face stream with a shuffle buffer loses samples when it resumes",
        "distributed.data.stream", "loses_samples", _nothing,
        f"{_STREAMS}test_a_run_over_a_shuffle_buffer_resumes_exactly",
    ),
    "placeholders in validation": Reversion(
        "A validation step sees samples twice, and their metrics count",
        "distributed.training.mixins.evaluation", "EvaluationMixin.evaluate_window", _evaluate_placeholders,
        f"{_PLACEHOLDERS}test_a_validation_step_sees_each_sample_once[pytorch-ddp-2-9-4]",
    ),
    "placeholders in training": Reversion(
        "A placeholder is the very batch that a training step has changed, NaN included",
        "distributed.training.placeholders", "stand_in", _unchanged,
        f"{_PLACEHOLDERS}test_a_shard_that_ends_early[fsdp-2]",
    ),
    "loader classes": Reversion(
        "What the class of a DataLoader does in __iter__ is left out",
        "distributed.data.recognition", "check_loader", _nothing,
        f"{_LOADERS}test_a_loader_with_an_iteration_of_its_own_is_refused[train_loader-Doubled-__iter__]",
    ),
    "lengths of streams": Reversion(
        "The length of a stream is ignored, so a decay has no end",
        "distributed.data.source", "Source._stream_length", _nothing,
        f"{_STREAMS}test_a_streams_length_is_the_end_of_a_decay",
    ),
    "drawn orders": Reversion(
        "A sampler that draws something else after a resume misses samples and repeats others",
        "distributed.data.sampler_order", "SamplerOrder._draw_again", _nothing,
        "tests/data/test_sampler_order.py::test_another_order_is_refused[phase-True]",
    ),
    "epochs of workers": Reversion(
        "Persistent workers read every epoch as the first",
        "distributed.data.samples", "Samples.begin", _nothing,
        "tests/data/test_loaders_on_ranks.py::test_persistent_workers_know_the_epoch",
    ),
    "shards of samplers": Reversion(
        "A sampler that draws the part of one rank trains a part of the data",
        "distributed.data.sampler_order", "SamplerOrder._compare", _nothing,
        "tests/data/test_loaders_on_ranks.py::test_a_sampler_that_shards_is_refused",
    ),
    "epochs of streams": Reversion(
        "A stream that counts its epochs begins with the first one when it resumes",
        "distributed.data.stream", "DealtStream._open_epochs", _nothing,
        f"{_SAMPLERS}test_a_stream_that_counts_its_epochs_continues[4-False-0]",
    ),
    "states with arguments": Reversion(
        "A stream's state_dict that requires arguments is called without",
        "distributed.data.stream", "_callable_with",
        lambda present: lambda part, name, *args: callable(getattr(part, name, None)),
        f"{_STREAMS}test_a_state_that_cannot_be_taken_alone_is_not_used",
    ),
    "regression": Reversion(
        "Float targets without a loss train cross-entropy",
        "distributed.training.task_checks", "check_default_target", _nothing,
        f"{_TASKS}test_float_targets_need_a_loss[False-TensorDataset]",
    ),
    "one class": Reversion(
        "The cross-entropy of a single class is always 0, and the run succeeds",
        "distributed.training.task_checks", "check_class_axis", _nothing,
        f"{_TASKS}test_a_cross_entropy_of_one_class_is_refused[None]",
    ),
    "late figures": Reversion(
        "What a callback logs after a step's record is dropped",
        "distributed.training.step_records", "StepRecords.log", _drop_after_the_record,
        "tests/training/test_history.py::test_what_is_logged_in_any_event_arrives_in_the_record_of_its_step[1-1]",
    ),
    "unknown flags": Reversion(
        "Flags that train does not know are handed to the script",
        "distributed.commands.corrections", "script_words", _hand_everything_to_the_script,
        "tests/commands/test_script_arguments.py::"
        "test_an_unknown_argument_is_an_error_with_the_corrected_line[words0-line0]",
    ),
    "unread parameters": Reversion(
        "A search reports the best value of a parameter that no trial reads",
        "distributed.operations.tuning.parameter_use", "SampledParameters.__init__", _read_all_parameters,
        "tests/operations/test_parameter_use.py::test_what_reads_a_parameter[nothing]",
    ),
    "profilers": Reversion(
        "torch.profiler around a fit that starts ranks prints an empty table, and no rank is profiled",
        "distributed.launch.run", "_profiled", _unchanged,
        "tests/data/test_seed_interface.py::test_torch_profiler_around_fit_profiles_every_rank",
    ),
    "groups": Reversion(
        "DistributedMultiheadDilatedAttention ignores a group without sequence_parallel",
        "distributed_kernels.attention.modules", "DistributedMultiheadDilatedAttention.__init__",
        _without_group,
        "tests/kernels/test_attention_modules.py::test_a_group_without_sequence_parallel_is_refused",
    ),
    "compiled factories": Reversion(
        "A factory of a compiled Keras model trains with another optimizer and rate",
        "distributed_backends.tensorflow.models", "check_compiled", _nothing,
        "tests/backends/test_tensorflow_refusals.py::test_a_factory_of_a_compiled_model_is_refused",
    ),
    "sampled batch sizes": Reversion(
        "A search samples batch sizes that its trials refuse, one by one",
        "distributed.trainers", "RayTrainer._loader_batch_size",
        _as_any_trainer,
        "tests/backends/test_ray.py::"
        "test_tune_samples_the_batch_size_and_optimizes_what_the_function_returns",
    ),
    "statistics after fit": Reversion(
        "Joined ranks without validation keep BatchNorm statistics of their own",
        "distributed.training.loop", "TrainingLoop._share_buffers", _nothing,
        "tests/communication/test_joined.py::test_torchrun",
    ),
    "weights between fits": Reversion(
        "A second fit on started ranks continues with the ranks' weights, not with those of the script",
        "distributed.training.torch_framework", "TorchFramework.digest", _empty,
        _FITS + "test_changes_between_fits_are_trained[pytorch-ddp-3]",
    ),
    "carried optimizers": Reversion(
        "Started ranks begin with fresh moments where a script gives an optimizer that has taken steps",
        "distributed.training.resuming", "Resumer.take_given", _nothing,
        _FITS + "test_an_optimizer_is_carried_on_to_another_trainer[pytorch-ddp-3]",
    ),
    "attributes of callbacks": Reversion(
        "What a callback keeps on started ranks does not return to the script",
        "distributed.launch.run", "take_objects", _nothing,
        _FITS + "test_what_a_callback_keeps_comes_back[pytorch-ddp]",
    ),
    "written weights": Reversion(
        "A callback on rank 0 changes weights, with which the other ranks do not train",
        "distributed.training.agreement", "WatchedSettings._read_digests", _nothing,
        _WRITES + "test_a_change_on_rank_zero_is_refused[clamp-pytorch-ddp-3-0]",
    ),
    "attributes on rank 0": Reversion(
        "A callback on rank 0 changes an attribute of the loss, with which the other ranks do not train",
        "distributed.training.agreement", "Settings.attributes", _none_of,
        _WRITES + "test_other_changes_on_rank_zero_are_refused[loss-pytorch-ddp-3-0]",
    ),
    "assigned data": Reversion(
        "FSDP trains on with the weights to whose ``.data`` others were assigned",
        "distributed_backends.fsdp.sharded_model", "follow_data", _nothing,
        _WRITES + "test_the_remedy_trains_as_one_process[assign-fsdp-2-0]",
    ),
    "Keras between fits": Reversion(
        "A second fit on started ranks drops what a script has changed of a Keras model or its optimizer",
        "distributed_backends.tensorflow.framework", "TensorFlowObjects.digest", _empty,
        "tests/backends/test_keras_between_fits.py::test_a_change_between_two_fits_is_trained[processes]",
    ),
}  # fmt: skip
"""Name -> fault."""
