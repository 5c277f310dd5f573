#!/usr/bin/env bash
# Fetches NCCL from PyPI (300 MB) into .deps/ and prints the folder of its library: for checking, where there is no GPU, that
# every function that the engine uses is there (docs/cuda.md). Servers with several GPUs use the NCCL of their own CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly WHEEL=nvidia-nccl-cu13
readonly VERSION=2.32.3
readonly SITE=.deps/nccl-$VERSION

if [ ! -e "$SITE/nvidia/nccl/lib/libnccl.so.2" ]; then
  rm -rf "$SITE.part" .deps/nccl-venv
  python3 -m venv .deps/nccl-venv
  .deps/nccl-venv/bin/pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --target "$SITE.part" "$WHEEL==$VERSION" >&2
  rm -rf .deps/nccl-venv
  mv "$SITE.part" "$SITE"
fi
echo "$PWD/$SITE/nvidia/nccl/lib"
