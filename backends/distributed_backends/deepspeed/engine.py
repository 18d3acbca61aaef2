"""DeepSpeed's engine, built for the one loop: its options, its accelerator, its process groups."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.comm import comm as deepspeed_comm
from deepspeed.ops import __compatible_ops__
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from deepspeed.runtime.zero.partition_parameters import Init, InsertPostInitMethodToModuleSubClasses
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import groups, logger
from pydantic import ValidationError
from torch import nn

from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.plan import BatchPlan
from distributed_backends.deepspeed.keys import CHECKPOINTING, FIELDS
from distributed_backends.deepspeed.native_config import AUTO, HALVES, NATIVE
from distributed_backends.deepspeed.options import bucket_size
from distributed_backends.deepspeed.section import ZeroSection, half_of, native_config, optimizer_place

_SHARED_MEMORY = "deepspeed_shm_comm"


class Root(nn.Module):
    """Root module: a function called through it finds gathered parameters, as in forward, so that a
    training step may use the model in other ways than calling it.

    Args:
        autocast: context of a forward pass, entered inside: DeepSpeed switches off what
            surrounds it.
    """

    def __init__(self, model: nn.Module, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.model = model
        self._autocast = autocast
        self.linear = nn.functional.linear

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        with self.own_linear(), self._autocast():
            return function(*args)

    def own_linear(self) -> AbstractContextManager[None]:
        """Use ZeRO 3's linear, in backward, too: activation checkpointing computes the forward again."""
        return linear_of(self.linear)


@contextmanager
def linear_of(function: Callable[..., Any]) -> Iterator[None]:
    """Within the block, `function` is torch's ``nn.functional.linear``."""
    before, nn.functional.linear = nn.functional.linear, function
    try:
        yield
    finally:
        nn.functional.linear = before


class Engine(DeepSpeedEngine):  # type: ignore[misc]
    """Ranks that we started have the same weights already, and a parameter without a dimension
    cannot travel as bytes, as DeepSpeed would send it."""

    def _broadcast_model(self) -> None:
        return None

    def destroy(self) -> None:
        """Release what DeepSpeed holds. Stage 3 keeps the modules in two tables of the whole process."""
        super().destroy()
        if self.module in FWD_MODULE_STACK:
            del FWD_MODULE_STACK[FWD_MODULE_STACK.index(self.module) :]
        for method in vars(PartitionedParameterCoordinator).values():
            for cell in getattr(method, "__closure__", None) or ():
                if hasattr(cell.cell_contents, "cache_clear"):
                    cell.cell_contents.cache_clear()


class WideEngine(Engine):
    """For float64 weights, which DeepSpeed would reduce and step in float32, or not at all."""

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        if not self.zero_optimization():  # the optimizer is left alone only where this returns float32
            return torch.float32, torch.float32
        return torch.float64, torch.float64

    @property
    def communication_data_type(self) -> torch.dtype:
        return torch.float64

    def _reduce_non_expert_gradients(self, grads: list[Any], elements_per_buffer: int) -> None:
        group = groups._get_sequence_data_parallel_group()
        self.allreduce_no_retain(grads, group, elements_per_buffer, self.dp_world_size)


