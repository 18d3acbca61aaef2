"""Build Horovod 0.28.1 against the torch of this interpreter, and install it.

    python deploy/horovod/build.py [--cache FOLDER] [--check | --no-install]

Its last release asks for C++14, which torch's headers no longer compile under; the change to
C++17 was merged upstream (horovod#3998) and never released. The wheel is kept, one for each torch
and Python, so that only the first call takes minutes. docs/decisions/horovod.md says more.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

VERSION = "0.28.1"
CXX14, CXX17 = "CMAKE_CXX_STANDARD 14", "CMAKE_CXX_STANDARD 17"
# The folder's path is taken for a regular expression there: any "+" in it, as in torch's
# "2.13.0+cpu", and the library lands under the whole path of the build folder.
BY_PATTERN = 'string(REGEX REPLACE "${PROJECT_SOURCE_DIR}(/)?" "" SUB_FOLDER "${CMAKE_CURRENT_SOURCE_DIR}")'
# Symbols for debuggers, which cost a fifth of the build and most of the wheel.
DEBUG = '"-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO'
NO_DEBUG = '"-O2 -g" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO'
BY_PATH = 'file(RELATIVE_PATH SUB_FOLDER "${PROJECT_SOURCE_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}")'
CHANGES = (
    ("CMakeLists.txt", CXX14, CXX17),
    ("CMakeLists.txt", DEBUG, NO_DEBUG),
    ("horovod/torch/CMakeLists.txt", CXX14, CXX17),
    ("cmake/Utilities.cmake", BY_PATTERN, BY_PATH),
)
BUILD_MODULES = ("setuptools", "wheel", "packaging", "cloudpickle", "psutil", "yaml", "cffi")


def main(arguments: Sequence[str] | None = None) -> None:
    """Build unless the wheel is there, install it, and import it once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cache", type=Path, default=default_cache(), help="Where wheels are kept.")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--check", action="store_true", help="Only check that it is built or can be.")
    only.add_argument("--no-install", action="store_true", help="Only build the wheel.")
    given = parser.parse_args(arguments)
    cache: Path = given.cache
    torch_version, cuda = torch_build()
    cuda_home, nccl_home = gpu_libraries() if cuda else (None, None)
    kind = "cuda" if cuda_home and nccl_home else "cpu"
    home = cache / f"{VERSION}-torch{torch_version}-{sys.implementation.cache_tag}-{kind}"
    wheel = next(home.glob("horovod-*.whl"), None)
    if given.check:
        if wheel is None:
            check_tools(search_path())
        return
    if wheel is None:
        gpu = {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_CUDA_HOME": str(cuda_home),
            "HOROVOD_NCCL_HOME": str(nccl_home),
        }
        wheel = build(home, gpu if kind == "cuda" else {})
    if given.no_install:
        return
    pip("install", "--force-reinstall", "--no-deps", str(wheel))
    # Without its native part Horovod imports all the same, and only prints a warning.
    check = "import horovod.torch as hvd; hvd.is_initialized()"
    run(
        [sys.executable, "-c", check], f"the built Horovod lacks its torch part; remove {wheel} and try again"
    )
    print(f"Horovod {VERSION} for torch {torch_version} ({kind}): {wheel}")
    if cuda and kind == "cpu":
        print("note: torch has CUDA, but nvcc or nccl.h was not found, so Horovod sums through the host")


