#!/usr/bin/env bash
# gpu-bundle.sh [DIR]: collects everything that gpu-check needs on a machine with a GPU in one folder
# (default: target/gpu-check): the program, the bundled pair, and the kernels as machine code for every supported
# architecture. The machine needs only the driver.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly DIR=${1:-target/gpu-check}
readonly BUILD_DIR=${CARGO_TARGET_DIR:-target}/debug

cargo build --locked --package outrider-engine --example kernels_check --example gpu_check
rm -rf "$DIR"
mkdir -p "$DIR/models"
LD_LIBRARY_PATH="$(deploy/nvrtc.sh):${LD_LIBRARY_PATH:-}" "$BUILD_DIR/examples/kernels_check" --write "$DIR/kernels" >"$DIR/kernels.txt"
strip -o "$DIR/gpu_check" "$BUILD_DIR/examples/gpu_check"
cp -r models/demo/draft models/demo/target "$DIR/models"
cp deploy/gpu-peer.py deploy/gpu-peer-vllm.py "$DIR"
git rev-parse HEAD >"$DIR/commit"
cat >"$DIR/run.sh" <<'RUN'
#!/usr/bin/env bash
# run.sh REPORT [ARGS]: runs all sections, or those named in ARGS, and writes REPORT.
bundle=$(cd "$(dirname "$0")" && pwd)
report=$1
shift
{
  date -u
  echo "commit $(cat "$bundle/commit")"
  uname -rm
  nproc
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv
} 2>&1 | tee "$report"
exec "$bundle/gpu_check" --kernels "$bundle/kernels" --models "$bundle/models" --peers "$bundle" --out "$report" "$@"
RUN
chmod +x "$DIR/run.sh"
du -sh "$DIR" | sed 's/\t/ in /'
