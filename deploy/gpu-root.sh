#!/usr/bin/env bash
# gpu-root.sh DIR: assembles in DIR, which must be empty or new, all files that the image of a GPU worker adds to
# a slim Debian (docker/gpu-worker.Dockerfile), and prints the size of each part:
#   usr/local/bin                      the target worker and the draft worker
#   usr/local/lib/outrider             NCCL, and cuBLASLt, from PyPI
#   usr/local/share/outrider/kernels   the kernels as machine code, so that the image needs no NVRTC
#   usr/local/share/outrider/licenses  the licenses of these parts
# Needs no GPU. Downloads 800 MB into .deps/ once.
# BINARIES: a folder with outrider-target-worker, outrider-draft-worker and examples/kernels_check, which must be
# of this source tree. Without it cargo builds them in the release profile.
# CUBLAS=0: leaves cuBLASLt out, which only `--cuda-deterministic false` uses.
set -euo pipefail

main() {
  cd "$(dirname "$0")/.."
  local binaries=${BINARIES:-}
  if [ -z "$binaries" ]; then
    cargo build --locked --release --package outrider-target-worker --package outrider-draft-worker --bins
    cargo build --locked --release --package outrider-engine --example kernels_check
    binaries=${CARGO_TARGET_DIR:-target}/release
  fi
  for name in outrider-target-worker outrider-draft-worker examples/kernels_check; do
    [ -x "$binaries/$name" ] || fail "$binaries/$name is missing: build it, or unset BINARIES"
  done

  mkdir -p "$LIBRARIES" "$SHARE" "$ROOT/usr/local/bin"
  for role in target draft; do
    # Function names stay, for backtraces.
    strip --strip-debug -o "$ROOT/usr/local/bin/outrider-$role-worker" "$binaries/outrider-$role-worker"
  done
  local nvrtc
  nvrtc=$(deploy/nvrtc.sh)
  LD_LIBRARY_PATH="$nvrtc" "$binaries/examples/kernels_check" --write "$SHARE/kernels" >/dev/null
  mkdir "$SHARE/licenses"
  cp LICENSE "$SHARE/licenses/outrider.txt"
  add_library nccl libnccl.so.2
  if [ "${CUBLAS:-1}" != 0 ]; then add_library cublas libcublasLt.so.13; fi
  # Any user may read and run everything, whatever the umask was.
  chmod -R a+rX "$ROOT"
  print_sizes
}

# add_library NAME FILE: adds the FILE that deploy/NAME.sh downloads, and the license of its wheel.
add_library() {
  local folder site
  folder=$("deploy/$1.sh")
  cp -L "$folder/$2" "$LIBRARIES"
  site=${folder#"$PWD"/.deps/}
  site=.deps/${site%%/*}
  local licenses=("$site"/*.dist-info/licenses/*)
  [ -e "${licenses[0]}" ] || fail "the wheel in $site contains no license"
  cat "${licenses[@]}" >"$SHARE/licenses/$1.txt"
}

# Sizes of the files' contents, without what a file system adds.
print_sizes() {
  local path
  for path in "$ROOT"/usr/local/bin/* "$LIBRARIES"/* "$SHARE"/*; do
    printf '%8s MB  %s\n' "$(megabytes "$path")" "${path#"$ROOT"}"
  done
  printf '%8s MB  in total\n' "$(megabytes "$ROOT")"
}

megabytes() { find "$1" -type f -printf '%s\n' | awk '{ bytes += $1 } END { printf "%.1f", bytes / 1e6 }'; }

fail() { printf 'gpu-root: %s\n' "$1" >&2; exit 1; }

[ $# -eq 1 ] || fail "usage: gpu-root.sh DIR"
[ -z "$(ls -A "$1" 2>/dev/null)" ] || fail "$1 is not empty: name a new folder"
mkdir -p "$1"
ROOT=$(cd "$1" && pwd)
readonly ROOT LIBRARIES=$ROOT/usr/local/lib/outrider SHARE=$ROOT/usr/local/share/outrider
main
