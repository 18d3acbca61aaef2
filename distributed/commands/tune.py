"""``tune``: search for hyperparameters of a script, or of the bundled example."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.commands.corrections import refuse_unknown, script_words
from distributed.commands.parser import PROG, add_set
from distributed.commands.script import bundled_script, execute, find_script
from distributed.commands.tables import print_json, print_table
from distributed.config import DistributedConfig, Layer, load_layers, parse_assignments, read_file
from distributed.config.load import as_layers, native_names, nested, top_fields
from distributed.config.script_overlay import active
from distributed.errors import UserError, did_you_mean
from distributed.operations.report.formats import cell
from distributed.operations.tuning.parameter_use import SampledParameters, watched_arguments

if TYPE_CHECKING:
    from distributed.operations.tuning.trial_record import Trial
    from distributed.operations.tuning.tuner import DistributedTuner

__all__ = ["ScriptTrial", "add_arguments", "run"]

_EPILOG = """
The file holds configuration fields as for `train`, and a section `tune:` with search_space, num_samples and
the other arguments of DistributedTuner. The script runs once in each trial. Sampled configuration fields
override the script's configuration; other sampled values reach it as arguments: hidden_size becomes
--hidden-size. Arguments after `--` are passed to the script in every trial. An unknown argument before `--`
is an error.
"""

_OPTIONS = (
    "num_samples",
    "metric",
    "mode",
    "scheduler",
    "scheduler_options",
    "grace_period",
    "max_epochs",
    "num_gpus",
    "num_cpus",
    "trials_per_gpu",
    "ranks_per_trial",
    "max_concurrent",
    "checkpoints",
    "output_dir",
    "name",
    "seed",
    "time_limit",
    "mlflow",
    "tensorboard",
    "address",
)
"""Keys of `tune:` besides `search_space`."""

_FLAGS = {
    "num_samples": ("N", "Number of samples of the search space; grids multiply it. Default: 10."),
    "metric": ("NAME", "Metric to optimize. Default: val_accuracy, else val_loss."),
    "mode": ("{auto,max,min}", "Whether more is better. Default: auto, by the name."),
    "scheduler": (
        "{asha,pbt}",
        "asha: stop poor trials early; pbt: continue them from good trials. Default: no scheduler.",
    ),
    "grace_period": ("N", "Epochs before asha stops a trial, and between changes of pbt. Default: 1."),
    "max_epochs": ("N", "Maximum epochs per trial."),
    "num_gpus": (
        "N",
        "GPUs for all trials together; without a GPU, CPU slots. Default: all that are available.",
    ),
    "trials_per_gpu": ("N", "Trials that share a GPU. Default: 1."),
    "ranks_per_trial": ("N", "Ranks of each trial. Default: the configuration's, else 1."),
    "max_concurrent": ("N", "Maximum number of concurrent trials."),
    "seed": ("N", "Seed of the samples. Default: 0."),
    "time_limit": ("SECONDS", "Time after which all trials are stopped."),
    "output_dir": ("DIR", "The search's folder. Default: tuned/ and the time."),
    "address": (
        "TEXT",
        "Ray cluster: auto, HOST:PORT or ray://HOST:PORT. Default: a new one on this host.",
    ),
}
_TEXT = ("metric", "mode", "scheduler", "output_dir", "address")
_OPTION = "tune:"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``tune``."""
    parser.usage = f"{parser.prog} --config FILE [--script FILE] [flags] [-- arguments of the script]"
    parser.epilog = _EPILOG
    parser.add_argument("--config", metavar="FILE", required=True, help="YAML file with a section `tune:`.")
    parser.add_argument(
        "--script", metavar="FILE", help="Python script to run. Default: the bundled digits.py."
    )
    parser.add_argument("--resume", action="store_true", help="Resume the search in --output-dir.")
    add_set(parser, "Set any configuration field of the trials; overrides the file. Repeatable.")
    parser.add_argument("--json", action="store_true", help="Print the trials as JSON.")
    for name, (metavar, text) in _FLAGS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, dest=_OPTION + name, metavar=metavar, help=text)
    parser.set_defaults(passes_arguments_on=True)


def run(args: argparse.Namespace) -> int:
    """Run the search, show its trials, and print how to train with the best.

    Raises:
        UserError: a wrong value, or whatever `DistributedTuner` refuses.
        WorkerError: every trial failed.
    """
    from distributed.operations.tuning.tuner import DistributedTuner

    script = bundled_script() if args.script is None else find_script(args.script)
    if args.script is None and args.unknown:
        refuse_unknown(args.unknown, args.parser)
    arguments = script_words(args)
    values, options = _read(args.config)
    options |= _flags(args)
    layers = [Layer(f"file {args.config}", values), Layer("--set", parse_assignments(args.set))]
    config = load_layers(layers)
    options.setdefault("ranks_per_trial", config.num_ranks or 1)
    num_samples = options.pop("num_samples", 10)
    space = options.pop("search_space")
    tuner = DistributedTuner(
        ScriptTrial(str(script), arguments), space, config=_explicit(config), resume=args.resume, **options
    )
    tuner.tune(num_samples)
    _show(tuner, args, layers, arguments)
    return 0


