"""``plan``: predict memory and step time of a script's model, or of numbers, and choose the split."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distributed.commands.corrections import refuse_unknown, script_words
from distributed.commands.flags import add_config_flags, collect_layers
from distributed.commands.parser import PROG, positive_int
from distributed.commands.plan_checks import NUMBER, check_flags, number_of, steps_of
from distributed.commands.script import bundled_script, execute, find_script
from distributed.commands.tables import print_json, print_table
from distributed.config import DistributedConfig, Layer, load_layers
from distributed.config.script_overlay import ScriptRun, command_line
from distributed.errors import UserError

if TYPE_CHECKING:
    from distributed.operations.planning.options import PlanOptions
    from distributed.operations.planning.plans import Plans
    from distributed.trainer import Trainer

__all__ = ["add_arguments", "run"]

_EPILOG = """
Flags of the configuration are kept by every plan; what only the script sets is a start. Arguments after `--`
are passed to the script unchanged.
"""

_NUMBERS = {
    "parameters": "Number of parameters, such as 7e9.",
    "layers": "Number of blocks.",
    "hidden": "Width of the residual stream.",
    "heads": "Attention heads.",
    "kv_heads": "Heads of keys and values.",
    "ffn": "Width of a feed-forward layer.",
    "vocabulary": "Number of tokens.",
    "sequence": "Tokens of a sample. Default: 2048.",
    "head_size": "Width of a head.",
    "experts": "Experts of each block.",
    "experts_per_token": "Experts that compute a token.",
    "family": "Form of a block: llama or gpt. Default: llama.",
}
_SHOWN = 8
"""Most reasons that are printed without --rejected."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``plan``."""
    parser.usage = (
        f"{parser.prog} [--script FILE | numbers of a transformer] [flags] [-- arguments of the script]"
    )
    parser.epilog = _EPILOG
    flags = parser.add_argument
    flags("--script", metavar="FILE", help="Script whose model is planned. Default: the bundled digits.py.")
    flags(
        "--hardware",
        metavar="NAME|FILE",
        help="Hardware profile. Default: hardware.yaml here, else that of this machine's GPU, else CPU.",
    )
    flags("--devices", metavar="N", help="Number of devices, each with one rank. Default: those of a node.")
    flags("--plans", metavar="N", default="10", help="Number of plans to list. Default: 10.")
    flags("--codecs", metavar="A,B", default="", help="Gradient codecs to try; they change gradients.")
    flags("--axes", metavar="A,B", help="Axes along which there may be several ranks, such as data,tensor.")
    flags("--rejected", action="store_true", help="List every rejected split with its first reason.")
    flags("--number", metavar="N", help="Plan to write or to try. Default: 1, the fastest.")
    flags("--output", "-o", metavar="FILE", help="Write a plan as YAML, for `train --config`.")
    flags("--html", metavar="FILE", help="Write a page with the table and a picture.")
    flags("--verify", action="store_true", help="Train a few steps with the plan here, and compare.")
    flags("--steps", metavar="N", help="Steps of --verify. Default: 10.")
    flags("--verify-layers", metavar="N", help="Verify with so many blocks of the model only.")
    flags("--history", metavar="FOLDER", help="Print the error of all plans of the runs below a folder.")
    flags("--json", action="store_true", help="Print everything as JSON.")
    numbers = parser.add_argument_group("numbers of a transformer", "Instead of a script.")
    for name, text in _NUMBERS.items():
        flag = f"--{name.replace('_', '-')}"
        numbers.add_argument(flag, dest=NUMBER + name, metavar="N", help=text)
    parser.set_defaults(passes_arguments_on=True)
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Search, print the table, and write what was asked for.

    Raises:
        UserError: a wrong value, a script that never called `fit`, or a model that fits nowhere.
    """
    check_flags(args)
    if args.history is not None:
        _refuse_rest(args)
        _print_history(args)
        return 0
    if args.html is not None:
        from distributed.operations.report.html import check_plotly

        check_plotly("the page of plans")
    examined = _examined(args)
    plans = examined.plans
    if args.json:
        print_json(plans.to_dict())
    else:
        _print(plans, args)
    _write(plans, args)
    if args.verify:
        _verify(examined, args)
    return 0


class _Examined(NamedTuple):
    """What was planned.

    Attributes:
        plans: for it.
        trainer: of the script; None for numbers.
        data: that the script trains on.
    """

    plans: Plans
    trainer: Trainer | None = None
    data: Any = None


def _examined(args: argparse.Namespace) -> _Examined:
    from distributed.operations.planning.options import PlanOptions

    numbers, layers = _numbers(args), collect_layers(args)
    options = PlanOptions(
        hardware=args.hardware,
        num_devices=None if args.devices is None else positive_int(args.devices, "--devices"),
        num_plans=positive_int(args.plans, "--plans"),
        codecs=_words(args.codecs),
        axes=None if args.axes is None else _words(args.axes),
    )
    if numbers:
        _refuse_rest(args)
        if args.script is not None:
            raise UserError(
                "a script and numbers of a transformer were given",
                field="--script",
                got=args.script,
                remedy=f"Leave out either --script or {', '.join(_flag(name) for name in numbers)}",
            )
        from distributed.operations.planning.plan_numbers import plan_numbers

        if args.verify:
            _check_trial(numbers, args)
            _check_devices(options, load_layers(layers))
        return _Examined(plan_numbers(numbers, [], layers, options))
    return _plan_script(args, layers, options)


def _check_devices(options: PlanOptions, config: DistributedConfig) -> None:
    from distributed.operations.planning.trial_limits import check_devices

    check_devices(options, config)


def _check_trial(numbers: dict[str, Any], args: argparse.Namespace) -> None:
    """Check, as far as it is known before a search, that a model of `numbers` can be tried."""
    from distributed.operations.planning.numbers_trial import check_form
    from distributed.operations.planning.shorter_model import check_number_of_blocks

    check_form(str(numbers.get("family", "llama")), int(numbers.get("experts", 1)))
    if args.verify_layers is not None and "layers" in numbers:
        check_number_of_blocks(int(args.verify_layers), int(numbers["layers"]))


def _check_blocks(trainer: Trainer, number: int) -> None:
    """Check that the model has so many blocks, if it is built already."""
    from torch import nn

    from distributed.operations.planning.shorter_model import lists_of_blocks

    if isinstance(trainer.model, nn.Module):
        lists_of_blocks(trainer.model, number, trainer.config.block_classes)


def _refuse_rest(args: argparse.Namespace) -> None:
    """Refuse words that only a script could read."""
    if args.unknown or args.rest:
        refuse_unknown(args.unknown or args.rest, args.parser)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, NUMBER + name) for name in _NUMBERS}
    return {name: _number(name, text) for name, text in given.items() if text is not None}


def _number(name: str, text: str) -> int | float | str:
    if name == "family":
        return text
    try:
        value = float(text)
        whole = value == int(value)
    except (ValueError, OverflowError):
        raise UserError(
            "not a number", field=_flag(name), got=text, allowed="such as 32 or 7e9", remedy="Correct it"
        ) from None
    return int(value) if whole else value


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _plan_script(args: argparse.Namespace, layers: list[Layer], options: PlanOptions) -> _Examined:
    """Run the script up to `fit`, and plan what it would train."""
    script = bundled_script() if args.script is None else find_script(args.script)
    if args.script is None and args.unknown:
        refuse_unknown(args.unknown, args.parser)
    found: list[_Examined] = []

    def examine(trainer: Any, config: Any, task: Any, data: Any) -> None:
        from distributed.operations.planning.plan_task import plan_task

        if args.verify:
            _check_devices(options, config)
        if args.verify_layers is not None:
            _check_blocks(trainer, int(args.verify_layers))
        facts = trainer.facts_of(task)
        plans = plan_task(task, trainer.framework, facts, config, layers, options)
        found.append(_Examined(plans, trainer, data))

    with command_line(ScriptRun(layers)) as script_run:
        script_run.examine = examine
        try:
            execute(script, script_words(args))
        except SystemExit:
            if not found:
                raise
    if not found:
        raise UserError(
            f"{script.name} ended without calling `fit`, so there is nothing to plan",
            field="--script",
            got=str(script),
            remedy="Call `Trainer(...).fit(...)` in it, or give numbers of a transformer",
        )
    return found[0]


# -- what came of it -----------------------------------------------------------------


def _print(plans: Plans, args: argparse.Namespace) -> None:
    from distributed.operations.planning import plan_text

    print(plan_text.headline(plans))
    print(f"hardware: {plans.profile.name} ({plans.whence})")
    for note in plans.notes:
        print(f"note: {note}")
    print_table(plan_text.HEADS, plan_text.rows_of(plans), ["bold"])
    if (uncertain := plan_text.uncertainty(plans)) is not None:
        print(f"note: {uncertain}")
    time, memory = plan_text.part_rows(plans)
    print("plan 1 by part:")
    print_table(["time", "", "share"], time)
    print_table(["memory", "", "share"], memory)
    _print_rejected(plans, args.rejected)


def _print_rejected(plans: Plans, every: bool) -> None:
    if every:
        print_table(["rejected", "first reason"], [[e.subject, e.reason] for e in plans.table.rejected])
        return
    reasons = plans.table.reasons().most_common()
    rows = [[f"{count:,}", reason] for reason, count in reasons[:_SHOWN]]
    print_table(["splits", "first reason why they are not listed"], rows)
    if len(reasons) > _SHOWN:
        print(f"{len(reasons) - _SHOWN} more reasons; --rejected lists every split")


def _write(plans: Plans, args: argparse.Namespace) -> None:
    lines, index = list[str](), number_of(args) - 1
    if args.output is not None:
        plans.save(args.output, index)
        script = args.script or ("FILE" if _numbers(args) else None)
        script = f" --script {script}" if script else ""
        lines += [f"plan {index + 1}: {args.output}; train with it:"]
        several = plans.fields(index).get("num_nodes", 1)
        rest = " --node-rank N --rdzv-endpoint HOST:PORT" if several and several > 1 else ""
        lines += [f"  {PROG} train{script} --config {args.output}{rest}"]
    if args.html is not None:
        from distributed.operations.planning.plan_page import write_page

        write_page(plans, args.html)
        lines.append(f"page: {args.html}")
    for line in lines:
        print(line, file=sys.stderr if args.json else sys.stdout)


def _verify(examined: _Examined, args: argparse.Namespace) -> None:
    from distributed.operations.planning.verification import HEADS
    from distributed.planning import verify

    index = number_of(args) - 1
    layers = None if args.verify_layers is None else positive_int(args.verify_layers, "--verify-layers")
    steps = steps_of(args)
    plans, trainer, data = examined
    plans.check(index)
    if trainer is None:
        trainer, data = _trial(plans, steps, layers)
    found = verify(plans, trainer, data, index, steps, layers)
    print(f"plan {index + 1}, {steps} steps here:")
    print_table(HEADS, found.rows())
    if found.unmeasured:
        print(f"note: memory was not measured: {found.unmeasured}")
    for note in found.notes:
        print(f"note: {note}")


def _trial(plans: Plans, steps: int, layers: int | None) -> tuple[Trainer, Any]:
    """A trainer of a model with the numbers of `plans`, and random tokens for it."""
    from distributed.operations.planning.numbers_trial import decoder_of, tokens_of, training_step
    from distributed.operations.planning.shorter_model import check_number_of_blocks
    from distributed.operations.planning.trial_limits import check_host_memory
    from distributed.planner.estimates.numbers import ModelNumbers
    from distributed.trainer import Trainer

    numbers = plans.space.sizes
    assert isinstance(numbers, ModelNumbers)
    if layers is not None:
        check_number_of_blocks(layers, numbers.layers)
        numbers = replace(numbers, layers=layers, stated=None)
    # The model, and the copy of it that is trained, in float32.
    check_host_memory(2 * 4 * numbers.counted, f"{numbers.counted:,} parameters and a copy of them")
    fields = {name: value for layer in plans.base for name, value in layer.values.items()}
    trainer = Trainer(decoder_of(numbers), fields, training_step=training_step)
    return trainer, tokens_of(numbers, steps)


def _print_history(args: argparse.Namespace) -> None:
    """A row for each run with a plan, and the mean error."""
    from distributed.operations.planning.plan_history import error_text, history_of, quantity

    found = history_of(Path(args.history))
    rows = [
        [run.name, split, c.what, quantity(c, c.predicted), quantity(c, c.measured), error_text(c)]
        for run, split, comparisons in found.rows
        for c in comparisons
    ]
    print_table(["run", "plan", "", "predicted", "measured", "error"], rows)
    for what in ("step time", "memory"):
        errors = found.errors(what)
        if errors:
            mean = sum(map(abs, errors)) / len(errors)
            print(f"{what}: mean error {mean:.1%}, largest {max(map(abs, errors)):.1%}, {len(errors)} runs")
    if found.order is not None:
        print(f"order of step times: Kendall's tau {found.order:.2f}")
    if found.unplanned:
        print(f"{found.unplanned} runs without a plan, or with another split than it")
