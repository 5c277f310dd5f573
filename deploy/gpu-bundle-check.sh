#!/usr/bin/env bash
# gpu-bundle-check.sh [SECTION ..]: the bundle of gpu-bundle.sh, unpacked elsewhere and run as on the machine with the GPU: by its own
# run.sh, from an empty environment, at small sizes over a driver that is the host. Fails where it is not good.
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
