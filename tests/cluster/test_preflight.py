"""`preflight` on hosts whose network is healthy, slow at one of them, or closed by a firewall."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Host, Network, can_have_hosts
from tests.support.needs import needs_program

pytestmark = pytest.mark.needs(can_have_hosts())

NAMES = ("n0", "n1", "n2")


def preflight(network: Network, *flags: str) -> tuple[list[int], dict[str, Any]]:
    """Exit codes of all hosts, and what node 0 printed."""
    processes = []
    for number, host in enumerate(network.hosts.values()):
        place = ["--num-nodes", str(len(network.hosts)), "--node-rank", str(number)]
        place += ["--rdzv-endpoint", "n0:29500", "--device", "cpu", "--json"]
        command = [sys.executable, "-m", "distributed.cli", "preflight", *place, *flags]
        output = subprocess.PIPE if number == 0 else subprocess.DEVNULL
        processes.append(host.start(command, stdout=output, stderr=subprocess.DEVNULL, text=True))
    text, _ = processes[0].communicate(timeout=120)
    return [process.wait(timeout=120) for process in processes], json.loads(text[text.index("{") :])


def inside(host: Host, *command: str) -> None:
    subprocess.run(["ip", "netns", "exec", host.namespace, *command], check=True, capture_output=True)


def wrong(survey: dict[str, Any]) -> list[dict[str, str]]:
    return [finding for finding in survey["findings"] if finding["status"] != "ok"]


def test_healthy_hosts_pass_and_a_slow_one_is_named(tmp_path: Path) -> None:
    with Network(NAMES, tmp_path) as network:
        folder = tmp_path / "shared"
        codes, survey = preflight(network, "--checkpoint-dir", str(folder))
        # How even the links are on a busy machine is nobody's to say; what else is wrong is.
        assert codes == [0, 0, 0], survey
        assert [finding for finding in wrong(survey) if finding["name"] != "links"] == []
        assert [host["host"] for host in survey["hosts"]] == list(NAMES)
        assert [host["address"] for host in survey["hosts"]] == [network[name].address for name in NAMES]
        assert {f["name"] for f in survey["findings"]} >= {"clocks", "links", "checkpoint_dir", "all-reduce"}
        # Far below the other links also where a busy machine slows those.
        limit = ("rate", "30mbit", "burst", "128kb", "latency", "200ms")
        inside(network["n2"], "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
        codes, survey = preflight(network)
    assert codes == [0, 0, 0]  # it would train, slowly
    slow = [f["message"].partition(":")[0] for f in wrong(survey) if f["name"] == "links"]
    assert any("n2" in way for way in slow)


@pytest.mark.needs(needs_program("nft", "cluster-tools"))
def test_a_firewall_is_found_before_the_run_hangs_on_it(tmp_path: Path) -> None:
    """One that lets the meeting through and nothing else, as they do."""
    with Network(NAMES[:2], tmp_path) as network:
        rules = "table inet t {\nchain c {\ntype filter hook input priority 0;\n"
        rules += "iifname eth0 tcp dport != 29500 tcp flags & (syn | ack) == syn drop\n}\n}"
        inside(network["n0"], "nft", rules)
        codes, survey = preflight(network)
    assert codes == [1, 1]
    errors = {f["name"]: f["message"] for f in wrong(survey) if f["status"] == "error"}
    assert errors["reach"].startswith("n1 cannot reach n0 at 10.213.7.10:")
    assert errors["all-reduce"] == "not tried: hosts cannot reach each other"
