"""Variables for NCCL and gloo: one row for each kind of host, read from a tree like that of the kernel."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from distributed.cli import main
from distributed.operations.doctor import check_transports, transport_conflicts
from distributed.operations.doctor.check_transports import (
    conflicts,
    export_lines,
    presets,
    transports,
    wanted,
)
from distributed.operations.doctor.hardware import HostHardware, Interface, RdmaPort, read_hardware
from distributed.operations.doctor.transport_presets import PRESETS, chosen_interface

DOCS = Path(__file__).parents[2] / "docs" / "transports.md"
SEEDS = (
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_SL",
    "NCCL_IB_TC",
    "NCCL_NET_GDR_LEVEL",
)
"""Names of the seeds that have no preset on every host; the page has a row for each."""


# Trees


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def gpus(root: Path, count: int, model: str = "NVIDIA H100 80GB HBM3") -> None:
    for index in range(count):
        write(
            root,
            {f"proc/driver/nvidia/gpus/0000:{index:02x}:00.0/information": f"Model: \t\t {model}\nIRQ: 1"},
        )


def interface(root: Path, name: str, speed: int | None = None, state: str = "up", kind: int = 1) -> None:
    folder = f"sys/class/net/{name}"
    write(root, {f"{folder}/type": str(kind), f"{folder}/operstate": state})
    if speed is not None:
        write(root, {f"{folder}/speed": str(speed), f"{folder}/device/vendor": "0x15b3"})


def route(root: Path, name: str) -> None:
    head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"
    rows = [f"{name}\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0"]
    rows.append("ib0\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0")
    write(root, {"proc/net/route": "\n".join([head, *rows])})


def port(
    root: Path, device: str, layer: str = "InfiniBand", state: str = "4: ACTIVE", driver: str = "mlx5_core"
) -> None:
    folder = f"sys/class/infiniband/{device}"
    write(root, {f"{folder}/ports/1/link_layer": layer, f"{folder}/ports/1/state": state})
    write(root, {f"drivers/{driver}/bind": "", f"dev/infiniband/uverbs{device[-1]}": ""})
    (root / folder / "device").mkdir()
    (root / folder / "device/driver").symlink_to(root / "drivers" / driver)


def gid(root: Path, device: str, index: int, kind: str, address: str) -> None:
    folder = f"sys/class/infiniband/{device}/ports/1"
    write(root, {f"{folder}/gid_attrs/types/{index}": kind, f"{folder}/gids/{index}": address})


def infiniband_host(root: Path) -> None:
    """Eight GPUs on NVSwitch, eight active InfiniBand ports and an Ethernet port of the same make."""
    gpus(root, 8)
    write(root, {"dev/nvidia-nvswitch0": "", "dev/shm/.keep": ""})
    for index in range(8):
        port(root, f"mlx5_{index}")
    port(root, "mlx5_8", "Ethernet")
    port(root, "mlx5_9", state="1: DOWN")
    interface(root, "lo", kind=772, state="unknown")
    interface(root, "eno1", 25_000)
    interface(root, "ib0", 400_000, kind=32)
    interface(root, "docker0")
    route(root, "eno1")


def roce_host(root: Path) -> None:
    """Eight GPUs, two RoCE ports; the RoCE v2 GID with an IPv4 address is number 3."""
    gpus(root, 8)
    interface(root, "ens1f0", 100_000)
    route(root, "ens1f0")
    for device in ("mlx5_0", "mlx5_1"):
        port(root, device, "Ethernet")
        gid(root, device, 0, "IB/RoCE v1", "fe80:0000:0000:0000:0ac0:ebff:fe12:3456")
        gid(root, device, 1, "RoCE v2", "fe80:0000:0000:0000:0ac0:ebff:fe12:3456")
        gid(root, device, 2, "IB/RoCE v1", "0000:0000:0000:0000:0000:ffff:0a00:0001")
        gid(root, device, 3, "RoCE v2", "0000:0000:0000:0000:0000:ffff:0a00:0001")


def efa_host(root: Path) -> None:
    """A cloud host whose RDMA devices are EFA's."""
    gpus(root, 8, "NVIDIA A100-SXM4-40GB")
    write(root, {"dev/nvidia-nvswitch0": ""})
    for index in range(4):
        port(root, f"rdmap{index}s0", "Unspecified", driver="efa")
    interface(root, "ens32", -1)
    route(root, "ens32")


