"""Print the zoo's table: each model under each backend, its distance from plain PyTorch or the refusal.

python -m tests.campaigns.zoo [--entry NAME ...] [--backend NAME ...]
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing, redirect_stdout

from distributed.testing.rank_pool import RankPool
from tests.campaigns.backends import BACKENDS
from tests.campaigns.zoo.entry import Result, compare
from tests.campaigns.zoo.table import ENTRIES, render


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--entry", action="append", choices=ENTRIES, help="default: all")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="default: all")
    args = parser.parse_args()
    entries, backends = args.entry or list(ENTRIES), args.backend or list(BACKENDS)
    found: dict[tuple[str, str], Result] = {}
    for backend in backends:
        with closing(RankPool()) as pool, redirect_stdout(sys.stderr):
            for entry in entries:
                found[entry, backend] = compare(ENTRIES[entry], backend, pool)
    print(render(found, entries, backends))
    wrong = [key for key, result in found.items() if not result.passes(ENTRIES[key[0]])]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
