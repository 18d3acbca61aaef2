"""``train``: run a script, or the bundled example, with configuration overrides."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from distributed.commands.corrections import move_behind, refuse_unknown, script_words
from distributed.commands.flags import add_config_flags, collect_layers, field_of
from distributed.commands.script import bundled_script, execute, find_script
from distributed.config import DistributedConfig, Layer, load_layers
from distributed.config.script_overlay import ScriptRun, command_line
from distributed.errors import UserError

_EPILOG = """
Flags override the script's own configuration. Arguments after `--` are passed to the script unchanged. An
unknown argument before `--` is an error.
"""


_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Fields that starting ranks needs; without our Trainer, the others would be ignored.
_RANK_FIELDS = {
    "backend",
    "collective_timeout",
    "communication_backend",
    "device",
    "gpus_per_node",
    "launch",
    "node_rank",
    "num_gpus",
    "num_nodes",
    "num_processes",
    "rdzv_endpoint",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``train``."""
    parser.usage = f"{parser.prog} [--script FILE] [flags] [-- arguments of the script]"
    parser.epilog = _EPILOG
    parser.add_argument(
        "--script", metavar="FILE", help="Python script to run. Default: the bundled digits.py."
    )
    parser.add_argument("--dry-run", action="store_true", help="Print the plan instead of training.")
    parser.set_defaults(passes_arguments_on=True)
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the script once in this process; `fit` starts the ranks.

    Raises:
        UserError: a wrong value, no such script, or a script that never called `fit`.
    """
    script = bundled_script() if args.script is None else find_script(args.script)
    if args.script is None and args.unknown:
        refuse_unknown(args.unknown, args.parser)
    arguments = script_words(args)
    layers = collect_layers(args)
    _check_values(layers)
    if _launch(layers) == "per-rank":
        _check_reach(layers, args)
        return _run_per_rank(load_layers(layers), script, arguments, args.dry_run)
    if not args.dry_run:
        _begin_imports(layers, script)
    with command_line(ScriptRun(layers, args.dry_run)) as script_run:
        try:
            execute(script, arguments)
        except Exception as error:
            if script_run.num_fits == 0 and _expects_launcher(error):
                error.add_note(
                    "The script expects what a launcher sets for each rank. `--launch per-rank` starts the"
                    " script itself on every rank, as torchrun does"
                )
            raise
    if script_run.num_fits == 0:
        raise UserError(
            f"{script.name} ended without calling `fit`, so nothing was trained",
            field="--script",
            remedy="Call `Trainer(...).fit(...)` in it, or use `--launch per-rank` to start"
            " the script itself on every rank, as torchrun does",
        )
    return 0


def _expects_launcher(error: Exception) -> bool:
    """Return whether a script failed because it is no rank: torch names the variable that it misses, and a
    look-up in ``os.environ`` raises a KeyError."""
    if isinstance(error, KeyError):
        return error.args[:1] in [(name,) for name in _OF_LAUNCHERS]
    text = str(error)
    return any(f"environment variable {name} expected" in text for name in _OF_LAUNCHERS)


def _check_values(layers: Sequence[Layer]) -> None:
    """Report a wrong value before the script spends minutes reading its data."""
    from distributed.registry.catalog import get_catalog

    try:
        config = load_layers(layers)
    except UserError as error:
        # Values that only contradict each other (`--resume` without a folder) may be
        # completed by the script's configuration; the Trainer checks both together.
        if error.field != "config":
            raise
        return
    if config.is_explicit("backend") and config.launch != "per-rank":
        get_catalog().backend(config.backend)


def _begin_imports(layers: Sequence[Layer], script: Path) -> None:
    """Import the ranks' framework in another process while the script builds its model in this one."""
    from distributed.launch.warm_start import begin_early
    from distributed.registry.catalog import get_catalog

    with suppress(UserError):  # reported where the script's own configuration is known
        config = load_layers(layers)
        begin_early(config, get_catalog().backend(config.backend), script)


def _check_reach(layers: Sequence[Layer], args: argparse.Namespace) -> None:
    """Refuse flags for a Trainer, which ``per-rank`` does not use."""
    typed = [name for layer in layers if layer.origin in ("flag", "--set") for name in layer.values]
    lost = sorted(set(typed) - _RANK_FIELDS)
    if lost:
        behind = move_behind(args, lambda action: action is not None and field_of(action) in lost)
        flags_alone = not any(layer.origin == "--set" and set(lost) & set(layer.values) for layer in layers)
        raise UserError(
            f"--launch per-rank runs the script without Trainer, so these fields would be ignored:"
            f" {', '.join(lost)}",
            field="--launch",
            got="per-rank",
            remedy=f"Pass arguments of the script after `--`: `{behind}`; for a"
            " script with a Trainer, leave out --launch per-rank"
            if flags_alone
            else "Leave them out, or leave out --launch per-rank",
        )


def _launch(layers: Sequence[Layer]) -> object:
    said = [layer.values["launch"] for layer in layers if "launch" in layer.values]
    return said[-1] if said else "auto"


def _run_per_rank(config: DistributedConfig, script: Path, arguments: list[str], dry_run: bool) -> int:
    if dry_run:
        ranks = "one per device" if config.num_ranks is None else str(config.num_ranks)
        print(f"would start {' '.join([script.name, *arguments])} on every rank; ranks: {ranks}")
        return 0
    from distributed.launch.run import run_script

    return run_script(config, str(script), arguments)
