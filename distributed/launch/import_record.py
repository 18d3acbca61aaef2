"""What the imports of a process depended on, and whether they would be the same in another process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

__all__ = ["ImportRecord"]

_NATIVE = (
    "ARROW_", "ATEN_", "BLIS_", "C10_", "CUBLAS", "CUDA", "CUDNN", "DNNL_", "GLIBC_", "GOMP_", "GOTO_",
    "KINETO_", "KMP_", "LANG", "LC_", "LD_", "MALLOC", "MKL_", "NUMBA_", "NUMEXPR_", "NVIDIA_", "OMP_",
    "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TF_", "TORCH_", "XLA_",
)  # fmt: skip
"""Beginnings of names that interpreters, loaders and native libraries read when they start, which no record
of Python's reads contains. Gloo, NCCL, MPI, Horovod and gRPC read theirs when a group is made."""
_TAKEN_OVER = {"PYTHONPATH", "PYTHONUNBUFFERED"}
"""Variables that a fork applies itself (`forked.run_forked`)."""


class ImportRecord:
    """The environment variables that imports have read or set, and where the modules come from.

    Attributes:
        set_by_imports: variables that the imports have set, with their values.
    """

    def __init__(self) -> None:
        self._read = set[str]()
        self._env = dict(os.environ)
        self.set_by_imports: dict[str, str] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record which variables Python code reads and sets meanwhile."""
        plain, read = type(os.environ), self._read

        class Recorded(plain):  # type: ignore[valid-type, misc]
            """`os.environ`, whose reads of single variables are recorded, and copies of all are not."""

            def __getitem__(self, name: Any) -> str:
                if isinstance(name, str):
                    read.add(name)
                return str(super().__getitem__(name))

            def copy(self) -> dict[str, str]:
                return dict(self.items())

            def items(self) -> Any:
                decoded = {self.decodekey(key): self.decodevalue(value) for key, value in self._data.items()}
                return decoded.items()

        os.environ.__class__ = Recorded
        try:
            yield
        finally:
            os.environ.__class__ = plain
            self.set_by_imports.update(
                (name, value) for name, value in os.environ.items() if self._env.get(name) != value
            )

    def difference(self, env: Mapping[str, str], search_path: Sequence[str]) -> str | None:
        """Why imports in a process with this environment and `sys.path` could have another result.

        Returns:
            The reason; None if there is none.
        """
        names = (name for name in {*self._env, *env} if name in self._read or name.startswith(_NATIVE))
        for name in sorted(set(names) - _TAKEN_OVER):
            set_here = name in self.set_by_imports and env.get(name) == self.set_by_imports[name]
            if env.get(name) != self._env.get(name) and not set_here:
                return f"the environment variable {name} differs from when the modules were imported"
        return _other_file(_origins(sys.modules), search_path)


def _origins(modules: Mapping[str, ModuleType]) -> dict[str, str]:
    """Name of each top-level module -> the folder in which it was found."""
    found = {}
    for name, module in modules.items():
        file = getattr(module, "__file__", None)
        if "." not in name and file and name != "__main__":
            folder = os.path.dirname(os.path.abspath(file))
            found[name] = os.path.dirname(folder) if hasattr(module, "__path__") else folder
    return found


def _other_file(origins: Mapping[str, str], search_path: Sequence[str]) -> str | None:
    """Why a module of `origins` could come from another folder under `search_path`; None if it could not."""
    missing = dict(origins)
    for folder in map(os.path.abspath, search_path):
        for file in _files(folder) if missing else ():
            name = file.partition(".")[0]
            if missing.get(name) == folder:
                del missing[name]
            elif name in missing and _is_importable(folder, file):
                return f"{os.path.join(folder, file)} would be imported instead of the imported module"
    # Modules that a finder of their own has found are in no folder that is searched.
    searched = {os.path.abspath(entry) for entry in sys.path}
    lost = sorted(name for name, folder in missing.items() if folder in searched)
    return f"{lost[0]} would not be found in the same folder" if lost else None


def _files(folder: str) -> list[str]:
    with suppress(OSError):  # an entry may be missing, or an archive
        return os.listdir(folder)
    return []


def _is_importable(folder: str, file: str) -> bool:
    if file.endswith((".py", ".so", ".pyc")):
        return True
    return os.path.isfile(os.path.join(folder, file, "__init__.py"))
