"""Every error and warning that the program has for its user, read from the source.

A message is a call of one of the error classes below, or of a logger's ``warning``. What the program
inserts when it speaks is shown as an ellipsis. `Message.key`, the constant text that a message begins
with, is what a reader can search for, and what `docs/troubleshooting.md` uses.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docs.site.markdown import code, table

__all__ = ["DYNAMIC", "Message", "collect", "messages_page"]

ROOT = Path(__file__).parents[2]
GAP = "…"
_ROOMS = ("distributed", "backends", "plugins", "kernels")
_ERRORS = {"UserError", "WorkerError", "KernelError", "CostlyError"}
# Elsewhere these stay inside; here they reach the user, by themselves or as the text of a UserError.
_ALSO = {
    "distributed/config": {"ValueError"},
    "backends/distributed_backends/fsdp/section": {"ValueError"},
    "distributed/training": {"RuntimeError", "OSError"},
}
_KIT = ("rank_pool", "test_conformance", "workbench")

DYNAMIC = {
    "distributed/commands/parser.py": "the words of Python's argparse",
    "distributed/config/validation_errors.py": "the words of a check of a field, listed by themselves",
    "distributed/operations/deploy/job.py": "the words of the plan, of a run that is not started here",
    "distributed/errors.py": "an error that comes back from another process",
    "distributed/resilience/failure_reports.py": "what a rank died of",
    "distributed/training/step_records.py": "a loss that is not finite, in the words of on_nan=stop",
    "distributed/operations/tuning/trial_record.py": "what a trial died of",
    "backends/distributed_backends/tensorflow/objective.py": "the words of Keras",
    "plugins/distributed_plugins/sketch_sync.py": "the words of a KernelError",
}
"""Files with a message that has no constant words of its own, and what its words are."""

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
    ("Conformance kit", "plugins.md#the-kit", ("distributed/testing/",)),
    ("Kernels", "kernels.md", ("kernels/",)),
    ("Plugins", "plugins.md", ("plugins/",)),
    ("Others", "troubleshooting.md", ("",)),
)  # fmt: skip


@dataclass(frozen=True)
class Message:
    """One message of the source.

    Attributes:
        place: its file, relative to the repository.
        kind: ``error``, or ``warning``: training goes on.
        text: its words, an ellipsis for each value that is inserted.
        field: the field, flag or argument named before it; empty without one.
        advice: what it says is allowed and what to do; empty when it says neither.
    """

    place: str
    kind: str
    text: str
    field: str
    advice: str

    @property
    def key(self) -> str:
        """The constant words that it begins with."""
        return self.text.partition(GAP)[0].strip() or max(self.text.split(GAP), key=len).strip()


@cache
def collect() -> tuple[Message, ...]:
    """All messages, in the order of files and lines; those without words of their own left out."""
    found = [message for path in _files() for message in _in_file(path)]
    return tuple(dict.fromkeys(message for message in found if _has_words(message.text)))


def dynamic_places() -> set[str]:
    """Files with a message that has no words of its own."""
    found = [message for path in _files() for message in _in_file(path)]
    return {message.place for message in found if not _has_words(message.text)}


def _files() -> Iterator[Path]:
    for room in _ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if path.parent.name != "testing" or path.stem in _KIT:
                yield path


def _has_words(text: str) -> bool:
    return sum(letter.isalpha() for letter in text.replace(GAP, "")) > 3


def _in_file(path: Path) -> Iterator[Message]:
    place = path.relative_to(ROOT).as_posix()
    wanted = _ERRORS | {name for room, names in _ALSO.items() if place.startswith(room) for name in names}
    calls = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
    for call in sorted(calls, key=lambda node: node.lineno):
        name = _called(call)
        if name == "warning" or name in wanted:
            words = {keyword.arg: keyword.value for keyword in call.keywords}
            field = _first(words.get("field"))
            for text in _texts(call.args[0] if call.args else None):
                kind = "warning" if name == "warning" else "error"
                yield Message(place, kind, text, "" if field == GAP else field, _advice(words))


def _called(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr if function.attr == "warning" else ""
    return function.id if isinstance(function, ast.Name) else ""


def _texts(node: ast.expr | None) -> list[str]:
    """The words of a message; two where it is one of two."""
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
    """One line, with one ellipsis for what is inserted side by side."""
    line = " ".join(text.split())
    while GAP + GAP in line:
        line = line.replace(GAP + GAP, GAP)
    return line


def _first(node: ast.expr | None) -> str:
    return next(iter(_texts(node)), "")


def _advice(words: dict[str | None, ast.expr]) -> str:
    allowed, remedy = _first(words.get("allowed")), _first(words.get("remedy")).rstrip(".")
    found = f"Allowed: {allowed.rstrip('.')}." if _has_words(allowed) else ""
    if not found and allowed:
        found = "It goes on with what is allowed."
    return f"{found} {remedy}.".removesuffix(" .").strip(f"{GAP} ")


_HEAD = """# Messages

Every error and warning of the program by the part that it comes from, read from the source by
`python -m docs.site.generate`. An ellipsis stands for what is filled in, and the word before a colon is the
field, flag or argument concerned. [Troubleshooting](troubleshooting.md) says more about those that need it,
and about the messages of torch, NCCL, Slurm and the system.
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
    warning = "Training goes on. " if message.kind == "warning" else ""
    advice = (
        message.advice.replace("|", "&#124;").replace("<", "&lt;").replace("*", "\\*").replace("__", "\\_\\_")
    )
    return warning + (advice or "See [Troubleshooting](troubleshooting.md).")
