"""Collect every error and warning of the program from the source.

A message is a call of one of the error classes below, or of a logger's ``warning``. Inserted values are
shown as an ellipsis. `Message.key`, the constant text that a message begins with, is what a reader can
search for, and what `docs/troubleshooting.md` uses.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docs.site.markdown import code, table

__all__ = ["DYNAMIC", "Message", "collect", "messages_page"]

ROOT = Path(__file__).parents[2]
GAP = "…"
_PACKAGES = ("distributed", "backends", "plugins", "kernels")
_ERRORS = {"UserError", "WorkerError", "KernelError", "CostlyError"}
# Internal elsewhere; in these folders they reach the user, directly or as the text of a UserError.
_ALSO = {
    "distributed/config": {"ValueError"},
    "backends/distributed_backends/fsdp/section": {"ValueError"},
    "distributed/training": {"RuntimeError", "OSError"},
}
_KIT = ("rank_pool", "test_conformance", "workbench")

DYNAMIC = {
    "distributed/commands/parser.py": "text of Python's argparse",
    "distributed/config/validation_errors.py": "text of a field's check, which is listed by itself",
    "distributed/operations/deploy/job.py": "text of the plan, for a run that is not started here",
    "distributed/resilience/failure_reports.py": "cause of a rank's failure",
    "distributed/parallel/context_axis.py": "text of a KernelError",
    "distributed/training/last_batch.py": "what a smaller global batch lacks",
    "distributed/training/step_records.py": "a non-finite loss, with the text of on_nan=stop",
    "distributed/operations/tuning/trial_record.py": "cause of a trial's failure",
    "backends/distributed_backends/tensorflow/objective.py": "text of Keras",
    "plugins/distributed_plugins/sketch_sync.py": "text of a KernelError",
}
"""Files with a message without constant text, and the source of its text."""

_RUN_TIME_VALUES = {
    "', '.join((f'{name} ({count})' for name, count in present.most_common(12)))": "classes in the model",
    "', '.join((name for name, there in built.items() if there))": (
        "transports that this Horovod was built with"
    ),
    "', '.join((str(n) for n in range(1, ranks + 1) if ranks % n == 0))": "divisors of the number of ranks",
    "', '.join(['search_space', *_OPTIONS])": "search_space, and the arguments of DistributedTuner",
    "', '.join(able) or None": "backends with ZeRO, such as deepspeed",
    "', '.join(allowed)": "the values in the flag's help",
    "', '.join(found) or 'none, the model has no such layer'": (
        "names of the model's nn.Linear and nn.Conv2d layers"
    ),
    "', '.join(kinds)": "job, jobset or trainjob; mpijob for horovod; rayjob for ray",
    "', '.join(layouts)": "zigzag, contiguous",
    "', '.join(map(str, _FLOATS))": "float16, bfloat16, float32, float64",
    "', '.join(map(str, sorted(found)))": "numbers of ranks among which the global batch divides",
    "', '.join(names)": "metrics that the trials reported",
    "', '.join(self._started) or None": "names of started timers",
    "', '.join(sorted((s.name for s in fits)))": "backends that start their ranks by torchrun's environment",
    "', '.join(sorted(get_catalog().backends))": (
        "the backends that `python -m distributed.cli backends` lists"
    ),
    "', '.join(sorted(known))": "the options in [DeepSpeed](deepspeed.md#your-deepspeed-configuration)",
    "', '.join(sorted(metrics))": "metrics of this epoch, such as train_loss and val_loss",
    "', '.join(sorted(needed | options))": "parameters of DilatedLanguageModel",
    "', '.join(sorted(needed))": "all required parameters of DilatedLanguageModel",
    "', '.join(sorted(self.backends))": "names of installed backends",
    "', '.join(sorted(verbs))": "the subcommands in [Command line](cli.md)",
    "' or '.join(map(repr, harmless)) or None": "values that leave the option off",
    "', '.join((kind.__name__ for kind in _ELEMENTWISE))": "elementwise optimizers, such as AdamW",
    "SIGN_ALGORITHM": "signs of the version that saved it",
    "allowed": "one mask entry per block, (blocks, blocks) or (heads, blocks, blocks)",
    "error.details": "what the end of the message says",
    "f'0 to {limit_name} - 1 = {limit - 1}'": "0 to the number of ranks minus 1",
    "f'0 to {size - 1}'": "0 to the group's size minus 1",
    "f'{_SAID[framework]} {field}'": "a model, optimizer or scheduler of the backend's framework",
    "f'{least} to {most}'": "the layer's smallest rank up to its break-even rank",
    "f'{low:.4g} to {high:.4g}' if most >= least else 'none'": (
        "ratios from the smallest rank to the break-even rank"
    ),
    "f'{q.dtype} on {q.device}'": "dtype and device of q",
    "f'{tuple(outs[0].shape)} and {tuple(outs[0].shape[:-1])}'": "the shapes of the first out and its lse",
    "inside": "the fields of that section, such as fsdp.wrap",
    "range_": "ranks up to the break-even rank",
    "str((weight.shape[1],) * 2)": "a square matrix of the layer's number of inputs",
    "str(dist.get_world_size())": "the size of the existing process group",
    "str(expected)": "the layer's number of inputs, or this rank's part of them",
    "str(joined.size)": "the number of processes that the launcher started",
    "str(plan.global_batch_size)": "the product of the three values",
    "str(saved)": "the kind of optimizer in the checkpoint",
    "str(size) if size else '1 without a process group'": "the process group's size; 1 without a group",
    "wanted": "the shape of q, apart from the length of k and v",
}
"""Expression of `allowed` in the source -> description of its values, which are known at run time only."""

_GROUPS = (
    ("Command line", "cli.md", ("distributed/cli", "distributed/commands/")),
    ("Checkpoints", "checkpoints.md", ("distributed/checkpoint/", *(
        f"distributed/training/{name}" for name in ("saving", "resuming")))),
    ("Data", "data.md", ("distributed/data/", "distributed/training/validation")),
    ("Launching and failures", "launching.md", tuple(f"distributed/{name}" for name in (
        "communication/", "launch/", "resilience/", "training/process_group_backend"))),
    ("Configuration and plan", "configuration.md", tuple(f"distributed/{name}" for name in (
        "config/", "planner/", "registry/", "trainer"))),
    ("Training", "training.md", (
        "distributed/training/", "distributed/callbacks", "distributed/interfaces/")),
    ("Backend fsdp", "sharding.md", ("backends/distributed_backends/fsdp",)),
    ("Backend deepspeed", "deepspeed.md", ("backends/distributed_backends/deepspeed",)),
    ("Backend horovod", "horovod.md", ("backends/distributed_backends/horovod",)),
    ("Backend ray", "ray.md", ("backends/distributed_backends/ray",)),
    ("Backend tensorflow", "tensorflow.md", ("backends/distributed_backends/tensorflow",)),
    ("Conformance kit", "plugins.md#the-conformance-tests", ("distributed/testing/",)),
    ("Kernels", "kernels.md", ("kernels/",)),
    ("Plugins", "plugins.md", ("plugins/",)),
    ("Others", "troubleshooting.md", ("",)),
)  # fmt: skip


@dataclass(frozen=True)
class Message:
    """One message of the source.

    Attributes:
        place: path of its file, relative to the repository.
        kind: ``error``, or ``warning``: training continues.
        text: text of the message, with an ellipsis for each inserted value.
        field: field, flag or argument named before it; empty without one.
        advice: allowed values and remedy; empty when it has neither.
    """

    place: str
    kind: str
    text: str
    field: str
    advice: str

    @property
    def key(self) -> str:
        """The constant text at its beginning."""
        return self.text.partition(GAP)[0].strip() or max(self.text.split(GAP), key=len).strip()


@cache
def collect() -> tuple[Message, ...]:
    """All messages, in the order of files and lines; those without constant text left out."""
    found = [message for path in _files() for message in _in_file(path)]
    return tuple(dict.fromkeys(message for message in found if _has_words(message.text)))


def dynamic_places() -> set[str]:
    """Files with a message without constant text."""
    found = [message for path in _files() for message in _in_file(path)]
    return {message.place for message in found if not _has_words(message.text)}


def _files() -> Iterator[Path]:
    for package in _PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.parent.name != "testing" or path.stem in _KIT:
                yield path


def _has_words(text: str) -> bool:
    return sum(letter.isalpha() for letter in text.replace(GAP, "")) > 3


def _in_file(path: Path) -> Iterator[Message]:
    place = path.relative_to(ROOT).as_posix()
    wanted = _ERRORS | {name for folder, names in _ALSO.items() if place.startswith(folder) for name in names}
    calls = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
    for call in sorted(calls, key=lambda node: node.lineno):
        name = _called(call)
        if name == "warning" or name in wanted:
            words = {keyword.arg: keyword.value for keyword in call.keywords}
            field = _first(words.get("field"))
            for text in _texts(call.args[0] if call.args else None):
                kind = "warning" if name == "warning" else "error"
                yield Message(place, kind, text, "" if field == GAP else field, _advice(words, path))


def _called(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr if function.attr == "warning" else ""
    return function.id if isinstance(function, ast.Name) else ""


def _texts(node: ast.expr | None) -> list[str]:
    """Texts of a message; two for a conditional expression."""
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body), *_texts(node.orelse)]
    if isinstance(node, ast.Constant):
        return [_tidy(str(node.value).replace("%s", GAP).replace("%d", GAP))] if node.value else []
    if isinstance(node, ast.JoinedStr):
        parts = [str(v.value) if isinstance(v, ast.Constant) else GAP for v in node.values]
        return [_tidy("".join(parts))]
    if isinstance(node, ast.BinOp):
        return [_tidy(left + right) for left in _texts(node.left) for right in _texts(node.right)]
    return [] if node is None else [GAP]


def _tidy(text: str) -> str:
    """One line, with one ellipsis for adjacent inserted values."""
    line = " ".join(text.split())
    while GAP + GAP in line:
        line = line.replace(GAP + GAP, GAP)
    return line


def _first(node: ast.expr | None) -> str:
    return next(iter(_texts(node)), "")


def _advice(words: dict[str | None, ast.expr], path: Path) -> str:
    node = words.get("allowed", words.get(None))
    allowed, remedy = _first(node), _first(words.get("remedy")).rstrip(".")
    if node is not None and allowed and not _has_words(allowed):
        allowed = _described(node, path) or (allowed if GAP not in allowed else "")
    found = f"Allowed: {allowed if allowed.endswith('...') else allowed.rstrip('.') + '.'}" if allowed else ""
    return f"{found} {remedy}.".removesuffix(" .").strip(f"{GAP} ")


def _described(node: ast.expr, path: Path) -> str:
    """Allowed values that depend on the run, from the source or `_RUN_TIME_VALUES`; empty if unknown."""
    text = ast.unparse(node)
    if text in _RUN_TIME_VALUES:
        return _RUN_TIME_VALUES[text]
    joined = re.fullmatch(r"', '\.join\((?:sorted\()?\(?(?:kind\.__name__ for kind in )?([A-Z_]+)\)*", text)
    return ", ".join(_constant_names(joined[1], path)) if joined else ""


@cache
def _constant_names(name: str, first: Path) -> tuple[str, ...]:
    """Names in the module-level constant `name`, a table or list, of the file `first` or else of another."""
    for path in (first, *_files()):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            target = node.target if isinstance(node, ast.AnnAssign) else None
            target = node.targets[0] if isinstance(node, ast.Assign) else target
            if (
                isinstance(target, ast.Name)
                and target.id == name
                and isinstance(node, ast.Assign | ast.AnnAssign)
            ):
                found = tuple(_items(node.value))
                if found:
                    return found
    return ()


def _items(node: ast.expr | None) -> Iterator[str]:
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            yield from _items(key if key is not None else value)
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        for item in node.elts:
            yield from _items(item)
    elif isinstance(node, ast.Call) and node.args:
        yield from _items(node.args[0])
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


_HEAD = """# Messages

