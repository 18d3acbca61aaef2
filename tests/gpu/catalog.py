"""Every check, the most important first; times never pass or fail."""

from __future__ import annotations

from tests.gpu.checks import Check, Row
from tests.gpu.mesh_cases import MESHES, SECONDS

__all__ = ["CHECKS"]

_BACKENDS = ("serial", "pytorch-ddp", "fsdp", "deepspeed")
_CODECS = ("fp16", "bf16", "int8", "fp8", "top-k", "random-k", "powersgd")
_KERNELS = ("dilated", "block-sparse", "ring", "sketched", "sketched-frozen", "triton")
_MODELS = ("qwen2", "mistral", "phi")
_RUNS = (
    "serial",
    "ddp",
    "fsdp",
    "fsdp-full",
    "zero-1",
    "zero-2",
    "zero-3",
    "tensor",
    "context",
    "gpipe",
    "1f1b",
)
_SHARED = "two ranks over gloo, sharing the GPU where there is one"
_ALL = "as many ranks as GPUs, over the default transport"


def _needs(backend: str) -> tuple[str, ...]:
    return ("deepspeed",) if backend == "deepspeed" else ()


def _layouts() -> list[tuple[str, str, str]]:
    """(row suffix, backend, transport) of everything that trains."""
    found = []
    for backend in _BACKENDS:
        found.append((backend, backend, "default"))
        if backend != "serial":
            found.append((f"{backend}/gloo", backend, "gloo"))
    return found


def _training(group: str, target: str, unit: str, limit: float, meaning: str, seconds: float) -> list[Check]:
    checks = []
    for suffix, backend, transport in _layouts():
        where = _SHARED if transport == "gloo" else "one process" if backend == "serial" else _ALL
        row = Row(f"{group}/{suffix}", unit, limit, f"{meaning}; {where}")
        options = {"backend": backend, "transport": transport}
        modules = (*_needs(backend), *(("pytest", "rich") if group == "kit" else ()))
        checks.append(Check(row.name, target, (row,), options, modules, seconds, _is_dry(group, suffix)))
    return checks


def _is_dry(group: str, suffix: str) -> bool:
    """Ranks that have to be started, which takes most of the time, are few in a dry run."""
    if group == "resume":
        return suffix in ("serial", "pytorch-ddp/gloo")
    return suffix != "deepspeed/gloo"


def _precision() -> list[Check]:
    checks = []
    for name in ("bf16", "fp16"):
        meaning = (
            f"relative distance of the last losses in {name} from those of a hand-written loop under autocast"
            " (fp16: with a gradient scaler); the loss has to fall"
        )
        row = Row(f"precision/{name}", "of theirs", 0.001, meaning)
        checks.append(
            Check(row.name, "tests.gpu.precision:half", (row,), {"precision": name, "transport": "gloo"})
        )
    row = Row(
        "precision/scaler",
        "steps",
        0,
        "fp16: distance of the number of skipped steps from 1, the one whose gradient is infinite;"
        " NaN if a weight is not finite",
    )
    checks.append(Check(row.name, "tests.gpu.precision:scaler", (row,), {"transport": "gloo"}))
    return checks


def _kernel(name: str) -> Check:
    other = "nn.Linear" if name in ("sketched", "sketched-frozen", "triton") else "SDPA"
    rows = (
        Row(
            f"kernel/{name}/error",
            "of bound",
            1.0,
            "largest error against the float64 oracle over the dtype's bound (outputs and gradients)",
            gpu_only=name == "triton",
        ),
        Row(
            f"kernel/{name}/time",
            f"of {other}",
            None,
            f"median time over that of {other}, in turns",
            gpu_only=name == "triton",
        ),
        Row(f"kernel/{name}/memory", f"of {other}", None, f"peak memory over that of {other}", gpu_only=True),
    )
    requires = ("triton",) if name == "triton" else ()
    options = {"name": name}
    return Check(f"kernel/{name}", "tests.gpu.kernels:kernel", rows, options, requires, alone=True)


