#!/usr/bin/env bash
# gpu-bundle.sh [DIR]: collects in one folder (default: target/gpu-check) everything for the first check on a
# machine with a GPU: the program, the bundled pair, and the kernels as machine code for every supported
# architecture. That machine needs only the driver.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly DIR=${1:-target/gpu-check}
readonly BUILT=${CARGO_TARGET_DIR:-target}/debug

cargo build --locked --package outrider-engine --example kernels_check --example gpu_check
rm -rf "$DIR"
mkdir -p "$DIR/models"
LD_LIBRARY_PATH="$(deploy/nvrtc.sh):${LD_LIBRARY_PATH:-}" "$BUILT/examples/kernels_check" --write "$DIR/kernels" >"$DIR/kernels.txt"
strip -o "$DIR/gpu_check" "$BUILT/examples/gpu_check"
cp -r models/demo/draft models/demo/target "$DIR/models"
cp deploy/gpu-peer.py "$DIR/peer.py"
git rev-parse HEAD >"$DIR/commit"
cat >"$DIR/run.sh" <<'RUN'
#!/usr/bin/env bash
# run.sh REPORT [ARGS]: the whole check, or its sections ARGS; writes REPORT.
here=$(cd "$(dirname "$0")" && pwd)
report=$1
shift
{
  date -u
  echo "commit $(cat "$here/commit")"
  uname -rm
  nproc
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv
} 2>&1 | tee "$report"
exec "$here/gpu_check" --kernels "$here/kernels" --models "$here/models" --peer "$here/peer.py" --out "$report" "$@"
RUN
chmod +x "$DIR/run.sh"
du -sh "$DIR" | sed 's/\t/ in /'
