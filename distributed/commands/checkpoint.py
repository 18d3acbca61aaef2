"""``checkpoint``: list, show, verify, compare, export and prune checkpoints."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from distributed.commands.tables import print_json, print_table
from distributed.errors import UserError
from distributed.redaction import redact

if TYPE_CHECKING:
    from distributed.checkpoint.checkpointer import PortableCheckpointer
    from distributed.checkpoint.reader import PortableReader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``checkpoint`` and their flags."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    folder = "a checkpoint_dir, or its URL"
    one = "a checkpoint (step_NNNNNNNN), or a directory of them: its newest good one"
    ls = _action(actions, "ls", _ls, folder, "List the checkpoints of a directory, newest first.")
    ls.add_argument("--json", action="store_true", help="Print JSON.")
    show = _action(actions, "show", _show, one, "Progress, configuration and tensors of a checkpoint.")
    show.add_argument("--json", action="store_true", help="Print JSON.")
    _action(
        actions, "verify", _verify, "a checkpoint (step_NNNNNNNN), or a directory of them: all",
        "Read checkpoints through and compare every checksum; exit code 1 when one is damaged.",
    )  # fmt: skip
    diff = _action(
        actions, "diff", _diff, one,
        "Compare two checkpoints bit for bit: weights, optimizer, schedule, progress, random numbers;"
        " exit code 1 when they differ.",
    )  # fmt: skip
    diff.add_argument("other", metavar="OTHER", help=one)
    export = _action(actions, "export", _export, one, "Write the weights as safetensors.")
    export.add_argument(
        "--output", metavar="DIR", required=True, help="Output directory; created if missing."
    )
    export.add_argument(
        "--dtype", choices=["fp32", "bf16", "fp16"], help="Convert floating-point weights. Default: as saved."
    )
    export.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="Maximum size of a file. Default: 5GB."
    )
    export.add_argument(
        "--merge-into",
        metavar="DIR",
        help="Write the base model in DIR with the checkpoint's adapter merged into its weights.",
    )
    prune = _action(actions, "prune", _prune, folder, "Remove old checkpoints; the best one stays.")
    prune.add_argument("--keep-last", type=int, required=True, metavar="N", help="Keep the newest N.")
    prune.add_argument("--keep-every", type=int, metavar="N", help="Also keep steps divisible by N.")
    prune.add_argument(
        "--dry-run", action="store_true", help="Only print which checkpoints would be removed."
    )


def _action(actions: Any, name: str, function: Any, path: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=summary, description=summary)
    parser.add_argument("path", metavar="PATH", help=path)
    parser.set_defaults(function=function)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the action.

    Raises:
        UserError: no such checkpoint, or a damaged one.
    """
    return int(args.function(args) or 0)


# -- actions -----------------------------------------------------------------------------------


def _ls(args: argparse.Namespace) -> None:
    store = _store(args.path)
    best = store.best()
    rows = [_row(store.path_of(step), store.path_of(step) == best) for step in store.steps()]
    if args.json:
        print_json(rows)
    else:
        columns = ["step", "epoch", "saved", "backend", "ranks", "size", "best", "state"]
        print_table(columns, [[str(row[name]) for name in columns] for row in rows])


def _row(path: str, best: bool) -> dict[str, Any]:
    from distributed.checkpoint.reader import PortableReader

    row: dict[str, Any] = {"step": int(path.rpartition("_")[2]), "path": path, "best": "best" if best else ""}
    try:
        reader = PortableReader(path)
    except UserError as error:
        return {**row, "epoch": "", "saved": "", "backend": "", "ranks": "", "size": "", "state": str(error)}
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(reader.saved_at))
    return {
        **row,
        "epoch": reader.extra["progress"].get("epoch", ""),
        "saved": saved,
        "backend": (reader.extra.get("config") or {}).get("backend", ""),
        "ranks": reader.world_size,
        "size": _readable(reader.nbytes),
        "state": "complete",
    }


