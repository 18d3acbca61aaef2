#!/usr/bin/env bash
# install.sh [--check] test|cluster: install what the tests, or those of clusters, need besides Python, on Debian and
# Ubuntu, as root. Otherwise, and with --check, print one line: what is missing, why it is needed, how to install it.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
check=
[ "${1:-}" = --check ] && check=yes && shift
missing=() packages=()
# need WHAT PACKAGE PROGRAM...: one of the programs has to be there.
need() {
    local program
    for program in "${@:3}"; do
        if command -v "$program" >/dev/null; then return; fi
    done
    missing+=("$1")
    packages+=("$2")
}
case "${1:-}" in
    test)
        need "a C++ compiler (Horovod is built from source)" g++ "${CXX:-g++}" c++
        need "unshare (full disks are file systems of a namespace)" util-linux unshare
        need "Chromium (pages are tested in it)" chromium chromium chromium-browser google-chrome
        need "chromedriver (controls Chromium)" chromium-driver chromedriver
        ;;
    cluster)
        need "Slurm (jobs of two nodes)" slurm-wlm slurmctld
        need "munge (Slurm's authentication)" munge munged
        need "ip (hosts in network namespaces)" iproute2 ip
        need "nft (hosts that are cut off)" nftables nft
        ;;
    *)
        echo "usage: $0 [--check] test|cluster" >&2
        exit 2
        ;;
esac
[ ${#missing[@]} -eq 0 ] && exit 0
if [ -n "$check" ] || [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    printf -v list '%s, ' "${missing[@]}"
    echo "not installed: ${list%, }. Debian and Ubuntu, as root: apt-get install ${packages[*]}" >&2
    exit 0
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
