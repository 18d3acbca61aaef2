"""Goes through the changes of test_between_fits on joined ranks, and prints the distances."""

from __future__ import annotations

import json
import os
import sys

from torch import distributed as dist

from tests.training.test_between_fits import Objects, distances_of


def main(backend: str, fields: str) -> None:
    """Print ``{change: distance}`` on rank 0."""
    own = Objects()
    ranks = int(os.environ["WORLD_SIZE"])
    distances = distances_of(own.trainer(None, ranks, backend=backend, epochs=1, **json.loads(fields)), own)
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(distances), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
