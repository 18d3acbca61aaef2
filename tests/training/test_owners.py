"""Each attribute of the training loop and its parts is assigned by one class alone."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import distributed.training
from distributed.training.loop import TrainingLoop

TRAINING = Path(distributed.training.__file__ or "").parent
# Backends and what they change about a model are not parts of the loop; the others belong to one step or one
# forward pass.
OTHERS = {
    *("objective", "torch_backend", "process_group_backend", "rank_state", "torch_framework"),
    *("module_modes", "phase_timers"),
    *("activation_checkpointing", "compilation", "host_optimizer", "lever", "levers", "low_bit"),
}
PARTS = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted([*TRAINING.glob("*.py"), *TRAINING.glob("mixins/*.py")])
    if path.stem not in OTHERS
}


def targets(node: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that a statement assigns, those inside tuples included."""
    if isinstance(node, ast.Assign):
        found = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign) and (
        not isinstance(node, ast.AnnAssign) or node.value is not None
    ):
        found = [node.target]
    else:
        return
    while found:
        target = found.pop()
        if isinstance(target, ast.Tuple | ast.List):
            found += target.elts
        elif isinstance(target, ast.Attribute):
            yield target


def collaborators(method: ast.FunctionDef) -> set[str]:
    """Parameters of a constructor: a part keeps those under their own names, and owns none of them."""
    arguments = method.args
    return {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)}


def assignments(sources: dict[str, str]) -> dict[str, set[str]]:
    """Attribute -> the classes that assign it; a class that only keeps its argument is left out."""
    owners: dict[str, set[str]] = defaultdict(set)
    for name, text in sources.items():
        for owner in [
            node for node in ast.parse(text).body if isinstance(node, ast.ClassDef | ast.FunctionDef)
        ]:
            for method in [node for node in ast.walk(owner) if isinstance(node, ast.FunctionDef)]:
                kept = collaborators(method) if method.name == "__init__" else set()
                for target in (found for node in ast.walk(method) for found in targets(node)):
                    own = isinstance(target.value, ast.Name) and target.value.id == "self"
                    if not (own and target.attr in kept):
                        owners[target.attr].add(f"{name}.{owner.name}")
    return owners


def intruders(sources: dict[str, str]) -> list[str]:
    """Assignments to a part from outside: ``self.part.x = ...`` and ``loop.part.x = ...``."""
    data = {"progress", "history"}  # plain records, whose fields have one writer each, as `assignments` finds
    owned = {name for name, owners in assignments(PARTS).items() if any(_is_part(owner) for owner in owners)}
    found = []
    for name, text in sources.items():
        for target in (found for node in ast.walk(ast.parse(text)) for found in targets(node)):
            holder = target.value
            inner = holder.attr if isinstance(holder, ast.Attribute) else getattr(holder, "id", "")
            if inner not in {"self", *data} and target.attr in owned:
                found.append(f"{name}:{target.lineno} {ast.unparse(target)}")
    return found


def _is_part(owner: str) -> bool:
    return owner.rpartition(".")[2][:1].isupper()


def shared(sources: dict[str, str]) -> dict[str, set[str]]:
    """Attributes that more than one class assigns."""
    return {name: owners for name, owners in assignments(sources).items() if len(owners) > 1}


def test_one_owner_for_each_attribute() -> None:
    assert len(assignments(PARTS)) > 40
    assert shared(PARTS) == {}
    assert intruders(PARTS) == []


def test_the_annotations_of_a_class_are_its_own() -> None:
    """No class of the loop's line declares what another of them declares, the Context apart."""
    declared: dict[str, list[str]] = defaultdict(list)
    for kind in TrainingLoop.__mro__:
        for name in vars(kind).get("__annotations__", {}):
            declared[name].append(kind.__name__)
    assert {name: kinds for name, kinds in declared.items() if len(kinds) > 1} == {}


def test_a_second_owner_is_found() -> None:
    second = "class Second:\n    def start(self):\n        self.pending, self.other = None, 1\n"
    assert shared({**PARTS, "second": second}) == {"pending": {"saving.Saver", "second.Second"}}
    outside = "def patch(loop):\n    loop.saver.failures = 0\n"
    assert intruders({"outside": outside}) == ["outside:2 loop.saver.failures"]
    assert shared({**PARTS, "outside": outside}) == {"failures": {"saving.Saver", "outside.patch"}}
    kept = "class Kept:\n    def __init__(self, state):\n        self.state = state\n"
    assert shared({**PARTS, "kept": kept}) == {}
