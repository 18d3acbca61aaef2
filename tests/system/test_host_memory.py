"""Limits of memory: of the process, of control groups and of the host."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.system import host_memory as module
from distributed.system.host_memory import host_memory, total_memory

MIB = 1 << 20
_MEASURE = """
import json, mmap, resource, sys
from distributed.system.host_memory import host_memory
name, size = sys.argv[1], int(sys.argv[2])
field = {"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}[name]
used = next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith(field))
number = getattr(resource, name)
resource.setrlimit(number, (used + size, resource.getrlimit(number)[1]))
room = host_memory()
fits = []
for share in (0.8, 1.3):
    try:
        mmap.mmap(-1, int(room.nbytes * share), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        fits.append(True)
    except OSError:
        fits.append(False)
print(json.dumps([room.nbytes, room.limit, fits]))
"""


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("name", "words"), [("RLIMIT_AS", "address space"), ("RLIMIT_DATA", "the limit of data")]
)
def test_a_limit_of_the_process_is_what_the_kernel_grants(name: str, words: str) -> None:
    command = [sys.executable, "-c", _MEASURE, name, str(64 * MIB)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    nbytes, limit, fits = json.loads(found.stdout)
    assert words in limit
    assert 0 < nbytes <= 64 * MIB
    assert fits == [True, False]


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = {"proc/meminfo": "MemTotal:       4096 kB\nMemAvailable:   2048 kB\n"}
STATUS = {"proc/self/status": "VmSize:  10 kB\nVmData:  5 kB\n"}
V2 = {
    "proc/self/cgroup": "0::/outer/inner\n",
    "sys/fs/cgroup/outer/memory.max": f"{1000 << 10}\n",
    "sys/fs/cgroup/outer/memory.current": f"{900 << 10}\n",
    "sys/fs/cgroup/outer/memory.stat": f"anon 1\ninactive_file {300 << 10}\n",
    "sys/fs/cgroup/outer/inner/memory.max": "max\n",
    "sys/fs/cgroup/outer/inner/memory.current": f"{800 << 10}\n",
}
V1 = {
    "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{1000 << 10}\n",
    "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{900 << 10}\n",
    "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {300 << 10}\n",
}


@pytest.mark.parametrize("groups", [V2, V1], ids=["v2", "v1"])
def test_a_control_group_limits_all_processes_together(
    groups: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {**MEMINFO, **STATUS, **groups})
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda number: (resource.RLIM_INFINITY,) * 2)
    room = host_memory()
    # Cached files are dropped before a process is ended: 1000 - 900 + 300 kB.
    assert (room.nbytes, room.limit) == (400 << 10, "the memory limit of the container (cgroup)")
    assert host_memory(4).nbytes == 100 << 10
    assert total_memory(tmp_path) == 1000 << 10


def test_without_limits_it_is_the_free_memory_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {**MEMINFO, **STATUS})
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda number: (resource.RLIM_INFINITY,) * 2)
    assert host_memory(2) == (1024 << 10, "the free memory of the host")
    assert total_memory(tmp_path) == 4096 << 10
