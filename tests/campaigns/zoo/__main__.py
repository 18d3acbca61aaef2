"""Print the zoo's table: each model under each backend, its distance from plain PyTorch or the refusal.

python -m tests.campaigns.zoo [--vision] [--entry NAME ...] [--backend NAME ...]
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
    parser.add_argument("--entry", action="append", help="default: all")
    parser.add_argument("--vision", action="store_true", help="models of timm and torchvision instead")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="default: all")
    args = parser.parse_args()
    entries, backends = ENTRIES, args.backend or list(BACKENDS)
    if args.vision:  # in a process of their own: see there
        from tests.campaigns.zoo.vision_models import ENTRIES as entries
    entries = {name: entries[name] for name in args.entry or entries}
    found: dict[tuple[str, str], Result] = {}
    for backend in backends:
        with closing(RankPool(timeout=600)) as pool, redirect_stdout(sys.stderr):
            for name, entry in entries.items():
                found[name, backend] = compare(entry, backend, pool)
    print(render(found, entries, backends))
    wrong = [key for key, result in found.items() if not result.passes(entries[key[0]])]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