def accelerated_machine(root: Path) -> None:
    """A virtual machine whose Ethernet device also shows as RoCE, without a GID that NCCL could use."""
    gpus(root, 4)
    interface(root, "eth0", 50_000)
    route(root, "eth0")
    port(root, "mlx5_0", "Ethernet")
    gid(root, "mlx5_0", 0, "IB/RoCE v1", "fe80:0000:0000:0000:0ac0:ebff:fe12:3456")


def workstation(root: Path) -> None:
    """Two GPUs on PCIe, a network of 100 Gbit/s, no RDMA."""
    gpus(root, 2, "NVIDIA RTX 6000 Ada Generation")
    interface(root, "enp5s0", 100_000)
    interface(root, "enp6s0", 1_000, state="down")


def laptop(root: Path) -> None:
    """No GPU; Wi-Fi."""
    interface(root, "lo", kind=772, state="unknown")
    interface(root, "wlp2s0", -1)
    route(root, "wlp2s0")


def container(root: Path) -> None:
    """Two GPUs and InfiniBand in a container that has neither its device files nor enough shared memory."""
    infiniband_host(root)
    shutil.rmtree(root / "dev/infiniband")
    write(root, {".dockerenv": "", "proc/sys/kernel/osrelease": "5.15.0-generic"})


def wsl(root: Path) -> None:
    """Windows Subsystem for Linux: GPUs without files in /proc."""
    interface(root, "eth0", 10_000)
    write(root, {"proc/sys/kernel/osrelease": "5.15.153.1-microsoft-standard-WSL2"})


PCIE = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-15\nGPU1\tPHB\t X \t0-15\n"
NVLINK = PCIE.replace("PHB", "NV4")


def host(build: Callable[[Path], None], root: Path, nccl: tuple[int, int] | None = (2, 28)) -> HostHardware:
    root.mkdir()
    build(root)
    return replace(read_hardware(root, lambda: PCIE), nccl=nccl, cores=64)


# What is read


def test_the_facts_of_an_infiniband_host(tmp_path: Path) -> None:
    found = host(infiniband_host, tmp_path / "root")
    assert found.gpus == ("NVIDIA H100 80GB HBM3",) * 8
    assert (found.nvlink, found.route, found.verbs, found.container, found.wsl) == (
        True,
        "eno1",
        True,
        False,
        False,
    )
    assert found.interfaces == (
        Interface("docker0", "virtual"),
        Interface("eno1", "ethernet", True, 25_000),
        Interface("ib0", "infiniband", True, 400_000),
        Interface("lo", "loopback"),
    )
    assert found.rdma[7:] == (
        RdmaPort("mlx5_7", 1, "InfiniBand"),
        RdmaPort("mlx5_8", 1, "RoCE"),
        RdmaPort("mlx5_9", 1, "InfiniBand", active=False),
    )


def test_the_gid_of_roce_v2_is_that_with_an_ipv4_address(tmp_path: Path) -> None:
    assert [one.roce_v2_gid for one in host(roce_host, tmp_path / "root").rdma] == [3, 3]


def test_links_between_gpus_come_from_nvidia_smi_without_a_switch(tmp_path: Path) -> None:
    workstation(tmp_path)
    seen = {text: read_hardware(tmp_path, lambda text=text: text).nvlink for text in (PCIE, NVLINK, "")}  # type: ignore[misc]
    assert seen == {PCIE: False, NVLINK: True, "": None}


def test_an_empty_tree_has_no_facts(tmp_path: Path) -> None:
    found = read_hardware(tmp_path)
    assert (found.gpus, found.interfaces, found.rdma, found.shared_memory) == ((), (), (), 0)
    assert wanted(found) == []
    assert list(conflicts(found, {})) == []


def test_this_host_can_be_read() -> None:
    assert any(one.kind == "loopback" for one in read_hardware().interfaces)


# Presets

