"""Render the templates of this folder again, from example.yaml and examples/convnet.py.

    python deploy/render.py        (or: make deploy-templates)

Called in the root of a checkout. A test compares what lies here with what this would write.
"""

from __future__ import annotations

import sys

from distributed.cli import main

_RUN = "--config deploy/example.yaml --script examples/convnet.py --name convnet"
_IMAGE = "--image registry.example.com/team/train:1.0 --cpus 64 --memory 512Gi --shm 64Gi"
_WHOLE = "--set elastic.max_restarts=0"
COMMANDS = [
    f"deploy slurm {_RUN} --output deploy/slurm --partition gpu --time 1-00:00:00 --cpus-per-task 64"
    " --mem 500G",
    f"deploy kubernetes {_RUN} --output deploy/kubernetes/job {_IMAGE}",
    f"deploy kubernetes {_RUN} --output deploy/kubernetes/jobset {_IMAGE} --kind jobset",
    f"deploy kubernetes {_RUN} --output deploy/kubernetes/trainjob {_IMAGE} --kind trainjob",
    f"deploy kubernetes {_RUN} --output deploy/kubernetes/mpijob {_IMAGE} --backend horovod {_WHOLE}",
    f"deploy kubernetes {_RUN} --output deploy/kubernetes/rayjob {_IMAGE} --backend ray",
    "deploy docker --config deploy/example.yaml --script examples/convnet.py --name train:1.0"
    " --output deploy/docker --constraints constraints.txt --extra examples",
    f"deploy ray {_RUN} --output deploy/ray --backend ray --checkpoint-dir /shared/checkpoints"
    " --host node1 --host node2 --ssh-user me",
]
"""What wrote each folder here."""

if __name__ == "__main__":
    sys.exit(max(main([*command.split(), "--force"]) for command in COMMANDS))