def _dilated() -> list[Check]:
    """Dilated attention at LongNet's segments, 2048 and rate 1, then twice both up to the whole length."""
    checks = []
    for thousands in (8, 32, 64):
        for width in (64, 128):
            name = f"kernel/dilated/{thousands}k/{width}"
            what = f"of causal SDPA (flash), bf16, 8 heads of {width}, forward and backward"
            rows = (
                Row(f"{name}/time", "of flash", None, f"time over that {what}"),
                Row(f"{name}/memory", "of flash", None, f"peak memory over that {what}", gpu_only=True),
            )
            options = {"length": 1024 * thousands, "width": width}
            checks.append(Check(name, "tests.gpu.dilated:length", rows, options, alone=True))
    what = "of a position at 256k over that at 32k, with the branches of 32k"
    rows = (
        Row("kernel/dilated/growth/time", "ratio", None, f"time {what}"),
        Row("kernel/dilated/growth/memory", "ratio", None, f"peak memory {what}", gpu_only=True),
    )
    options = {"short": 32 * 1024, "long": 256 * 1024}
    checks.append(Check("kernel/dilated/growth", "tests.gpu.dilated:growth", rows, options, alone=True))
    meaning = "largest error over the dtype's bound, fp16 and bf16, in both layouts of heads, against float64"
    row = Row("kernel/dilated/halves/error", "of bound", 1.0, meaning)
    return [*checks, Check("kernel/dilated/halves", "tests.gpu.dilated:halves", (row,))]


def _block_sparse() -> list[Check]:
    """A tenth of the causal blocks of 64; and of blocks spread evenly, which share no larger tile."""
    checks = []
    for thousands, width, pattern in (
        (16, 64, "local"),
        (16, 128, "local"),
        (64, 64, "local"),
        (64, 128, "local"),
        (16, 64, "strided"),
    ):
        name = f"kernel/block-sparse/{thousands}k/{width}" + ("/strided" if pattern == "strided" else "")
        what = f"of causal SDPA (flash), bf16, 8 heads of {width}, density 0.1, forward and backward"
        rows = (
            Row(f"{name}/time", "of flash", None, f"time over that {what}"),
            Row(f"{name}/memory", "of flash", None, f"peak memory over that {what}", gpu_only=True),
        )
        options = {"length": 1024 * thousands, "width": width, "pattern": pattern}
        checks.append(Check(name, "tests.gpu.block_sparse:length", rows, options, alone=True))
    meaning = "largest error over the dtype's bound, fp16 and bf16, any mask of blocks, against float64"
    halves = Row("kernel/block-sparse/halves/error", "of bound", 1.0, meaning)
    meaning = "largest error over bf16's bound of a part of a softmax, as a slice on a ring is one"
    parts = Row("kernel/block-sparse/parts/error", "of bound", 1.0, meaning, gpu_only=True)
    return [
        *checks,
        Check("kernel/block-sparse/halves", "tests.gpu.block_sparse:halves", (halves,)),
        Check("kernel/block-sparse/parts", "tests.gpu.block_sparse:parts", (parts,)),
    ]


def _overhead() -> list[Check]:
    checks = []
    for milliseconds in (1, 5, 20):
        meaning = (
            f"time of a Trainer step over that of the hand-written loop, at about {milliseconds} ms a step,"
            " log steps included and ends of epochs not: median over pairs of blocks in one thread, with a"
            " 95 % interval"
        )
        row = Row(f"overhead/{milliseconds}ms", "ratio", None, meaning)
        options = {"milliseconds": milliseconds}
        checks.append(Check(row.name, "tests.gpu.speed:overhead", (row,), options, alone=True))
    meaning = (
        "milliseconds that the end of an epoch adds, without validation and checkpoint, at about 1 ms a step"
    )
    end = Row("overhead/epoch-end", "ms", None, meaning)
    return [*checks, Check(end.name, "tests.gpu.speed:epoch_end", (end,), alone=True)]


def _profiles() -> list[Check]:
    meanings = {
        "launches": "kernel launches",
        "synchronisations": "calls in which the host waits for the device",
        "copies": "calls of cudaMemcpyAsync and cudaMemcpy",
        "host": "microseconds of the host, the device idle before",
    }
    checks = []
    for milliseconds in (1, 5):
        name = f"profile/{milliseconds}ms"
        text = f"of a Trainer step beyond those of one by hand; the rest is in profile-{milliseconds}ms.txt"
        rows = tuple(
            Row(f"{name}/{kind}", "us" if kind == "host" else "calls", None, f"{meaning} {text}")
            for kind, meaning in meanings.items()
        )
        options = {"milliseconds": milliseconds}
        checks.append(Check(name, "tests.gpu.step_profile:step_profile", rows, options, alone=True))
    return checks


def _save(gigabytes: int) -> Check:
    meaning = f"stall of training during an asynchronous save of {gigabytes} GB over a synchronous one"
    row = Row(f"save/{gigabytes}gb", "ratio", None, meaning)
    options = {"gigabytes": float(gigabytes)}
    return Check(
        row.name, "tests.gpu.speed:save_stall", (row,), options, seconds=60 + 24.0 * gigabytes, alone=True
    )


def _memory() -> list[Check]:
    meaning = "peak memory of rank 0 in a training run; on one GPU two ranks over gloo share it"
    checks = []
    for backend in _BACKENDS:
        row = Row(f"memory/{backend}", "MiB", None, meaning, gpu_only=True)
        checks.append(
            Check(row.name, "tests.gpu.speed:peak_memory", (row,), {"backend": backend}, _needs(backend))
        )
    return checks


