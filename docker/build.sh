#!/bin/sh
# Build the image `attncache` with Docker, or with buildah, as root, where no Docker engine answers.
#
#   docker/build.sh [--platform linux/amd64|linux/arm64]    by default the platform of this machine
#
# PIP_ARGUMENTS is passed to pip, to name an index with CPU builds of torch, which x86-64 needs. With buildah, no
# registry of images is needed: debootstrap makes the base from Debian's packages, and pip of this machine downloads the
# wheels. For another platform than this machine's, the kernel must run foreign programs, which Debian's package
# qemu-user-static arranges.
set -eu
cd "$(dirname "$0")/.."

fail() {
    echo "docker/build.sh: $*" >&2
    exit 2
}

case $(uname -m) in
    x86_64) own=linux/amd64 ;;
    aarch64) own=linux/arm64 ;;
    *) own="no platform of the image ($(uname -m))" ;;
esac
platform=$own
while [ $# -gt 0 ]; do
    case $1 in
        --platform=*) platform=${1#--platform=} ;;
        --platform)
            [ $# -gt 1 ] || fail "--platform needs linux/amd64 or linux/arm64"
            platform=$2
            shift
            ;;
        *) fail "unknown argument $1; give --platform linux/amd64 or --platform linux/arm64" ;;
    esac
    shift
done
case $platform in
    linux/amd64) machine=x86_64 ;;
    linux/arm64) machine=aarch64 ;;
    *) fail "unknown platform: $platform; choose linux/amd64 or linux/arm64" ;;
esac

if docker info >/dev/null 2>&1; then
    exec docker build --platform "$platform" --file docker/Dockerfile --tag attncache \
        --build-arg PIP_ARGUMENTS="${PIP_ARGUMENTS-}" .
fi

for tool in buildah debootstrap; do
    if ! command -v "$tool" >/dev/null; then
        echo "no Docker engine answers: start one, or install $tool" >&2
        exit 1
    fi
done
if ! "${PYTHON:=python3}" -m pip --version >/dev/null 2>&1; then
    echo "$PYTHON has no pip: install python3-pip, or set PYTHON=.venv/bin/python" >&2
    exit 1
fi
if [ "$platform" != "$own" ] && [ ! -e "/proc/sys/fs/binfmt_misc/qemu-$machine" ]; then
    echo "this machine cannot run programs for $platform: install qemu-user-static, or build there" >&2
    exit 1
fi

: "${STORAGE_DRIVER:=vfs}"
export STORAGE_DRIVER

# pip needs each version of glibc by name, and takes wheels of all of them.
tags=
for glibc in 17 24 26 27 28; do
    tags="$tags --platform manylinux_2_${glibc}_$machine"
done
for lock in "requirements.$machine" build; do
    # shellcheck disable=SC2086 # PIP_ARGUMENTS and tags hold several arguments.
    "$PYTHON" -m pip download --quiet ${PIP_ARGUMENTS-} --dest wheels --python-version 3.11 $tags \
        --platform "manylinux2014_$machine" --require-hashes --no-deps --only-binary :all: \
        --requirement "docker/$lock.lock" || fail "if pip found no torch+cpu: name an index with CPU builds of torch in" \
        "PIP_ARGUMENTS (docs/deployment.md)"
done

base=$(buildah from scratch)
trap 'buildah rm "$base" >/dev/null' EXIT
root=$(buildah mount "$base")
debootstrap --arch="${platform#linux/}" --variant=minbase --include=python3,python3-venv bookworm "$root" >/dev/null
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
buildah umount "$base" >/dev/null
buildah config --arch "${platform#linux/}" "$base"
buildah commit --quiet "$base" localhost/attncache-base >/dev/null

buildah build --platform "$platform" --isolation chroot --format docker --pull-never --file docker/Dockerfile \
    --tag localhost/attncache --build-arg BASE=localhost/attncache-base \
    --build-arg PIP_ARGUMENTS="--no-index --find-links /wheels" .
