#!/usr/bin/env bash
# install.sh test|cluster: what the tests, or those of clusters, need besides Python: on Debian and Ubuntu, as root.
set -euo pipefail
missing=()
need() { command -v "$1" >/dev/null || [ -x "/usr/sbin/$1" ] || missing+=("${@:2}"); }
case "${1:-}" in
    test)
        need c++ g++ # Horovod is built from source
        need unshare util-linux
        need chromium chromium
        need chromedriver chromium-driver
        ;;
    cluster)
        need slurmctld slurm-wlm
        need munged munge
        need ip iproute2
        need nft nftables
        ;;
    *)
        echo "usage: $0 test|cluster" >&2
        exit 2
        ;;
esac
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "not installed: ${missing[*]}; install them, or the tests that need them are skipped" >&2
    exit 0
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
