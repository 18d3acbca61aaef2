"""Error of predicted step times on published runs, and regret of the configurations that they choose.

    python -m tests.benchmarks.planner_time            # fit, cross-validate, score rows that were not fitted
    python -m tests.benchmarks.planner_time --list     # name every row that was fitted
    python -m tests.benchmarks.planner_time --aside    # score the rows that were kept aside, too

The parameters of `distributed.planner.estimates.hardware.Achievable` are fitted on ``vtrain_multi_fit`` and
``vtrain_single_fit`` alone, and are those of ``A100.yaml``. For two clusters of H100, one of which is limited
to 500 W, the share of the peak that matrix products reach is fitted on one or two rows; the two rows of
torchtitan also gave `OURS.elementwise`. Nothing is measured: the command prints the same on every machine.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np
from scipy.optimize import least_squares

from distributed.planner.estimates.hardware import Achievable, load_profile
from tests.benchmarks.planner_time_rows import Row, published, vtrain

__all__ = ["Parameters", "errors", "fit", "regrets"]

FITTED = ("vtrain_multi_fit", "vtrain_single_fit")
ASIDE = ("vtrain_multi_aside", "vtrain_single_aside")
H100 = {"torchtitan-8": ["torchtitan-many"], "llama3-8192": ["llama3-16384"]}
"""Rows of two clusters of H100 on which one parameter is fitted -> other rows of the cluster."""
FREE = {
    "matmul": 0.8,
    "link_within_node": 0.8,
    "link_between_nodes": 0.8,
    "activation_passes": 2.0,
    "block_seconds": 8e-4,
    "latency": 4e-5,
}
"""Fitted parameter -> where the search begins."""
_FRACTIONS = ("matmul", "link_within_node", "link_between_nodes")
_FOLDS = 5


@dataclass(frozen=True)
class Parameters:
    """The fitted parameters."""

    achievable: Achievable
    latency: float

    @classmethod
    def of(
        cls, values: Iterable[float], names: Iterable[str] = tuple(FREE), device: str = "A100"
    ) -> Parameters:
        """The parameters of a shipped profile, some of them replaced."""
        profile = load_profile(device)
        given = dict(zip(names, map(float, values), strict=True))
        latency = given.pop("latency", profile.latency_within_node)
        return cls(profile.achievable.model_copy(update=given), latency)

    def ratio(self, row: Row) -> float:
        """Predicted time over published time."""
        return row.predict(self.achievable, self.latency) / row.seconds


def fit(rows: Sequence[Row], names: Sequence[str] = tuple(FREE), device: str = "A100") -> Parameters:
    """Least squares of the logarithms of the ratios, with a loss that limits what an outlier weighs.

    Rows of both numbers of nodes weigh the same in sum.
    """
    count: dict[str, int] = defaultdict(int)
    for row in rows:
        count[row.source] += 1
    weights = [math.sqrt(len(rows) / len(count) / count[row.source]) for row in rows]

    def residuals(logarithms: np.ndarray) -> list[float]:
        parameters = Parameters.of(np.exp(logarithms), names, device)
        return [w * math.log(parameters.ratio(row)) for w, row in zip(weights, rows, strict=True)]

    start = [math.log(FREE[name]) for name in names]
    upper = [0.0 if name in _FRACTIONS else math.inf for name in names]
    bounds = ([-math.inf] * len(names), upper)
    found = least_squares(residuals, start, bounds=bounds, loss="soft_l1", f_scale=0.05, diff_step=1e-4)
    return Parameters.of(np.exp(found.x), names, device)


def errors(rows: Iterable[Row], ratio: Callable[[Row], float]) -> list[float]:
    """Relative error of each prediction."""
    return [abs(ratio(row) - 1.0) for row in rows]


def regrets(rows: Iterable[Row], ratio: Callable[[Row], float]) -> list[float]:
    """By how much the run with the least prediction is slower than the best, for each group of runs."""
    groups: dict[tuple[int, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    found = []
    for group in groups.values():
        if len(group) > 1:
            chosen = min(group, key=lambda row: ratio(row) * row.seconds)
            found.append(chosen.seconds / min(row.seconds for row in group) - 1.0)
    return found


def cross_validated(rows: Sequence[Row], part: Callable[[int, Row], object]) -> Callable[[Row], float]:
    """Ratios of rows, each by parameters that were fitted without the part of the rows that it belongs to."""
    parts: dict[object, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        parts[part(index, row)].append(index)
    ratios: dict[int, float] = {}
    for left_out in parts.values():
        outside = set(left_out)
        parameters = fit([row for index, row in enumerate(rows) if index not in outside])
        ratios |= {id(rows[index]): parameters.ratio(rows[index]) for index in left_out}
    return lambda row: ratios[id(row)]


def _print(title: str, rows: Sequence[Row], ratio: Callable[[Row], float], choices: bool = False) -> None:
    off, lost = errors(rows, ratio), regrets(rows, ratio) if choices else []
    line = f"{title:<44} {len(rows):>5} rows  mean error {mean(off):6.1%}  largest {max(off):6.1%}"
    if lost:
        line += f"  regret {mean(lost):5.1%} over {len(lost)} choices, largest {max(lost):.1%}"
    print(line)


def _print_each(rows: Iterable[Row], ratio: Callable[[Row], float]) -> None:
    for row in rows:
        print(f"    {row.source} {row.name:<28} {row.seconds:9.2f} s, predicted {ratio(row) - 1.0:+.1%}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="name every fitted row")
    parser.add_argument("--aside", action="store_true", help="score the rows that were kept aside")
    args = parser.parse_args()
    multi, single = (vtrain(name) for name in FITTED)
    parameters = fit([*multi, *single])
    print(f"fitted on {', '.join(FITTED)}: {len(multi)} + {len(single)} rows")
    print(f"  {parameters.achievable!r}\n  latency={parameters.latency:.3g}")
    if args.list:
        for row in (*multi, *single):
            print(f"  {row.source}: {row.group} {row.name}")
    print("\nfitted rows")
    for name, rows in zip(FITTED, (multi, single), strict=True):
        _print(f"  {name}", rows, parameters.ratio, choices=True)
    print("\nfitted rows, each predicted without its fifth, or without its size")
    by_fold = cross_validated([*multi, *single], lambda index, row: index % _FOLDS)
    logs = sorted(abs(math.log(by_fold(row))) for row in (*multi, *single))
    print(f"  80 % of them are within a factor of {math.exp(logs[len(logs) * 4 // 5]):.3f}")
    by_size = cross_validated([*multi, *single], lambda index, row: row.group[:2])
    for name, rows in zip(FITTED, (multi, single), strict=True):
        _print(f"  {name}, {_FOLDS} folds", rows, by_fold, choices=True)
        _print(f"  {name}, without its size", rows, by_size, choices=True)
    _score_others(parameters)
    if args.aside:
        print("\nrows that were kept aside")
        for name in ASIDE:
            _print(f"  {name}", vtrain(name), parameters.ratio, choices=True)


def _score_others(parameters: Parameters) -> None:
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in published():
        rows[row.source].append(row)
    print("\nother tables of the A100, not fitted")
    for name in ("megatron-2021", "recompute-2022", "torchtitan-a100"):
        _print(f"  {name}", rows[name], parameters.ratio)
        _print_each(rows[name], parameters.ratio)
    for fitted, others in H100.items():
        of_h100 = fit(rows[fitted], ["matmul"], "H100")
        print(f"\nH100: matmul={of_h100.achievable.matmul:.3f} fitted on {fitted}, the rest as of the A100")
        for name in (fitted, *others):
            _print(f"  {name}", rows[name], of_h100.ratio)
            _print_each(rows[name], of_h100.ratio)


if __name__ == "__main__":
    main()
