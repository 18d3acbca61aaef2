#!/usr/bin/env bash
# What the tests of clusters and of pages in a browser need besides Python: on Debian and Ubuntu, as root.
set -euo pipefail
missing=()
need() { command -v "$1" >/dev/null || [ -x "/usr/sbin/$1" ] || missing+=("${@:2}"); }
need slurmctld slurm-wlm
need munged munge
need ip iproute2
need nft nftables
need chromium chromium
need chromedriver chromium-driver
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "not installed: ${missing[*]}; install them, or the tests that need them are skipped" >&2
    exit 0
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
