"""Goes through all changes of test_between_fits on ranks that torchrun started, and prints each distance."""

from __future__ import annotations

import json
import os
import sys

from torch import distributed as dist

from tests.training.test_between_fits import CHANGES, X, Y, Objects


def main(backend: str, fields: str) -> None:
    """Print ``[change, fit, distance]`` for each, on rank 0."""
    found = []
    for change in CHANGES:
        oracle, own = Objects(), Objects()
        run = own.trainer(None, int(os.environ["WORLD_SIZE"]), backend=backend, epochs=1, **json.loads(fields))
        for fit in range(2):
            if fit:
                change(oracle)
                change(own)
            oracle.train_epoch()
            run.fit((X, Y))
            found.append([change.__name__, fit, own.distance(oracle)])
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
