#!/bin/bash
exec python -m distributed.cli train --config run.yaml --script train.py
