"""Hosts in network namespaces: each has its own network, host name and processes, and can be cut off or die.

Needs root, ``ip`` and ``unshare``. Nothing leaves the machine: the hosts meet on a bridge of their own
network namespace, which has no way out.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.needs import needs_program, needs_root

__all__ = ["Host", "Network", "can_have_hosts"]

_BOOT = 'hostname "$0"; mount --bind "$HOSTS_FILE" /etc/hosts; exec "$@"'


def can_have_hosts() -> str | None:
    """Why namespaces cannot be had here; None when they can."""
    absent = needs_program("unshare", "test-tools") or needs_program("ip", "cluster-tools")
    if why := needs_root("hosts in network namespaces") or absent:
        return why
    probe = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"], check=False)
    return "the kernel gives no namespaces" if probe.returncode else None


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass
class Host:
    """One host of a `Network`.

    Attributes:
        name: its host name.
        address: on the bridge.
    """

    name: str
    address: str
    network: Network
    processes: list[subprocess.Popen[Any]] = field(default_factory=list)

    @property
    def namespace(self) -> str:
        return f"{self.network.prefix}{self.name}"

    def start(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command there; all it starts ends with it."""
        env = {**os.environ, **options.pop("env", {}), "HOSTS_FILE": str(self.network.hosts_file)}
        command = [
            *("nsenter", f"--net=/run/netns/{self.namespace}"),
            *("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *("bash", "-c", _BOOT, self.name, *argv),
        ]
        process = subprocess.Popen(command, env=env, start_new_session=True, **options)
        self.processes.append(process)
        return process

    def cut(self) -> None:
        """Take its network cable out: packets are lost, and nobody is told."""
        _ip("-n", self.network.switch, "link", "set", f"v{self.name}", "down")

    def mend(self) -> None:
        """Put the cable back."""
        _ip("-n", self.network.switch, "link", "set", f"v{self.name}", "up")

    def die(self) -> None:
        """Lose power: off the network first, so that no peer gets a farewell."""
        self.cut()
        self.end()

    def end(self) -> None:
        """End what runs there."""
        for process in self.processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)  # unshare --kill-child ends the rest
                process.wait(timeout=30)


class Network:
    """A bridge and hosts on it, gone when the ``with`` block ends.

    Args:
        names: of the hosts.
        folder: for the file of their addresses.
    """

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self.prefix = f"dt{os.getpid()}"
        self.switch = f"{self.prefix}switch"
        self.hosts_file = folder / "hosts"
        self.hosts: Mapping[str, Host] = {
            name: Host(name, f"10.213.7.{10 + number}", self) for number, name in enumerate(names)
        }

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def __enter__(self) -> Network:
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in self.hosts.values())]
        self.hosts_file.write_text("\n".join(lines) + "\n")
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "bridge", "up")
        for host in self.hosts.values():
            self._plug_in(host)
        return self

    def _plug_in(self, host: Host) -> None:
        inside, outside = "eth0", f"v{host.name}"
        _ip("netns", "add", host.namespace)
        _ip("-n", host.namespace, "link", "set", "lo", "up")
        _ip("-n", host.namespace, "link", "add", inside, "type", "veth", "peer", "name", outside,
            "netns", self.switch)  # fmt: skip
        _ip("-n", self.switch, "link", "set", outside, "master", "bridge")
        _ip("-n", self.switch, "link", "set", outside, "up")
        _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", inside)
        _ip("-n", host.namespace, "link", "set", inside, "up")

    def __exit__(self, *exc: object) -> None:
        for host in self.hosts.values():
            host.end()
        for namespace in [*(host.namespace for host in self.hosts.values()), self.switch]:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)
