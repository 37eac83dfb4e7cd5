#!/bin/sh
# Build the image `attncache` with Docker, or with buildah, as root, where no Docker engine answers.
#
# PIP_ARGUMENTS is passed to pip, to name an index with CPU builds of torch. With buildah, no registry of images is
# needed: debootstrap makes the base from Debian's packages, and pip of this machine downloads the wheels.
set -eu
cd "$(dirname "$0")/.."

if docker info >/dev/null 2>&1; then
    exec docker build --file docker/Dockerfile --tag attncache --build-arg PIP_ARGUMENTS="${PIP_ARGUMENTS-}" .
fi

for tool in buildah debootstrap; do
    if ! command -v "$tool" >/dev/null; then
        echo "no Docker engine answers: start one, or install $tool" >&2
        exit 1
    fi
done

: "${PYTHON:=python3}" "${STORAGE_DRIVER:=vfs}"
export STORAGE_DRIVER

for lock in requirements build; do
    # shellcheck disable=SC2086 # PIP_ARGUMENTS holds several arguments.
    "$PYTHON" -m pip download --quiet ${PIP_ARGUMENTS-} --dest wheels --python-version 3.11 \
        --require-hashes --no-deps --only-binary :all: --requirement "docker/$lock.lock"
done

base=$(buildah from scratch)
trap 'buildah rm "$base" >/dev/null' EXIT
root=$(buildah mount "$base")
debootstrap --variant=minbase --include=python3,python3-venv bookworm "$root" >/dev/null
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
buildah umount "$base" >/dev/null
buildah commit --quiet "$base" localhost/attncache-base >/dev/null

buildah build --isolation chroot --format docker --pull-never --file docker/Dockerfile --tag localhost/attncache \
    --build-arg BASE=localhost/attncache-base --build-arg PIP_ARGUMENTS="--no-index --find-links /wheels" .
