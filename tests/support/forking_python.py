"""A stand-in for the interpreter, for programs that start Python themselves (raylets, torchrun).

It asks the fork server for a fork, waits for its end, and passes signals on. Without a server, or with options
that a fork cannot have, it becomes the real interpreter. `install` writes it as an executable file.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path

__all__ = ["install"]

_LIMITS = ("RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_STACK")
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_RAY = ["torch", "ray", "ray.train", "ray.train.torch", "ray.tune", "ray._private.workers.default_worker"]


def install(folder: Path) -> Path:
    """Write the executable into `folder` and return its path."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable} -IS\n{Path(__file__).read_text(encoding='utf-8')}", encoding="utf-8")
    path.chmod(0o700)
    return path


def _without_ray_setup(words: list[str]) -> list[str]:
    """A raylet starts setup_worker.py, which sets variables and executes its other arguments."""
    if not words[0].endswith("setup_worker.py"):
        return words
    rest = []
    for word in words[1:]:
        name, _, value = word.partition("=")
        if name == "--serialized-runtime-env-context":
            os.environ.update(json.loads(value or "{}").get("env_vars") or {})
        elif name != "--language":
            rest.append(word)
    return rest


def _fork(words: list[str], address: str) -> int:
    """Run `words` in a fork and return its status; raises OSError if there is no such fork."""
    words = _without_ray_setup(words)
    request = {
        "argv": words,
        "env": dict(os.environ),
        "fds": [0, 1, 2],
        "preload": _RAY if "/ray/" in words[0] else ["torch"],
        "new_session": False,
        "tied": True,
        "cwd": os.getcwd(),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "cpus": sorted(os.sched_getaffinity(0)),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS},
        "namespaces": [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "mnt", "pid")],
    }
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(address)
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    answer = json.loads(server.recv(1 << 16) or b"{}")
    if "pid" not in answer:
        raise OSError(answer.get("refused"))
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(answer["pid"], number))
    return int(json.loads(server.recv(1 << 16) or b'{"status": -9}')["status"])


def _main(words: list[str]) -> int:
    address = os.environ.get("DISTRIBUTED_FORK_SERVER")
    if address and words and (not words[0].startswith("-") or words[0] in ("-c", "-m", "-P", "-u")):
        try:
            status = _fork([word for word in words if word != "-u"], address)
        except OSError:
            pass
        else:
            if status < 0:
                signal.signal(-status, signal.SIG_DFL)
                os.kill(os.getpid(), -status)
            return status
    os.execv(os.environ["DISTRIBUTED_REAL_PYTHON"], [sys.executable, *words])


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
