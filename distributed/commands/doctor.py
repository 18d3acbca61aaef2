"""``doctor``: known trouble of this machine and installation, each with its remedy."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

from distributed.commands.tables import print_json, print_table
from distributed.operations.doctor import Finding

Check = Callable[[], Iterable[Finding]]

_STYLES = {"ok": "", "warn": "yellow", "error": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``doctor``."""
    parser.add_argument("--json", action="store_true", help="Print JSON instead of a table.")
    parser.add_argument(
        "--no-allreduce", action="store_true", help="Skip the test of an all-reduce between two ranks."
    )
    parser.add_argument(
        "--presets",
        action="store_true",
        help="Print only the variables of NCCL and gloo for this host, as export lines; nothing is set.",
    )


def run(args: argparse.Namespace) -> int:
    """Print every finding; 1 when one is an error."""
    if args.presets:
        from distributed.operations.doctor.check_transports import export_lines

        print("\n".join(export_lines()))
        return 0
    findings = examine(checks(allreduce=not args.no_allreduce))
    if args.json:
        print_json([asdict(finding) for finding in findings])
    else:
        print_findings(findings)
    return int(any(finding.status == "error" for finding in findings))


def print_findings(findings: Sequence[Finding]) -> None:
    """Print `findings` as a table, problems in colour."""
    rows = [[f.status, f.name, f.message, f.remedy] for f in findings]
    print_table(["status", "check", "finding", "remedy"], rows, [_STYLES[f.status] for f in findings])


def checks(allreduce: bool = True) -> list[Check]:
    """Every check, in the order of printing; a new one is a function in this list."""
    from distributed.operations.doctor import check_installation as installation
    from distributed.operations.doctor import check_machine as machine
    from distributed.operations.doctor import check_transports as transports

    found: list[Check] = [
        installation.python,
        installation.packages,
        installation.import_name,
        installation.kernels_name,
        installation.plugins,
        installation.backends,
        machine.devices,
        machine.ports,
        machine.name_server,
        machine.rendezvous,
        machine.shared_memory,
        machine.open_files,
        machine.temporary_folder,
        transports.transports,
        transports.presets,
        transports.conflicts,
    ]
    return [*found, machine.allreduce] if allreduce else found


def examine(todo: Sequence[Check]) -> list[Finding]:
    """Findings of all checks; a check that raises becomes a finding of its own."""
    findings: list[Finding] = []
    for check in todo:
        try:
            findings += check()
        except Exception as error:  # noqa: BLE001 - the other checks still run
            name = check.__name__.replace("_", " ")
            findings.append(
                Finding(name, "error", f"the check itself failed: {type(error).__name__}: {error}")
            )
    return findings