class ScriptTrial:
    """A `train_fn` that runs a script: sampled fields override its configuration, others are arguments.

    Args:
        script: absolute path.
        arguments: arguments of every trial.
    """

    def __init__(self, script: str, arguments: list[str]) -> None:
        self.script, self.arguments = script, arguments

    def __call__(self, sampled: dict[str, Any]) -> None:
        """Run the script with one sample.

        Raises:
            UserError: the script never called `fit`.
        """
        run = active()
        assert run is not None
        fields, own = split(sampled)
        run.layers = [Layer("sample", fields)]
        try:
            with watched_arguments({name: as_flag(name) for name in own}) as unread:
                execute(Path(self.script), [*self.arguments, *as_arguments(own)])
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        if isinstance(sampled, SampledParameters):
            sampled.unread = unread
        if not run.num_fits:
            raise UserError(
                f"{Path(self.script).name} ended without calling `fit`",
                field="--script",
                got=self.script,
            )


def split(sampled: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fields of the configuration, the rest)."""
    known = top_fields()
    fields = {name: value for name, value in sampled.items() if name.partition(".")[0] in known}
    return fields, {name: value for name, value in sampled.items() if name not in fields}


def as_arguments(own: Mapping[str, Any]) -> list[str]:
    """``{"hidden_size": 8}`` -> ``["--hidden-size", "8"]``."""
    return [word for name, value in own.items() for word in (as_flag(name), str(value))]


def as_flag(name: str) -> str:
    """``hidden_size`` -> ``--hidden-size``."""
    return f"--{name.replace('_', '-')}"


def _read(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(configuration fields, the part ``tune:``) of a file."""
    values = dict(read_file(path).values)
    options = values.pop("tune", None)
    if not isinstance(options, dict) or not options.get("search_space"):
        raise UserError(
            "the file has no section `tune:` with a search_space",
            field="--config",
            got=path,
            remedy="Add one, e.g. tune: {search_space: {learning_rate: {loguniform: [1e-4, 1e-1]}}}",
        )
    for name in options:
        if name != "search_space" and name not in _OPTIONS:
            raise UserError(
                f"unknown option '{name}'.{did_you_mean(str(name), ['search_space', *_OPTIONS])}",
                field=f"tune.{name}",
                allowed=", ".join(["search_space", *_OPTIONS]),
            )
    return values, {name: value for name, value in options.items() if value is not None}


def _flags(args: argparse.Namespace) -> dict[str, Any]:
    given = {
        n.removeprefix(_OPTION): v for n, v in vars(args).items() if n.startswith(_OPTION) and v is not None
    }
    return {name: value if name in _TEXT else _number(name, value) for name, value in given.items()}


def _number(name: str, text: str) -> int | float:
    try:
        return float(text) if name == "time_limit" else int(text)
    except ValueError:
        flag = f"--{name.replace('_', '-')}"
        raise UserError("not a number", field=flag, got=text, allowed="1, 2, 3, ...") from None


def _explicit(config: DistributedConfig) -> dict[str, Any]:
    """Explicitly set values, as in a file."""
    # What a native configuration repeats is in that itself.
    layers = [layer for layer in as_layers(config) if layer.origin not in native_names()]
    return nested({name: value for layer in layers for name, value in layer.values.items()})


# -- what came of it -----------------------------------------------------------------


def _show(
    tuner: DistributedTuner, args: argparse.Namespace, layers: list[Layer], arguments: list[str]
) -> None:
    if args.json:
        print_json({"best": tuner.best.name, "trials": [trial.to_dict() for trial in tuner.results]})
        return
    metric = tuner.best.metric or "value"
    names = list(dict.fromkeys(name for trial in tuner.results for name in trial.parameters))
    print_table(
        ["trial", metric, "epochs", "seconds", "status", *names],
        [_row(trial, names) for trial in tuner.results],
        ["bold" if trial is tuner.best else "" for trial in tuner.results],
    )
    best = ", ".join(f"{name}={cell(value)}" for name, value in tuner.best_parameters.items())
    print(f"best: trial {tuner.best.name}, {metric} {cell(tuner.best.value)}: {best}")
    for line in _how_to_train(tuner, args, layers, arguments):
        print(line)


def _how_to_train(
    tuner: DistributedTuner, args: argparse.Namespace, layers: list[Layer], arguments: list[str]
) -> list[str]:
    """Write the best configuration to a file, and print the command that uses it."""
    import yaml

    from distributed.system.private_files import write_private

    fields, own = split(tuner.best_parameters)
    if tuner.best.ranks is not None:
        # On more ranks the global batch differs from the one that the learning rate was tuned for.
        fields["num_processes"] = tuner.best.ranks
    config = load_layers([*layers, Layer("sample", fields)])
    path = tuner.output_dir / "best.yaml"
    plain = json.loads(json.dumps(_explicit(config), default=str))
    write_private(path, yaml.safe_dump(plain, sort_keys=False).encode())
    words = [
        *PROG.split(),
        "train",
        *(["--script", args.script] if args.script else []),
        "--config",
        str(path),
    ]
    rest = [*arguments, *as_arguments(own)]
    lines = ["train with it:", f"  {shlex.join([*words, *(['--', *rest] if rest else [])])}"]
    if tuner.best.checkpoint:
        lines += ["its best checkpoint:", f"  {tuner.best.checkpoint}"]
    try:
        lines += ["plot of the search:", f"  {tuner.plot(tuner.output_dir / 'search.html')}"]
    except UserError as error:
        lines.append(f"no plot: {error}")
    return lines


def _row(trial: Trial, names: list[str]) -> list[str]:
    epochs = sum("epoch" in report for report in trial.reports)
    figures = [cell(trial.value), str(epochs), f"{trial.seconds:.1f}", trial.status]
    return [trial.name, *figures, *(cell(trial.parameters.get(name)) for name in names)]