Every error and warning of the program by the part that it comes from, read from the source by
`python -m docs.site.generate`. An ellipsis stands for what is filled in, and the word before a colon is the
field, flag or argument concerned. [Troubleshooting](troubleshooting.md) explains those that need it, and
the messages of torch, NCCL, Slurm and the system.
"""


def messages_page() -> str:
    """``docs/messages.md``."""
    parts = [_HEAD]
    rest = list(collect())
    for title, page, prefixes in _GROUPS:
        mine = [message for message in rest if message.place.startswith(prefixes)]
        rest = [message for message in rest if message not in mine]
        rows = sorted({(_shown(m), _what_to_do(m)) for m in mine}, key=lambda row: (row[0].lower(), row))
        if rows:
            parts.append(f"## {title}\n\nExplained in [{_heading(page)}]({page}).\n")
            parts.append(table(rows, "message", "what to do"))
    return "\n".join(parts)


def _heading(page: str) -> str:
    text = (ROOT / "docs" / page.partition("#")[0]).read_text(encoding="utf-8")
    return text.partition("\n")[0].lstrip("# ")


def _shown(message: Message) -> str:
    return code(f"{message.field}: {message.text}" if message.field else message.text)


def _what_to_do(message: Message) -> str:
    warning = "Training continues. " if message.kind == "warning" else ""
    advice = (
        message.advice.replace("|", "&#124;").replace("<", "&lt;").replace("*", "\\*").replace("__", "\\_\\_")
    )
    return warning + (advice or _remedy_on_page(message) or "See [Troubleshooting](troubleshooting.md).")


@cache
def _entries() -> tuple[tuple[str, str], ...]:
    """(beginning of a message, remedy) of each row in ``docs/troubleshooting.md``."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \|.*?\| ([^|]+?) \|$", text, re.MULTILINE)
    found: list[tuple[str, str]] = []
    for cell, remedy in rows:
        remedy = found[-1][1] if found and remedy == "The same." else remedy
        found += [(begin.strip(f"{GAP}. "), remedy) for begin in re.findall(r"`([^`]+)`", cell)]
    return tuple(found)


def _remedy_on_page(message: Message) -> str:
    text = message.text.lstrip(f"{GAP}. ")
    return next((remedy for begin, remedy in _entries() if text.startswith(begin)), "")
