#!/usr/bin/env bash
# Fetches NVRTC, CUDA's run-time compiler, from PyPI into .deps/ and prints the folder of its libraries. The kernels are
# compiled with it where there is no CUDA and no GPU; servers with a GPU use the one of their own CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."

# The version that engine/Cargo.toml pins cudarc to (feature cuda-13000).
readonly WHEEL=nvidia-cuda-nvrtc
readonly VERSION=13.0.88
readonly SITE=.deps/nvrtc-$VERSION

if [ ! -e "$SITE/nvidia/cu13/lib/libnvrtc.so.13" ]; then
  rm -rf "$SITE.part" .deps/nvrtc-venv
  python3 -m venv .deps/nvrtc-venv
  .deps/nvrtc-venv/bin/pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --target "$SITE.part" "$WHEEL==$VERSION" >&2
  rm -rf .deps/nvrtc-venv
  mv "$SITE.part" "$SITE"
fi
echo "$PWD/$SITE/nvidia/cu13/lib"
