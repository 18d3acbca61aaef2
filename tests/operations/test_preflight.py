"""Hosts that test each other before a run. Here both are this host; tests/cluster has real ones."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from distributed.cli import main
from distributed.communication.rendezvous import listen
from distributed.operations.doctor import Finding
from distributed.operations.doctor.check_hosts import judge
from distributed.operations.doctor.preflight_facts import Facts, Link
from distributed.operations.doctor.preflight_links import measure_links
from distributed.operations.doctor.preflight_measure import AllReduce, Survey
from distributed.system.addresses import is_loopback, own_addresses
from tests.support import commands
from tests.support.ports import free_port


def host(node: int, **given: object) -> Facts:
    """One of two healthy hosts."""
    facts = Facts(
        node=node,
        host=f"n{node}",
        address=f"10.0.0.{node + 1}",
        name_resolves_to=f"10.0.0.{node + 1}",
        versions={"python": "3.11.7", "torch": "2.13.0"},
        cpus=8,
        memory=2**34,
        shared_memory=2**33,
        links={1 - node: Link("", 1e-4, 1e9)},
        checkpoint="",
    )
    return replace(facts, **given)  # type: ignore[arg-type]


def found(*hosts: Facts, reduced: AllReduce | None = None, wanted: int | None = None) -> list[Finding]:
    result = reduced or AllReduce("gloo", 1e-4, 1e9)
    return [f for f in judge(Survey(list(hosts), result), wanted, "auto") if f.status != "ok"]


def test_healthy_hosts_have_nothing_wrong() -> None:
    assert found(host(0), host(1)) == []
    assert len(judge(Survey([host(0), host(1)], AllReduce("gloo", 1e-4, 1e9)), None, "auto")) == 6


@pytest.mark.parametrize(
    ("change", "status", "name", "says"),
    [
        ({"versions": {"python": "3.11.7", "torch": "2.12.1"}}, "error", "torch", "2.12.1 on n1"),
        ({"versions": {"python": "3.11.7"}}, "error", "torch", "none on n1"),
        ({"clock": 3.2}, "warn", "clocks", "n1 is 3.2 s ahead of node 0"),
        ({"clock": -3.2}, "warn", "clocks", "n1 is 3.2 s behind node 0"),
        ({"name_resolves_to": "127.0.1.1"}, "warn", "host name", "n1 resolves its own name to 127.0.1.1"),
        ({"shared_memory": 2**26}, "warn", "/dev/shm", "n1 has 64 MiB free"),
        ({"links": {0: Link("10.0.0.1:9: timed out")}}, "error", "reach", "n1 cannot reach n0 at 10.0.0.1:9"),
        ({"checkpoint": "/x is not the folder of node 0"}, "error", "checkpoint_dir", "n1: /x is not"),
        ({"gpus": ["A"]}, "warn", "GPUs", "n0: none; n1: A"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_host(
    change: dict[str, object], status: str, name: str, says: str
) -> None:
    (finding,) = found(host(0), host(1, **change))
    assert (finding.status, finding.name) == (status, name)
    assert says in finding.message
    assert finding.remedy


def test_a_name_that_is_loopback_does_not_matter_to_hosts_that_meet_there() -> None:
    local = {"name_resolves_to": "127.0.1.1", "address": "127.0.0.1"}
    assert found(host(0, **local), host(1, **local)) == []


def test_a_slow_link_is_named_and_a_clock_that_may_be_right_is_not() -> None:
    """Of three hosts; every way to n2 is slow, one of them both ways."""
    hosts = [replace(host(0), node=n, host=f"n{n}", links={}) for n in range(3)]
    for a in hosts:
        a.links = {b.node: Link("", 1e-4, 1e8 if b.node == 2 else 1e9) for b in hosts if b is not a}
    slow = found(*hosts)
    assert [f.message.partition(":")[0] for f in slow] == ["n0 to n2", "n1 to n2"]
    assert all(f.remedy.startswith("Look at n2:") for f in slow)
    assert found(host(0), host(1, clock=1.5, clock_error=0.6)) == []


def test_gpus_that_are_missing_are_counted() -> None:
    (finding,) = found(host(0, gpus=["A", "A"]), host(1, gpus=["A"]), wanted=2)
    assert (finding.status, finding.message) == ("error", "2 per host requested: n1 has 1")


@pytest.mark.parametrize(
    ("device", "status", "says"),
    [
        ("auto", "warn", "no GPU on any host, 2 per host requested"),
        ("cuda", "error", "2 per host requested: n0 has 0, n1 has 0"),
        ("cpu", "ok", "none: the same on all hosts"),
    ],
)
def test_no_gpu_anywhere_is_said(device: str, status: str, says: str) -> None:
    findings = judge(Survey([host(0), host(1)], AllReduce("gloo", 1e-4, 1e9)), 2, device)
    (finding,) = [f for f in findings if f.name == "GPUs"]
    assert finding.status == status
    assert finding.message.startswith(says)


def test_a_collective_that_fails_is_an_error() -> None:
    (finding,) = found(host(0), host(1), reduced=AllReduce("gloo", error="no route"))
    assert (finding.status, finding.message) == ("error", "gloo: no route")
    (finding,) = [f for f in judge(Survey([host(0), host(1)], None), None, "auto") if f.status == "error"]
    assert finding.message == "not tried: hosts cannot reach each other"


@pytest.mark.starts_processes
@pytest.mark.parametrize("meeting", ["127.0.0.1", socket.gethostname()])
def test_two_hosts_meet_measure_and_agree(meeting: str, tmp_path: Path) -> None:
    """Under its own name, too, which many a host has on loopback: to others that is no address."""
    place = ["--num-nodes", "2", "--rdzv-endpoint", f"{meeting}:{free_port()}"]
    words = [sys.executable, "-m", "distributed.cli", "preflight", "--device", "cpu", *place]
    words += ["--checkpoint-dir", str(tmp_path), "--json", "--node-rank"]
    both = [
        commands.start([*words, number], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for number in ("0", "1")
    ]
    first, second = commands.finish(both, timeout=120)
    survey = json.loads(first[0][first[0].index("{") :])
    assert "node 1 is done; node 0" in second[0]
    assert [facts["node"] for facts in survey["hosts"]] == [0, 1]
    for facts in survey["hosts"]:
        alone = is_loopback(meeting) or not own_addresses()
        assert is_loopback(facts["address"]) == alone
    assert all(link["bandwidth"] > 0 for facts in survey["hosts"] for link in facts["links"].values())
    assert survey["all_reduce"]["transport"] == "gloo"
    assert survey["all_reduce"]["bandwidth"] > 0
    assert {f["status"] for f in survey["findings"]} <= {"ok", "warn"}
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_is_a_finding(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    place = ["--num-nodes", "1", "--checkpoint-dir", f"{tmp_path}/file/run", "--json"]
    assert main(["preflight", "--device", "cpu", *place]) == 1
    out = capfd.readouterr().out
    (finding,) = [f for f in json.loads(out[out.index("{") :])["findings"] if f["name"] == "checkpoint_dir"]
    assert finding["status"] == "error"
    assert f"cannot write to {tmp_path}/file/run" in finding["message"]


def test_hosts_that_do_not_answer_are_named_in_the_time_there_is() -> None:
    """The others wait for what this one found, and would end before it if each took its full patience."""
    with listen("127.0.0.1", 0) as silent:
        place = ("127.0.0.1", int(silent.getsockname()[1]))
        links = measure_links(0, {0: place, 1: place, 2: place, 3: place}, 0.3)
    assert list(links) == [1, 2, 3]
    assert "timed out" in links[1].error
    assert all("not tried" in links[other].error for other in (2, 3))


def test_a_host_that_does_not_come_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    place = ["--num-nodes", "2", "--node-rank", "0", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    assert main(["preflight", "--device", "cpu", *place, "--wait", "1"]) == 2
    assert "ranks 1 of 2 did not join within 1 s" in capfd.readouterr().err


def test_it_says_what_it_needs(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["preflight", "--num-nodes", "2"]) == 2
    assert "--node-rank 0, 1, ... and --rdzv-endpoint" in capfd.readouterr().err
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert main(["preflight"]) == 2
    assert "torchrun --nproc-per-node=1" in capfd.readouterr().err