def _show(args: argparse.Namespace) -> None:
    reader = _open(args.path)
    config = redact(reader.extra.get("config") or {})  # an earlier version may have saved secrets
    facts = {
        "path": reader.path,
        "step": reader.step,
        "ranks": reader.world_size,
        **{name: value for name, value in reader.extra["progress"].items() if name != "step"},
        "versions": reader.versions,
        "tied": dict(reader.aliases),
        "groups": [{**group, "names": len(group["names"])} for group in reader.groups],
    }
    tensors = {
        f"{key} {name}": (list(shape), reader.dtype(key, name))
        for (key, name), shape in reader.tensors().items()
    }
    if args.json:
        print_json({**facts, "config": config, "tensors": tensors})
        return
    print_table(["", ""], [[name, str(value)] for name, value in facts.items()])
    print_table(["configuration", ""], [[n, str(v)] for n, v in _leaves(config) if v is not None])
    rows = [[name, " x ".join(map(str, shape)) or "-", dtype] for name, (shape, dtype) in tensors.items()]
    print_table(["tensor", "shape", "dtype"], rows)
    print(_totals(reader))


def _totals(reader: PortableReader) -> str:
    counts: Counter[str] = Counter()
    for (key, _), shape in reader.tensors().items():
        counts[key] += prod(shape)
    said = ", ".join(f"{key} {count:,}" for key, count in counts.items())
    return f"elements: {said}; {_readable(reader.nbytes)} stored"


def _verify(args: argparse.Namespace) -> int:
    from distributed.checkpoint.reader import verify

    store = None if _is_checkpoint(args.path) else _store(args.path)
    paths = [store.path_of(step) for step in store.steps()] if store else [args.path]
    damaged = 0
    for path in paths:
        problems = verify(path)
        damaged += bool(problems)
        print(f"{path}: {'good' if not problems else 'DAMAGED'}")
        for problem in problems:
            print(f"  {problem}")
    return 1 if damaged else 0


def _diff(args: argparse.Namespace) -> int:
    from distributed.checkpoint.diff import differences

    one, other = _open(args.path), _open(args.other)
    found = list(differences(one, other))
    print(f"{one.path}\n{other.path}\n{'differ' if found else 'equal, bit for bit'}")
    for line in found:
        print(f"  {line}")
    if not found:
        print(_totals(one))
    return 1 if found else 0


def _export(args: argparse.Namespace) -> None:
    from distributed.checkpoint.export import bytes_of, export_safetensors

    reader = _open(args.path)
    size = bytes_of(args.max_shard_size)
    if args.merge_into is not None:
        from distributed.checkpoint.merge import export_merged

        paths = export_merged(reader.path, args.merge_into, args.output, dtype=args.dtype)
    else:
        paths = export_safetensors(reader.path, args.output, dtype=args.dtype, max_shard_size=size)
    for path in paths:
        print(f"{path}  {_readable(os.stat(path).st_size)}")


def _prune(args: argparse.Namespace) -> None:
    from distributed.checkpoint.lease import Lease

    for name in ("keep_last", "keep_every"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError("must be a positive integer", field=f"--{name.replace('_', '-')}", got=value,
                            allowed="1 or more")  # fmt: skip
    store = _store(args.path)
    if args.dry_run:
        for path in store.prune(args.keep_last, args.keep_every, dry_run=True):
            print(f"would remove {path}")
        return
    store.lease = Lease(store.files, store.directory, field="PATH")
    store.lease.acquire()
    try:
        for path in store.prune(args.keep_last, args.keep_every):
            print(f"removed {path}")
    finally:
        store.release()


# -- paths -------------------------------------------------------------------------------------


def _is_checkpoint(path: str) -> bool:
    from distributed.checkpoint.file_names import MANIFEST
    from distributed.checkpoint.object_store import located

    files, path = located(path)
    return os.path.basename(path).startswith("step_") or files.exists(os.path.join(path, MANIFEST))


def _store(path: str) -> PortableCheckpointer:
    from distributed.checkpoint.checkpointer import PortableCheckpointer

    store = PortableCheckpointer(path, keep_last=None)
    if not store.steps():
        raise UserError(
            "no checkpoint found",
            field="PATH",
            got=path,
            allowed="a checkpoint_dir, which holds step_NNNNNNNN",
        )
    return store


def _open(path: str) -> PortableReader:
    from distributed.checkpoint.reader import PortableReader

    if _is_checkpoint(path):
        return PortableReader(path)
    latest = _store(path).latest()
    if latest is None:
        raise UserError("every checkpoint in this directory is damaged", field="PATH", got=path,
                        remedy="`checkpoint verify` lists the damaged files")  # fmt: skip
    return PortableReader(latest)


def _readable(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found += _leaves(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found
