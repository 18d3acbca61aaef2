#!/bin/bash
# The head takes jobs before the other hosts have joined it.
exec python -m distributed_backends.ray.allocation run --num-nodes 2 --patience 1800 -- \
    python -m distributed.cli train --config run.yaml --script train.py
