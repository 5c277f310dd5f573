#!/usr/bin/env bash
# gpu-bundle-check.sh [SECTION ..]: checks that the bundle of gpu-bundle.sh is complete. Builds it in another
# folder and runs its run.sh in an empty environment, as on a machine with a GPU, but at small sizes and with
# a driver library that runs kernels on the host. Fails if the check fails.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly BUILT=${CARGO_TARGET_DIR:-target}/debug
there=$(mktemp -d)
trap 'rm -rf "$there"' EXIT

deploy/gpu-bundle.sh "$there/bundle"
mkdir "$there/driver" "$there/home"
cp -P "$("$BUILT/examples/kernels_check" --host-driver)"/lib* "$there/driver"
cd "$there/home"
env -i PATH=/usr/bin:/bin LD_LIBRARY_PATH="$there/driver" "$there/bundle/run.sh" "$there/REPORT.txt" --dry --minutes 30 "$@"
grep -q '^all good' "$there/REPORT.txt"
