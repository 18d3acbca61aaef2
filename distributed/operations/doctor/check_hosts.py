"""Checks of several hosts (`preflight`): problems in a survey, with remedies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median

from distributed.operations.doctor import Finding
from distributed.operations.doctor.preflight_facts import Facts
from distributed.operations.doctor.preflight_measure import Survey
from distributed.system.addresses import is_loopback

_CLOCK = 1.0
"""Seconds between clocks above which times in logs and checkpoints are misleading."""
_SLOW = 4.0
"""Factor of the median link above which a link is reported as slow."""
_LATE = 1e-3
"""Seconds of a round trip below which no link is called slow."""
_SHARED_MEMORY = 256 * 2**20


def judge(survey: Survey, gpus_per_node: int | None, device: str) -> list[Finding]:
    """Every finding, in the order of printing.

    Args:
        gpus_per_node: number of ranks on each host, None when not set.
        device: the configuration's device: auto, cpu or cuda.
    """
    hosts = survey.hosts
    found = [*_versions(hosts), *_gpus(hosts, gpus_per_node, device), *_clocks(hosts), *_names(hosts)]
    return [*found, *_memory(hosts), *_links(hosts), *_folder(hosts), *_reduced(survey)]


def _versions(hosts: list[Facts]) -> Iterator[Finding]:
    names = sorted({name for host in hosts for name in host.versions})
    differ = False
    for name in names:
        by_version: dict[str, list[str]] = {}
        for host in hosts:
            by_version.setdefault(host.versions.get(name, "none"), []).append(host.host)
        if len(by_version) > 1:
            differ = True
            message = "; ".join(f"{version} on {_some(who)}" for version, who in by_version.items())
            yield Finding(name, "error", f"it differs: {message}", f"Install the same {name} everywhere")
    if not differ:
        yield Finding("versions", "ok", f"{', '.join(names)}: the same on all hosts")


def _gpus(hosts: list[Facts], wanted: int | None, device: str) -> Iterator[Finding]:
    if wanted is not None and device != "cpu" and (missing := _too_few(hosts, wanted, device)):
        yield missing
        return
    kinds = {tuple(host.gpus) for host in hosts}
    if len(kinds) > 1:
        message = "; ".join(f"{host.host}: {', '.join(host.gpus) or 'none'}" for host in hosts)
        yield Finding("GPUs", "warn", message, "The slowest GPU determines the speed of all")
    else:
        gpus = ", ".join(hosts[0].gpus) or "none"
        yield Finding("GPUs", "ok", f"{gpus}: the same on all hosts")


def _too_few(hosts: list[Facts], wanted: int, device: str) -> Finding | None:
    if device == "auto" and not any(host.gpus for host in hosts):
        message = f"no GPU on any host, {wanted} per host requested: ranks would run on the CPU"
        remedy = "Ask for them in the cluster's way (srun --gpus-per-node), or set --device cpu"
        return Finding("GPUs", "warn", message, remedy)
    short = [f"{host.host} has {len(host.gpus)}" for host in hosts if len(host.gpus) < wanted]
    if not short:
        return None
    message = f"{wanted} per host requested: {', '.join(short)}"
    return Finding("GPUs", "error", message, "See nvidia-smi there")


def _clocks(hosts: list[Facts]) -> Iterator[Finding]:
    wrong = [host for host in hosts if abs(host.clock) - host.clock_error > _CLOCK]
    for host in wrong:
        message = (
            f"{host.host} is {abs(host.clock):.1f} s {'ahead of' if host.clock > 0 else 'behind'} node 0"
        )
        yield Finding("clocks", "warn", message, "Synchronize the clocks of the hosts (chrony, ntpd)")
    if not wrong:
        worst = max(abs(host.clock) + host.clock_error for host in hosts)
        yield Finding("clocks", "ok", f"within {worst * 1e3:.0f} ms of node 0's")


def _names(hosts: list[Facts]) -> Iterator[Finding]:
    if len(hosts) == 1:
        return
    for host in hosts:
        # A rendezvous on loopback means one host, and gloo listens there.
        if host.name_resolves_to.startswith("127.") and not is_loopback(host.address):
            message = (
                f"{host.host} resolves its own name to {host.name_resolves_to}, where no host can reach gloo"
            )
            remedy = f"Map {host.host} to {host.address} in its /etc/hosts, or set GLOO_SOCKET_IFNAME there"
            yield Finding("host name", "warn", message, remedy)


def _memory(hosts: list[Facts]) -> Iterator[Finding]:
    for host in hosts:
        if host.shared_memory < _SHARED_MEMORY:
            message = f"{host.host} has {host.shared_memory / 2**20:.0f} MiB free in /dev/shm"
            yield Finding("/dev/shm", "warn", message, "Loader workers need more (docker run --shm-size=8g)")


def _links(hosts: list[Facts]) -> Iterator[Finding]:
    if len(hosts) == 1:
        return
    names = {host.node: host.host for host in hosts}
    links = [(host.host, names[other], link) for host in hosts for other, link in host.links.items()]
    broken = [(a, b, link) for a, b, link in links if link.error]
    for a, b, link in broken:
        remedy = "Open the network between them: NCCL and gloo use any port above 1024"
        yield Finding("reach", "error", f"{a} cannot reach {b} at {link.error}", remedy)
    if broken:
        return
    usual, pace = median(x.round_trip for _, _, x in links), median(x.bandwidth for _, _, x in links)
    slow = [
        (a, b, link)
        for a, b, link in links
        if link.round_trip > max(_SLOW * usual, _LATE) or link.bandwidth * _SLOW < pace
    ]
    # The host that most slow ways have in common is the one to look at.
    culprit = Counter(name for a, b, _ in slow for name in (a, b)).most_common(1)
    for a, b, link in slow:
        message = f"{a} to {b}: {link.round_trip * 1e3:.2f} ms and {link.bandwidth / 1e6:.0f} MB/s"
        message += f"; the median of all is {usual * 1e3:.2f} ms and {pace / 1e6:.0f} MB/s"
        yield Finding(
            "links", "warn", message, f"Look at {culprit[0][0]}: its cable, port and load; or leave it out"
        )
    if not slow:
        message = f"every host reaches every other: {usual * 1e3:.2f} ms, {pace / 1e6:.0f} MB/s (medians)"
        yield Finding("links", "ok", message)


def _folder(hosts: list[Facts]) -> Iterator[Finding]:
    known = [host for host in hosts if host.checkpoint is not None]
    for host in known:
        if host.checkpoint:
            remedy = "Give a folder of a file system that all hosts share, or an object store's URL"
            yield Finding("checkpoint_dir", "error", f"{host.host}: {host.checkpoint}", remedy)
    if known and not any(host.checkpoint for host in known):
        yield Finding("checkpoint_dir", "ok", "shared by all hosts, and all may write there")


def _reduced(survey: Survey) -> Iterator[Finding]:
    result = survey.all_reduce
    if len(survey.hosts) == 1:
        return
    if result is None:
        yield Finding("all-reduce", "error", "not tried: hosts cannot reach each other")
    elif result.error:
        remedy = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface; NCCL_DEBUG=INFO logs more"
        yield Finding("all-reduce", "error", f"{result.transport}: {result.error}", remedy)
    else:
        message = f"{result.transport}: {result.small * 1e6:.0f} us for 4 bytes, 16 MiB at"
        yield Finding("all-reduce", "ok", f"{message} {result.bandwidth / 1e6:.0f} MB/s")


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
