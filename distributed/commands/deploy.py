"""``deploy``: write the files with which a cluster runs this configuration."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from distributed.commands.corrections import refuse_unknown
from distributed.commands.flags import add_config_flags, add_model_flags, collect_layers, collect_model
from distributed.commands.script import find_script
from distributed.errors import UserError


class Target(NamedTuple):
    """One kind of cluster.

    Attributes:
        module: module of its settings and `render`, imported when the target is used.
        settings: the name of its settings' class.
        summary: one line for ``--help``.
        asks_for_ranks: it has to know how many ranks there are.
    """

    module: str
    settings: str
    summary: str
    asks_for_ranks: bool = True


TARGETS = {
    "slurm": Target(
        "distributed.operations.deploy.slurm", "SlurmSettings", "Write a batch script that requeues itself."
    ),
    "kubernetes": Target(
        "distributed.operations.deploy.kubernetes.render",
        "KubernetesSettings",
        "Write manifests for kubectl apply -k.",
    ),
    "docker": Target(
        "distributed.operations.deploy.docker",
        "DockerSettings",
        "Write the files that build an image.",
        False,
    ),
    "ray": Target(
        "distributed.operations.deploy.ray_cluster",
        "RaySettings",
        "Write a Ray job, for an existing cluster or a new one over ssh.",
    ),
}

_EPILOG = "Arguments after `--` go to the script. Flags such as --num-nodes set the job's resources."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the targets of ``deploy`` and their flags."""
    targets = parser.add_subparsers(title="targets", metavar="TARGET", dest="target", required=True)
    for name, target in TARGETS.items():
        own = targets.add_parser(name, help=target.summary, description=target.summary, epilog=_EPILOG)
        own.set_defaults(passes_arguments_on=True)
        own.add_argument(
            "--output", metavar="DIR", required=True, help="Output directory; created if missing."
        )
        own.add_argument("--script", metavar="FILE", help="Script to train. Default: the bundled digits.py.")
        own.add_argument("--force", action="store_true", help="Overwrite existing files.")
        own.add_argument(
            "--settings", metavar="FILE", help="YAML file with the settings below; flags override it."
        )
        group = own.add_argument_group(f"settings of {name}")
        add_model_flags(group, getattr(import_module(target.module), target.settings))
        add_config_flags(own)


def run(args: argparse.Namespace) -> int:
    """Render, then write; nothing is written when anything is wrong.

    Raises:
        UserError: a wrong value, a job that no cluster could run, files that exist.
    """
    from distributed.operations.deploy.files import write
    from distributed.operations.deploy.job import make_job
    from distributed.operations.deploy.settings import read_settings
    from distributed.registry.catalog import get_catalog

    if args.unknown:
        refuse_unknown(args.unknown, args.parser)
    target = TARGETS[args.target]
    module: Any = import_module(target.module)
    settings = read_settings(getattr(module, target.settings), args.settings, collect_model(args))
    if not args.output or "\0" in args.output or not args.output.isprintable():
        raise UserError("not a directory name", field="--output", got=args.output)
    output = Path(args.output)
    script = None if args.script is None else find_script(args.script)
    named = args.script or ""
    job = make_job(
        collect_layers(args), script, named, args.rest, get_catalog(), asks_for_ranks=target.asks_for_ranks
    )
    rendered = module.render(job, settings, output)
    for path in write(rendered, output, args.force):
        print(f"wrote {path}")
    for note in rendered.notes:
        print(f"note: {note}")
    print(f"submit with: {rendered.submit}")
    return 0