def _predicted_memory() -> list[Check]:
    meaning = "distance of the predicted peak from the measured one of memory/BACKEND, as a share of it"
    checks = []
    for backend in _BACKENDS:
        row = Row(f"predicted-memory/{backend}", "share", 0.05, meaning, gpu_only=True)
        options = {"backend": backend}
        checks.append(Check(row.name, "tests.gpu.predicted_memory:error", (row,), options, _needs(backend)))
    return checks


def _predicted_models() -> list[Check]:
    checks = []
    for model in _MODELS:
        for run in _RUNS:
            meaning = "distance of the predicted peak from that of a small model of transformers, as a share"
            row = Row(f"predicted-memory/{model}/{run}", "share", 0.05, meaning, gpu_only=True)
            options = {"model": model, "run": run}
            modules = ("transformers", *_needs("deepspeed" if run.startswith("zero") else ""))
            checks.append(Check(row.name, "tests.gpu.predicted_memory:of_model", (row,), options, modules))
    return checks


def _limits() -> list[Check]:
    meaning = (
        "batch_size: auto on a batch that does not fit: distance of the weights from those of a loop of small"
        " micro-batches, float64"
    )
    chosen = Row("auto-batch", "max abs", 1e-9, meaning, gpu_only=True)
    meaning = "what the report of an out-of-memory error does not say; its smaller micro-batch has to train"
    explained = Row("out-of-memory", "missing", 0, meaning, gpu_only=True)
    return [
        Check(chosen.name, "tests.gpu.memory_limits:chosen_batch", (chosen,), alone=True),
        Check(explained.name, "tests.gpu.memory_limits:explained_error", (explained,), alone=True),
    ]


def _codecs() -> list[Check]:
    meaning = "largest distance between weights trained with the codec on GPU ranks and on CPU ranks, float64"
    checks = []
    for name in _CODECS:
        for transport, where in (("default", _ALL), ("gloo", _SHARED)):
            suffix = name if transport == "default" else f"{name}/gloo"
            row = Row(f"codec/{suffix}", "max abs", 1e-9, f"{meaning}; {where}")
            options = {"codec": name, "transport": transport}
            dry = transport == "gloo" and name in ("int8", "top-k")
            checks.append(Check(row.name, "tests.gpu.codecs:parity", (row,), options, dry=dry))
    return checks


def _recorder() -> list[Check]:
    meaning = (
        "collectives of one NCCL rank that its Flight Recorder dump shows otherwise than they were called"
    )
    nccl = Row("recorder/nccl", "differences", 0, meaning, gpu_only=True)
    meaning = "what the report of a hang does not say of the collective that a rank has left out"
    hang = Row(
        "recorder/hang", "missing", 0, f"{meaning}; two ranks, over NCCL on two GPUs, otherwise over gloo"
    )
    return [
        Check(nccl.name, "tests.gpu.recorder:one_rank", (nccl,)),
        Check(hang.name, "tests.gpu.recorder:hang", (hang,)),
    ]


def _meshes() -> list[Check]:
    checks = []
    for mesh, case in MESHES.items():
        meaning = (
            "largest distance of weights and losses from those of serial on that device, float64:"
            f" {case.backend}, {case.ranks} ranks that are threads of one process (`launch: threads`),"
            f" model {case.model}"
        )
        row = Row(f"mesh/{mesh}", "max abs", 1e-9, meaning)
        modules = ("transformers",) if case.model == "llama" else ()
        checks.append(Check(row.name, "tests.gpu.meshes:parity", (row,), {"mesh": mesh}, modules, SECONDS))
    return checks


CHECKS: list[Check] = [
    *_training(
        "parity",
        "tests.gpu.training:parity",
        "max abs",
        1e-9,
        "largest distance between trained weights and those of the CPU oracle, float64",
        90,
    ),
    *_training(
        "resume",
        "tests.gpu.training:resume",
        "differences",
        0,
        "kill -9 in the middle of an epoch and resume: differences between the last checkpoint and that of"
        " the run left alone, compared by bits",
        150,
    ),
    *_meshes(),
    *_precision(),
    *_codecs(),
    *_recorder(),
    *[_kernel(name) for name in _KERNELS],
    *_dilated(),
    *_block_sparse(),
    *_training("kit", "tests.gpu.kit:conformance", "failed", 0, "failed tests of the conformance kit", 300),
    *_overhead(),
    *_profiles(),
    _save(1),
    *_memory(),
    *_predicted_memory(),
    *_predicted_models(),
    *_limits(),
    _save(10),
]
"""In the order in which they run."""