def engine_options(
    config: DistributedConfig, batch: BatchPlan, stage: int, weights: torch.dtype, numel: int
) -> dict[str, Any]:
    """DeepSpeed's options: the user's own, overridden where the loop decides.

    Args:
        weights: dtype of the parameters that the engine holds.
        numel: number of elements of the trainable parameters.
    """
    options: dict[str, Any] = without_auto(native_config(config))
    for name in ("optimizer", "gradient_clipping", "data_types", *HALVES, CHECKPOINTING):
        options.pop(name, None)
    section, zero = ZeroSection.of(config), options.setdefault("zero_optimization", {})
    zero["stage"] = stage
    # DeepSpeed allocates all of a bucket, whatever the model's size.
    zero["reduce_bucket_size"] = bucket_size(zero.get("reduce_bucket_size"), numel)
    for key, where in (
        ("offload_optimizer", optimizer_place(config)),
        ("offload_param", section.offload_parameters),
    ):
        if where != "none":
            # Page-locked memory speeds up copies to a GPU; without one there is none to be had.
            pinned = config.device != "cpu" and torch.cuda.is_available()
            zero[key] = {"pin_memory": pinned, **zero.get(key, {}), "device": where}
    if weights is torch.float64:
        zero["reduce_scatter"] = False  # DeepSpeed's own takes nothing wider than float32
    elif weights in (torch.bfloat16, torch.float16):
        # The loop's scaler scales.
        own = {"check_grad_overflow": True} if weights is torch.bfloat16 else {"loss_scale": 1}
        options["bf16" if weights is torch.bfloat16 else "fp16"] = {"enabled": True, **own}
    return {
        **options,
        "zero_allow_untested_optimizer": True,  # see `check_weights`
        "zero_force_ds_cpu_optimizer": False,
        "train_batch_size": batch.global_batch_size,
        "train_micro_batch_size_per_gpu": batch.batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "gradient_clipping": 0.0,  # set at each step
    }


def without_auto(tree: Any) -> Any:
    """A copy without what is left to the other side."""
    if isinstance(tree, dict):
        return {key: without_auto(value) for key, value in tree.items() if value != AUTO}
    return tree


