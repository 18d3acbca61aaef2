"""Checks of the machine: devices, loopback, memory, limits, and two ranks that really talk."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from distributed.operations.doctor import Finding
from distributed.registry.catalog import missing_modules

DEFAULT_PORT = 29500
PROBE_SECONDS = 60
_GIB = 2**30
_MAPPED_LOOPBACK = "::ffff:127.0.0.1"


def devices() -> Iterator[Finding]:
    """Devices that torch sees, listed in a separate process because a broken driver may end it."""
    if missing_modules(["torch"]):
        yield Finding("devices", "warn", "torch is not installed", "pip install 'distributed-trainer[torch]'")
        return
    seen = _seen()
    if "error" in seen:
        yield Finding("devices", "error", f"torch cannot be used: {seen['error']}", "Reinstall torch")
    elif seen["gpus"]:
        yield Finding("devices", "ok", f"{len(seen['gpus'])} GPU(s): {', '.join(seen['gpus'])}")
    elif Path("/dev/nvidiactl").exists():
        build = seen["cuda"] or "a CPU build"
        remedy = "Install a torch build for this driver; `nvidia-smi` shows the driver's CUDA"
        yield Finding("devices", "warn", f"this host has a GPU that torch ({build}) cannot use", remedy)
    else:
        yield Finding("devices", "ok", "no GPU: ranks run as CPU processes over gloo")


def ports(port: int = DEFAULT_PORT) -> Iterator[Finding]:
    """The usual rendezvous port is free on loopback, and so is any other."""
    try:
        with socket.socket() as any_port:
            any_port.bind(("127.0.0.1", 0))
    except OSError as error:
        yield Finding(
            "ports", "error", f"no port on 127.0.0.1: {error}", "Bring up loopback: ip link set lo up"
        )
        return
    try:
        with socket.socket() as usual:
            # As a server does: a connection of an earlier run in TIME_WAIT is no obstacle.
            usual.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            usual.bind(("127.0.0.1", port))
    except OSError:
        yield Finding("ports", "warn", f"port {port} is taken", "Give --rdzv-endpoint HOST:PORT another one")
        return
    yield Finding("ports", "ok", f"port {port} is free on loopback")


def rendezvous() -> Iterator[Finding]:
    """A TCPStore on loopback takes and gives a value."""
    if missing_modules(["torch"]):
        return
    yield _report("rendezvous", _probe("rendezvous"), "a TCPStore on loopback answers")


def _look_up_loopback() -> None:
    """As torch does whenever a client of a store connects: an IPv4 address in the form of an IPv6 one."""
    with suppress(OSError):
        socket.getnameinfo((_MAPPED_LOOPBACK, DEFAULT_PORT), socket.NI_NUMERICSERV)


def name_server(look_up: Callable[[], None] = _look_up_loopback, patience: float = 2.0) -> Iterator[Finding]:
    """The name of the loopback address is found, or found to be missing, without delay.

    Args:
        look_up: looks it up.
        patience: seconds after which the answer is late.
    """
    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(patience)
    if thread.is_alive():
        yield Finding(
            "name server",
            "warn",
            f"no answer within {patience:g} s; every process that joins a run waits for it, because torch"
            " looks up the name of each address",
            f"Check the servers in /etc/resolv.conf, or add '{_MAPPED_LOOPBACK} ip4-loopback' to /etc/hosts,"
            " and such a line for the address of node 0",
        )
    else:
        yield Finding("name server", "ok", "a look-up of the loopback address ends at once")


def shared_memory(folder: str = "/dev/shm", wanted: int = _GIB) -> Iterator[Finding]:
    """Shared memory holds what DataLoader workers and ranks pass through it.

    Args:
        wanted: bytes that should be free.
    """
    if not Path(folder).is_dir():
        yield Finding("shared memory", "warn", f"no {folder}", "Mount a tmpfs there")
        return
    usage = shutil.disk_usage(folder)
    size = f"{usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free in {folder}"
    if usage.free < wanted:
        remedy = "In a container: --shm-size=8g or --ipc=host; else remove stale files, or use num_workers=0"
        yield Finding("shared memory", "warn", size, remedy)
    else:
        yield Finding("shared memory", "ok", size)


def open_files(wanted: int = 1024) -> Iterator[Finding]:
    """Each tensor that a DataLoader worker passes on holds a file open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        remedy = f"ulimit -n {min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536}"
        yield Finding("open files", "warn", f"limit {soft}, below {wanted}", remedy)
    else:
        yield Finding("open files", "ok", "no limit" if soft == resource.RLIM_INFINITY else f"limit {soft}")


def temporary_folder() -> Iterator[Finding]:
    """Plans and errors of the ranks travel through private files in the temporary folder."""
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"distributed")
    except OSError as error:
        yield Finding("temporary folder", "error", str(error), "Set TMPDIR to a folder you can write")
        return
    yield Finding("temporary folder", "ok", f"{tempfile.gettempdir()} can be written")


def allreduce() -> Iterator[Finding]:
    """Two ranks on loopback add up what each holds, and both get the right sum."""
    if missing_modules(["torch"]):
        return
    backends = ["gloo", "nccl"] if len(_seen().get("gpus", [])) >= 2 else ["gloo"]
    for backend in backends:
        with tempfile.TemporaryDirectory(prefix="distributed-doctor-") as folder:
            result = _probe("allreduce", backend, os.path.join(folder, "store"))
        yield _report(f"all-reduce {backend}", result, "two ranks on loopback agree on the sum")


def _report(name: str, result: dict[str, Any], good: str) -> Finding:
    if "error" not in result:
        return Finding(name, "ok", good)
    remedy = (
        "Look for a firewall on loopback and for a host name that does not resolve (`hostname -i`);"
        " GLOO_SOCKET_IFNAME names the interface"
    )
    return Finding(name, "error", result["error"], remedy)


@cache
def _seen() -> dict[str, Any]:
    return _probe("devices")


def _probe(*arguments: str, seconds: float = PROBE_SECONDS) -> dict[str, Any]:
    """Run `distributed.operations.doctor.probes` in its own process; its JSON, or ``{"error": why}``."""
    command = [sys.executable, "-m", "distributed.operations.doctor.probes", *arguments]
    # A session of its own, so that ranks started by the probe end with it on a timeout.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return {"error": f"no answer within {seconds:g} seconds"}
    if process.returncode == 0:
        answer: dict[str, Any] = json.loads(out.splitlines()[-1])
        return answer
    if process.returncode < 0:
        return {"error": f"the process died of signal {-process.returncode}"}
    return {"error": (err.strip().splitlines() or [f"exit code {process.returncode}"])[-1]}
