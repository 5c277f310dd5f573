#!/usr/bin/env bash
# gpu-bundle-check.sh [SECTION ..]: checks that the bundle of gpu-bundle.sh is complete. Builds it in a
# temporary folder and runs its run.sh in an empty environment, as on a machine with a GPU, but at small sizes
# and with a driver library that runs kernels on the host. Fails if any section fails.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly BUILD_DIR=${CARGO_TARGET_DIR:-target}/debug
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

deploy/gpu-bundle.sh "$scratch/bundle"
mkdir "$scratch/driver" "$scratch/home"
cp -P "$("$BUILD_DIR/examples/kernels_check" --host-driver)"/lib* "$scratch/driver"
cd "$scratch/home"
env -i PATH=/usr/bin:/bin LD_LIBRARY_PATH="$scratch/driver" "$scratch/bundle/run.sh" "$scratch/REPORT.txt" --dry --minutes 30 "$@"
grep -q '^all good' "$scratch/REPORT.txt"
