#!/usr/bin/env bash
# wheel.sh NAME VERSION LIBRARY: downloads a wheel from PyPI into .deps/ and prints the folder of its LIBRARY
# (a path inside the wheel). It is used for CUDA libraries on machines without CUDA (nvrtc.sh, nccl.sh and
# cublas.sh) and for a Python module of `make console-check`. requirements/wheels.txt has the hashes.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly WHEEL=$1 VERSION=$2 LIBRARY=$3
readonly SITE=.deps/$WHEEL-$VERSION

if [ ! -e "$SITE/$LIBRARY" ]; then
  requirement=$(grep --fixed-strings "$WHEEL==$VERSION " deploy/requirements/wheels.txt) || {
    echo "wheel.sh: deploy/requirements/wheels.txt does not list $WHEEL==$VERSION" >&2
    exit 1
  }
  rm -rf "$SITE.part" "$SITE.venv"
  python3 -m venv "$SITE.venv"
  printf '%s\n' "$requirement" >"$SITE.venv/requirements.txt"
  "$SITE.venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --require-hashes --requirement "$SITE.venv/requirements.txt" --target "$SITE.part" >&2
  rm -rf "$SITE.venv"
  mv "$SITE.part" "$SITE"
fi
echo "$PWD/$SITE/$(dirname "$LIBRARY")"
