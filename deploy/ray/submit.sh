#!/bin/bash
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")"
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
# The cluster's token; Ray copies it to the hosts.
if [ ! -f ~/.ray/auth_token ]; then ray get-auth-token --generate >/dev/null; fi
ray up --yes cluster.yaml
exec ray job submit --address http://node1:8265 --runtime-env runtime_env.yaml \
    --working-dir job -- bash start.sh
