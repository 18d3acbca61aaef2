#!/usr/bin/env bash
# step.sh NAME COMMAND...: run COMMAND, a step of the set-up whose output is shown, and print its seconds.
name=$1
shift
echo "set-up: $name ..."
SECONDS=0
"$@"
status=$?
if [ "$status" -ne 0 ]; then
    echo "set-up: $name failed after $SECONDS s with exit code $status: $*" >&2
    exit "$status"
fi
echo "set-up: $name $SECONDS s"
