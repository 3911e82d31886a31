#!/usr/bin/env bash
# Builds the image of the Dockerfile with podman, as root, and runs kvcheck in it; neither needs a daemon or a cgroup.
#
#   tools/image.sh [OPTION of podman build, such as --env PIP_INDEX_URL=URL]...
#
# Where no registry answers, the base is made of Debian's packages first: the same release, Python and paths.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for name in podman runc debootstrap; do
  command -v "$name" >/dev/null || { echo "image: $name is missing; next: apt-get install -y podman runc debootstrap" >&2; exit 4; }
done
base=docker.io/library/$(sed -n 's/^FROM //p' Dockerfile)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

make_base() {
  debootstrap --variant=minbase "${base##*-}" "$scratch/root" >/dev/null
  chroot "$scratch/root" sh -c 'apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-pip python-is-python3 >/dev/null'
  rm "$scratch"/root/usr/lib/python3*/EXTERNALLY-MANAGED
  tar -C "$scratch/root" -c . | podman import -q - "$base"
}

podman image exists "$base" || podman pull -q "$base" || make_base
podman build --isolation chroot --network host --pull=never -t kvcheck "$@" .
mkdir -m 777 "$scratch/runs"
podman --runtime runc run --rm --network none --ulimit nofile=1024:1024 --ulimit nproc=4096:4096 -v "$scratch/runs:/runs" \
  kvcheck stress retract-resume --shape llama-3-tiny --schedules 3 --out /runs
test -s "$scratch"/runs/*/run.json