def default_cache() -> Path:
    """The user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "distributed-trainer", "horovod")


def torch_build() -> tuple[str, bool]:
    """(torch's version with its local label, whether it has CUDA)."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        fail("Horovod is built against torch, and torch is not installed here. Install it first.")
    # Importing torch takes seconds.
    version = runpy.run_path(str(Path(found.origin).with_name("version.py")))
    return version["__version__"], version["cuda"] is not None


def gpu_libraries() -> tuple[Path | None, Path | None]:
    """(CUDA's home, NCCL's home), each None where it was not found."""
    nvcc = shutil.which("nvcc")
    said = os.environ.get("HOROVOD_CUDA_HOME") or os.environ.get("CUDA_HOME")
    cuda = Path(said) if said else Path(nvcc).resolve().parent.parent if nvcc else None
    places = [os.environ.get(name) for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME")]
    homes = [Path(place) for place in (*places, cuda, "/usr/local", "/usr") if place]
    nccl = next((home for home in homes if (home / "include" / "nccl.h").exists()), None)
    return (cuda if nvcc else None), nccl


def build(home: Path, gpu: Mapping[str, str]) -> Path:
    """The wheel, built in a temporary folder and moved to `home` when it is whole."""
    path = search_path()
    check_tools(path)
    # Under make, MAKEFLAGS has the variables and the job server of that make, which Horovod's cannot use.
    given = "" if "MAKELEVEL" in os.environ else os.environ.get("MAKEFLAGS", "")
    env = {
        **os.environ,
        "PATH": path,
        "HOROVOD_CMAKE": str(shutil.which("cmake", path=path)),
        # Third-party folders of Horovod ask for a CMake older than what CMake 4 still speaks.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "MAKEFLAGS": given or f"-j{min(8, len(os.sched_getaffinity(0)))}",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        **gpu,
    }
    # A user who wants MPI says HOROVOD_WITH_MPI=1; both at once would contradict each other.
    for part in ("MPI", "TENSORFLOW", "MXNET"):
        if f"HOROVOD_WITH_{part}" in os.environ:
            del env[f"HOROVOD_WITHOUT_{part}"]
    home.mkdir(parents=True, exist_ok=True)
    print(f"building Horovod {VERSION}; a few minutes, once for this torch and Python", flush=True)
    with TemporaryDirectory(dir=home) as work:
        options = ["--no-binary", "horovod", "--no-deps", "--no-build-isolation", "--dest", work]
        pip("download", *options, f"horovod=={VERSION}", env=env)
        with tarfile.open(Path(work, f"horovod-{VERSION}.tar.gz")) as archive:
            archive.extractall(work, filter="data")
        source = Path(work, f"horovod-{VERSION}")
        mend(source)
        pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", work, str(source), env=env)
        (built,) = Path(work).glob("horovod-*.whl")
        os.replace(built, home / built.name)
    return home / built.name


def search_path() -> str:
    """PATH with the programs of this interpreter's environment before the others."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])


def mend(source: Path) -> None:
    """Make of the release what builds: C++17 for C++14, as upstream did, and paths taken as paths."""
    for name, before, after in CHANGES:
        text = (source / name).read_text(encoding="utf-8")
        if before not in text:
            fail(f"{name} of Horovod {VERSION} does not say '{before}', which is replaced here.")
        (source / name).write_text(text.replace(before, after), encoding="utf-8")


def check_tools(path: str) -> None:
    """End with one line when something that the build needs is missing."""
    missing = []
    if not any(shutil.which(name, path=path) for name in (os.environ.get("CXX", "g++"), "c++")):
        missing.append("a C++ compiler (as root: apt-get install g++; or set CXX)")
    if not shutil.which("cmake", path=path):
        missing.append("cmake (pip install cmake)")
    if modules := [name for name in BUILD_MODULES if importlib.util.find_spec(name) is None]:
        missing.append(f"{' '.join(modules)} (pip install 'distributed-trainer[horovod]')")
    if missing:
        fail(
            f"Horovod {VERSION} is built from source, which needs {', and '.join(missing)};"
            " every other backend works without"
        )


def pip(verb: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
    """Run pip, quietly unless it fails."""
    run(
        [sys.executable, "-m", "pip", verb, "--disable-pip-version-check", *arguments],
        f"pip {verb} failed",
        env,
    )


def run(command: Sequence[str], failure: str, env: Mapping[str, str] | None = None) -> None:
    """Run `command`; when it fails, show the end of what it said, and end."""
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print("\n".join(done.stdout.splitlines()[-40:]), file=sys.stderr)
        fail(f"{failure} (exit code {done.returncode}); the last of its output is above.")


def fail(message: str) -> NoReturn:
    """End with a paragraph and the exit code of a mistake in what is given."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
