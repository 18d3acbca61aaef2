"""A `python` that forks, for programs that start Python themselves: torchrun, a shell, DeepSpeed's launcher.

It asks the tests' fork server for the process, passes signals on to it, and ends as it ends. A command line
that cannot be a fork becomes an ordinary process. See `write_forking_python`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from distributed.launch.child_process import ForkedProcess
from distributed.launch.forked import ADDRESS, ForkRequest

__all__ = ["PRELOAD", "write_forking_python"]

PRELOAD = "TESTS_FORK_PRELOAD"
"""Environment variable: modules that the fork server imports first, with blanks between them."""

_RAY_WORKER = "setup_worker.py"
_RAY_CONTEXT = "--serialized-runtime-env-context="
_PASSED_ON = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2]


def write_forking_python(folder: Path) -> Path:
    """Write the executables `python`, `torchrun` and `ray-python` into `folder`; the path of `python`.

    `ray-python` forks Ray's workers alone: its agents and monitors import no torch.
    """
    fork = f'exec {sys.executable} -P {Path(__file__).resolve()} %s"$@"\n'
    scripts = {
        "python": fork % "",
        "torchrun": fork % "-m torch.distributed.run ",
        "ray-python": f'case "$1" in */{_RAY_WORKER}) {fork % ""};; esac\nexec {sys.executable} "$@"\n',
    }
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}")
        (folder / name).chmod(0o755)
    return folder / "python"


def _ray_worker(words: list[str], env: dict[str, str]) -> list[str]:
    """The command line that Ray's own script would become, after it imported all of Ray."""
    argv = []
    for word in words[1:]:
        if word.startswith(_RAY_CONTEXT):
            context = json.loads(word.removeprefix(_RAY_CONTEXT))
            if context.get("command_prefix"):
                return words
            env.update(context.get("env_vars") or {})
        elif not word.startswith("--language="):
            argv.append(word)
    return argv


def main(words: list[str]) -> int:
    """Run the command line `words`; the exit code."""
    env, argv = dict(os.environ), words
    if argv and argv[0].endswith(_RAY_WORKER):
        argv = _ray_worker(argv, env)
    if argv[:1] == ["-u"]:
        argv = argv[1:]
        env["PYTHONUNBUFFERED"] = "1"
    if ADDRESS not in env or not argv or (argv[0].startswith("-") and argv[0] not in ("-P", "-c", "-m")):
        os.execv(sys.executable, [sys.executable, *words])
    request = ForkRequest(argv, env, [0, 1, 2], preload=env.get(PRELOAD, "").split(), new_session=True)
    # One that comes before the fork is there waits for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    try:
        process = ForkedProcess(env[ADDRESS], request, [0, 1, 2])
    except ConnectionError:
        signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
        os.execv(sys.executable, [sys.executable, *words])

    def pass_on(number: int, frame: Any) -> None:
        os.kill(process.pid, number)  # not reaped yet, so the pid is its own

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    status = process.wait_end()
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    process.reap()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
