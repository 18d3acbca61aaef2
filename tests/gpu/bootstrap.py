"""Make a checkout importable without installing it: search path and entry points.

Backends and plugins are found by entry points, which only an installed distribution has. Where
there is none, its metadata is generated from ``pyproject.toml`` into ``build/gpu/site``, and that
folder and the import roots go onto the search path of this process and of those it starts.
"""

from __future__ import annotations

import os
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

__all__ = ["ROOT", "make_importable"]

ROOT = Path(__file__).resolve().parents[2]
_ROOTS = (".", "backends", "plugins", "kernels")
_GROUP = "distributed.backends"


def make_importable() -> bool:
    """Whether the checkout had to be made importable: it is not installed."""
    if any(point.name == "pytorch-ddp" for point in entry_points(group=_GROUP)):
        return False
    site = ROOT / "build" / "gpu" / "site"
    write_metadata(site)
    folders = [str(site), *(str(ROOT / name) for name in _ROOTS)]
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    return True


def write_metadata(site: Path) -> None:
    """Write a ``.dist-info`` folder with the entry points of ``pyproject.toml`` into `site`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = site / "distributed_trainer-0.0.0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.0.0\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items()), ""]
    (folder / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