def check_reading(config: DistributedConfig, stage: int) -> None:
    """Refuse what DeepSpeed's own classes refuse, or read in another way than this run does."""
    if getattr(config, NATIVE) is None:
        return
    sizes = {"train_batch_size": None, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    asked = without_auto(native_config(config))
    if half := half_of(config):
        asked[half]["enabled"] = True
    read = checked(asked | sizes)
    pairs: dict[str, tuple[float, Any]] = {"zero_optimization.stage": (int(read.zero_config.stage), stage)}
    if read.float16_config.enabled:
        pairs["fp16.initial_scale_power"] = (
            read.float16_config.initial_dynamic_scale(),
            config.scaler_init_scale,
        )
        pairs["fp16.loss_scale_window"] = (
            read.float16_config.loss_scale_window,
            config.scaler_growth_interval,
        )
    for path, (theirs, ours) in pairs.items():
        if theirs != ours and config.origin(FIELDS[path]) == NATIVE:
            raise UserError(
                f"DeepSpeed reads {theirs}, and this run {ours}",
                field=f"{NATIVE}.{path}",
                remedy="Set it there",
            )


def build_engine(
    root: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: dict[str, Any],
    device: str,
    weights: torch.dtype,
    kinds: tuple[type[Engine], type[WideEngine]] = (Engine, WideEngine),
) -> Any:
    """DeepSpeed's engine around `root`; `optimizer` stays the object that holds the groups.

    Args:
        kinds: classes of the engine; the second is for float64.
    """
    wide = weights is torch.float64
    linear = nn.functional.linear
    # Where to compute is decided already; DeepSpeed would take the launcher's LOCAL_RANK for it.
    place = SimpleNamespace(device_rank=int(device.partition(":")[2] or 0))
    gc.freeze()  # stage 3 collects garbage, and would walk all that the frameworks hold
    try:
        with _without_broadcast(), _own_shard_type(weights), _wide_masters() if wide else nullcontext():
            engine: Any = kinds[wide](
                args=place,
                model=root,
                optimizer=optimizer,
                dist_init_required=False,
                config=options,
                config_class=checked(options),
                dont_change_device=True,
            )
        # ZeRO-3 replaces it for the whole process; the root, or an engine without one, does so while it runs.
        (root if isinstance(root, Root) else engine).linear = nn.functional.linear
    finally:
        nn.functional.linear = linear
        gc.unfreeze()
    return engine


def checked(options: dict[str, Any]) -> Any:
    """DeepSpeed's configuration of `options`, or its refusal as a UserError."""
    try:
        return DeepSpeedConfig(options)
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        found: Any = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else {}
        place = ".".join(map(str, found.get("loc", ())))
        raise UserError(
            f"DeepSpeed refuses it: {found.get('msg', error)}",
            field=f"deepspeed_config ({place})" if place else NATIVE,
            got=found.get("input"),
        ) from None


def _is_relevant(record: logging.LogRecord) -> bool:
    """Not what is checked or counted here: optimizers that are not DeepSpeed's, steps skipped under fp16."""
    message = record.getMessage()
    return "untested optimizer" not in message and "OVERFLOW! Skipping step" not in message


@contextmanager
def _without_broadcast() -> Iterator[None]:
    """Stage 3 sends each parameter as bytes before it cuts it: see `Engine`."""
    cut = Init._zero_init_param

    def convert(self: Any, parameter: nn.Parameter) -> None:
        self._convert_to_deepspeed_param(parameter)
        parameter.partition()  # type: ignore[attr-defined]

    Init._zero_init_param = convert
    try:
        yield
    finally:
        Init._zero_init_param = cut


@contextmanager
def _wide_masters() -> Iterator[None]:
    """Let the weights that a ZeRO optimizer steps be float64: DeepSpeed knows no such option."""
    choose = ZeROOptimizer._configure_master_weights
    ZeROOptimizer._configure_master_weights = lambda *args, **options: (
        choose(*args, **options) and torch.float64
    )
    try:
        yield
    finally:
        ZeROOptimizer._configure_master_weights = choose


@contextmanager
def _own_shard_type(weights: torch.dtype) -> Iterator[None]:
    """Give ZeRO 3 the type of the parameters, which DeepSpeed derives from the device instead.

    Its expression binds ``or`` before ``if``: where the accelerator claims fp16, as CPUs with AVX512-FP16
    and GPUs do, float64 is refused; elsewhere every model counts as bfloat16, and buffers that it wants
    in float32 are converted, from float64, too.
    """
    choose = InsertPostInitMethodToModuleSubClasses._set_dtype
    # float64 is not on its list; float32 means that no buffer is converted.
    accepted = torch.float32 if weights is torch.float64 else weights
    InsertPostInitMethodToModuleSubClasses._set_dtype = lambda init, config, dtype: setattr(
        init, "dtype", accepted
    )
    try:
        yield
    finally:
        InsertPostInitMethodToModuleSubClasses._set_dtype = choose


def attach_process_group(device: str) -> None:
    """Let DeepSpeed use `device` and the current process group.

    DeepSpeed may still hold an earlier, destroyed group.
    """
    # torch renames collectives that DeepSpeed calls by their old names.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    logger.addFilter(_is_relevant)
    kind = device.partition(":")[0]
    if get_accelerator().device_name() != kind:
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
        from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

        set_accelerator(CPU_Accelerator() if kind == "cpu" else CUDA_Accelerator())
    if groups._WORLD_GROUP not in dist.distributed_c10d._world.pg_map:
        _forget_groups()
    # A kernel for inference, which would be compiled now.
    usable = __compatible_ops__.get(_SHARED_MEMORY)
    __compatible_ops__[_SHARED_MEMORY] = False
    try:
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, dist_init_required=False)
    finally:
        __compatible_ops__[_SHARED_MEMORY] = usable


def _forget_groups() -> None:
    """Drop what DeepSpeed remembers of process groups that were destroyed."""
    deepspeed_comm.cdb = None
    groups._WORLD_GROUP = None
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    groups._DATA_PARALLEL_GROUP = None
    for table in (
        groups._EXPERT_PARALLEL_GROUP,
        groups._EXPERT_DATA_PARALLEL_GROUP,
        groups._ALL_TO_ALL_GROUP,
    ):
        table.clear()