OTHERS = {"GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}
"""The same interface as NCCL's, on each host."""

EXPECTED: dict[Callable[[Path], None], dict[str, str]] = {
    infiniband_host: {
        "NCCL_SOCKET_IFNAME": "=eno1",
        "NCCL_IB_HCA": "=" + ",".join(f"mlx5_{index}:1" for index in range(8)),
        "OMP_NUM_THREADS": "8",
    },
    roce_host: {
        "NCCL_SOCKET_IFNAME": "=ens1f0",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
        "OMP_NUM_THREADS": "8",
    },
    efa_host: {"NCCL_SOCKET_IFNAME": "=ens32", "OMP_NUM_THREADS": "8"},
    accelerated_machine: {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_IB_DISABLE": "1", "OMP_NUM_THREADS": "16"},
    workstation: {
        "NCCL_SOCKET_IFNAME": "=enp5s0",
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "4",
        "OMP_NUM_THREADS": "32",
    },
    laptop: {"GLOO_SOCKET_IFNAME": "wlp2s0"},
    container: {"NCCL_SOCKET_IFNAME": "=eno1", "OMP_NUM_THREADS": "8"},
    wsl: {"GLOO_SOCKET_IFNAME": "eth0"},
}


@pytest.mark.parametrize("build", EXPECTED, ids=lambda build: build.__name__)
def test_the_presets_of_a_host(build: Callable[[Path], None], tmp_path: Path) -> None:
    found = host(build, tmp_path / "root")
    values = {name: value for name, value, _, _ in wanted(found)}
    expected = EXPECTED[build]
    chosen = expected.get("NCCL_SOCKET_IFNAME", "").removeprefix("=") or expected["GLOO_SOCKET_IFNAME"]
    assert values == {**expected, **dict.fromkeys(OTHERS, chosen)}
    # What is proposed for a host does not contradict it.
    assert list(conflicts(found, values)) == []


def test_an_older_nccl_gets_the_gid(tmp_path: Path) -> None:
    names = [name for name, _, _, _ in wanted(host(roce_host, tmp_path / "new", (2, 21)))]
    assert "NCCL_IB_GID_INDEX" not in names
    assert ("NCCL_IB_GID_INDEX", "3") in [
        row[:2] for row in wanted(host(roce_host, tmp_path / "old", (2, 20)))
    ]


def test_a_preset_says_what_is_set_now(tmp_path: Path) -> None:
    found = host(laptop, tmp_path / "root")
    texts = [
        next(iter(presets(found, environment))).message.partition(":")[0]
        for environment in ({}, {"GLOO_SOCKET_IFNAME": "wlp2s0"}, {"GLOO_SOCKET_IFNAME": "lo"})
    ]
    assert texts == ["wlp2s0 (unset now)", "wlp2s0 (set)", "wlp2s0 (set to lo now)"]


def test_the_lines_can_be_sourced_and_nothing_is_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = host(infiniband_host, tmp_path / "root")
    monkeypatch.setattr(check_transports, "_this_host", lambda: found)
    before = dict(os.environ)
    assert main(["doctor", "--presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == export_lines(found)
    assert [line for line in lines if not line.startswith("#")][:2] == [
        "export NCCL_SOCKET_IFNAME==eno1",
        "export GLOO_SOCKET_IFNAME=eno1",
    ]
    assert all(line.startswith(("# ", "export ")) for line in lines)
    assert dict(os.environ) == before


# Contradictions

FOUND: list[tuple[Callable[[Path], None], str, str, str]] = [
    (infiniband_host, "NCCL_SOCKET_IFNAME", "eth", "no interface eth on this host; there are docker0, eno1"),
    (infiniband_host, "NCCL_SOCKET_IFNAME", "=eno", "no interface eno on this host"),
    (infiniband_host, "GLOO_SOCKET_IFNAME", "eno", "no interface eno on this host"),
    (infiniband_host, "NCCL_SOCKET_IFNAME", "docker", "docker0 is virtual: other hosts cannot be reached"),
    (infiniband_host, "GLOO_SOCKET_IFNAME", "lo", "lo is loopback: other hosts cannot be reached"),
    (workstation, "NCCL_SOCKET_IFNAME", "=enp6s0", "enp6s0 is down: other hosts cannot be reached"),
    (infiniband_host, "NCCL_IB_HCA", "=mlx4_0", "no RDMA device mlx4_0"),
    (workstation, "NCCL_IB_HCA", "mlx5", "no RDMA device mlx5; there are none"),
    (infiniband_host, "NCCL_IB_DISABLE", "1", "8 active InfiniBand port(s) are not used"),
    (infiniband_host, "NCCL_P2P_DISABLE", "1", "GPUs with NVLink do not use it"),
    (infiniband_host, "NCCL_P2P_LEVEL", "LOC", "GPUs with NVLink do not use it"),
    (workstation, "NCCL_SHM_DISABLE", "1", "send through the network"),
    (roce_host, "NCCL_IB_GID_INDEX", "3", "NCCL 2.28 selects the GID itself"),
    (roce_host, "NCCL_NET_GDR_LEVEL", "LOC", "GPUDirect RDMA is off"),
    (workstation, "NCCL_ALGO", "Ring", "forced to Ring"),
    (workstation, "NCCL_PROTO", "LL", "forced to LL"),
    (laptop, "NCCL_TREE_THRESHOLD", "0", "NCCL has not read it since 2.5"),
    (workstation, "NCCL_NSOCKS_PERTHREAD", "65", "1 threads times 65 sockets are more than 64"),
    (laptop, "NCCL_DEBUG", "INFO", "logs from every rank"),
    (efa_host, "FI_PROVIDER", "tcp", "libfabric uses tcp although there is an EFA device"),
    (laptop, "NCCL_ASYNC_ERROR_HANDLING", "1", "torch has renamed it"),
]


@pytest.mark.parametrize(
    ("build", "name", "value", "message"), FOUND, ids=[f"{n}-{v}" for _, n, v, _ in FOUND]
)
def test_a_contradiction_is_found(
    build: Callable[[Path], None], name: str, value: str, message: str, tmp_path: Path
) -> None:
    (found,) = conflicts(host(build, tmp_path / "root"), {name: value})
    assert (found.name, found.status in ("warn", "error")) == (name, True)
    assert found.message.startswith(f"{value}: ")
    assert message in found.message
    assert found.remedy


SOUND = [
    (infiniband_host, "NCCL_SOCKET_IFNAME", "^docker,lo"),
    (infiniband_host, "NCCL_SOCKET_IFNAME", "en,ib"),
    (infiniband_host, "NCCL_IB_HCA", "mlx5"),
    (infiniband_host, "NCCL_IB_HCA", "^=mlx5_8"),
    (infiniband_host, "NCCL_IB_DISABLE", "0"),
    (workstation, "NCCL_IB_DISABLE", "1"),
    (workstation, "NCCL_P2P_DISABLE", "1"),
    (infiniband_host, "NCCL_NET_GDR_LEVEL", "PHB"),
    (infiniband_host, "NCCL_DEBUG", "WARN"),
    (efa_host, "FI_PROVIDER", "efa"),
    (laptop, "NCCL_ALGO", ""),
]


@pytest.mark.parametrize(("build", "name", "value"), SOUND, ids=[f"{n}-{v}" for _, n, v in SOUND])
def test_a_sound_value_is_none(build: Callable[[Path], None], name: str, value: str, tmp_path: Path) -> None:
    assert list(conflicts(host(build, tmp_path / "root"), {name: value})) == []


def test_a_mutant_that_ignores_the_equals_sign_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken form: `=eno` selects eno1, as a prefix would."""
    inner = transport_conflicts._selected
    monkeypatch.setattr(
        transport_conflicts,
        "_selected",
        lambda value, names, exact: inner(value.replace("=", ""), names, exact),
    )
    with pytest.raises(ValueError, match="not enough values to unpack"):
        test_a_contradiction_is_found(infiniband_host, "NCCL_SOCKET_IFNAME", "=eno", "", tmp_path)


# Hosts as a whole


def test_a_container_without_its_devices_is_told_what_it_lacks(tmp_path: Path) -> None:
    found = {
        one.name: one
        for one in transports(replace(host(container, tmp_path / "root"), shared_memory=64 << 20))
    }
    assert found["transports"].message.startswith("8 GPU(s), NVLink, mlx5_0:1 InfiniBand,")
    assert found["transports"].message.endswith("a container")
    assert "/dev/infiniband/uverbs*" in found["RDMA"].message
    assert found["NCCL shared memory"].message == "/dev/shm has 64 MiB; NCCL may not start"
    assert "--shm-size=1g --ulimit memlock=-1" in found["NCCL shared memory"].remedy


def test_wsl_is_told(tmp_path: Path) -> None:
    found = replace(host(wsl, tmp_path / "root"), gpus=("a", "b"))
    assert [one.name for one in transports(found)] == ["transports", "WSL"]


def test_without_a_default_route_ethernet_precedes_infiniband(tmp_path: Path) -> None:
    infiniband_host(tmp_path)
    (tmp_path / "proc/net/route").unlink()
    chosen = chosen_interface(read_hardware(tmp_path))
    assert chosen is not None
    assert chosen.name == "eno1"


def test_each_variable_has_a_row_in_the_docs() -> None:
    text = DOCS.read_text(encoding="utf-8")
    named = {one.name for one in PRESETS} | {
        name for one in transport_conflicts.CONFLICTS for name in one.names
    }
    assert [name for name in sorted({*named, *SEEDS}) if f"`{name}`" not in text] == []
