#!/usr/bin/env bash
# gpu-image-check.sh: checks the files of the image for GPU workers, without docker and without a GPU. Assembles
# them (gpu-root.sh) in a temporary folder and serves a completion with its workers on `--device cuda:0`, in an
# empty environment except for the variables of the image, with a driver library that runs kernels on the host.
# Fails if the text differs from that of the same workers on the CPU, or if a library is missing.
# BINARIES: a folder with the workers, the router and examples/kernels_check, as cargo leaves them. Without it
# cargo builds them in the development profile.
# CUBLAS=0: as for gpu-root.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly DOCKERFILE=deploy/docker/gpu-worker.Dockerfile
# Libraries that debian:bookworm-slim contains (packages libc6, libgcc-s1 and libstdc++6).
readonly OF_THE_BASE=" ld-linux-x86-64.so.2 libc.so.6 libdl.so.2 libgcc_s.so.1 libm.so.6 libpthread.so.0 librt.so.1 libstdc++.so.6 "
readonly HOST=127.0.0.1
readonly REQUEST='{"model": "demo", "prompt": "def add(a, b):", "max_tokens": 12, "temperature": 0, "seed": 1}'
scratch=$(mktemp -d)
readonly ROOT=$scratch/root
# Variables of the workers, and processes that run.
environment=() processes=()
trap 'stop; rm -rf "$scratch"' EXIT

main() {
  if [ -z "${BINARIES:-}" ]; then
    cargo build --locked --workspace --exclude tests --bins
    cargo build --locked --package outrider-engine --example kernels_check
    BINARIES=${CARGO_TARGET_DIR:-target}/debug
  fi
  BINARIES=$BINARIES deploy/gpu-root.sh "$ROOT"
  # Only the driver: the NCCL and the cuBLASLt of that folder would hide those of the image.
  mkdir "$scratch/driver"
  cp "$("$BINARIES/examples/kernels_check" --host-driver)/libcuda.so" "$scratch/driver/libcuda.so.1"
  read_environment

  check_copies
  check_needed_libraries
  check_opened_library nccl --device cuda:0,1
  if [ "${CUBLAS:-1}" != 0 ]; then check_opened_library cublaslt --device cuda:0 --cuda-deterministic false; fi
  complete cuda:0
  complete cpu
  for role in target draft; do
    on_gpu=$(numerics_id cuda:0 "$role")
    on_cpu=$(numerics_id cpu "$role")
    [ "$on_gpu" != "$on_cpu" ] || fail "the $role worker on cuda:0 has the numerics id of the CPU"
  done
  cmp -s "$scratch/cuda:0.text" "$scratch/cpu.text" || fail "the text on cuda:0 differs from that on the CPU"
  echo "all good"
}

# The variables that the Dockerfile sets, with paths below the root. The NVIDIA container toolkit lets the loader
# find the driver.
read_environment() {
  mapfile -t environment < <(sed -n '/^ENV /,/[^\\]$/p' "$DOCKERFILE" |
    sed "s/^ENV//; s/\\\\$//; s/^ *//; s/ *$//; s#=/usr/local#=$ROOT/usr/local#; /^LD_LIBRARY_PATH=/s#\$#:$scratch/driver#")
  [[ " ${environment[*]}" == *" LD_LIBRARY_PATH=$ROOT/"* ]] || fail "$DOCKERFILE does not set LD_LIBRARY_PATH"
  # The driver that runs on the host has two devices, and the loader finds no other file by chance.
  environment+=(PATH=/usr/bin:/bin OUTRIDER_HOST_DEVICES=2)
}

# The Dockerfile copies every file of the root to the same path in the image.
check_copies() {
  local copied path
  copied=$(sed -n 's#^COPY --from=build /out\(/[^ ]*\) \1$#\1#p' "$DOCKERFILE")
  while read -r path; do
    for folder in $copied; do
      [[ $path != "$folder"/* ]] || continue 2
    done
    fail "$DOCKERFILE does not copy $path"
  done < <(cd "$ROOT" && find . -type f -printf '/%P\n')
}

# All libraries that the programs and libraries of the root need are in the root or in the base image, and are found.
check_needed_libraries() {
  local file name missing
  for file in "$ROOT"/usr/local/bin/* "$ROOT"/usr/local/lib/outrider/*; do
    for name in $(readelf -d "$file" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'); do
      [[ $OF_THE_BASE == *" $name "* ]] || [ -e "$ROOT/usr/local/lib/outrider/$name" ] ||
        fail "$(basename "$file") needs $name, which is neither in the root nor in the base image"
    done
    missing=$(env -i PATH=/usr/bin:/bin LD_LIBRARY_PATH="$ROOT/usr/local/lib/outrider" ldd "$file" | grep "not found" || true)
    [ -z "$missing" ] || fail "$(basename "$file"):$missing"
  done
  echo "libraries: all that are needed are in the root or in the base image"
}

# check_opened_library NAME FLAGS: a target worker with FLAGS opens the NAME of the root. Its error is then that
# library's own, because the driver runs on the host.
check_opened_library() {
  local said
  if said=$(timeout 60 env -i "${environment[@]}" "$ROOT/usr/local/bin/outrider-target-worker" \
    --model models/demo/target --log error "${@:2}" 2>&1); then
    fail "${*:2}: the worker stopped without an error"
  fi
  [[ $said == *"$1 failed at "* ]] || fail "$1 did not open: $said"
  echo "$1: $said"
}

# complete DEVICE: serves one completion with a target worker and a draft worker on DEVICE. Writes DEVICE.text, and
# the log of each worker.
complete() {
  local ports answer=$scratch/$1.json
  mapfile -t ports < <(python3 -c '
import socket
listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(7)]
for listener in listeners:
    print(listener.getsockname()[1])')
  cat >"$scratch/workers.toml" <<WORKERS
[[worker]]
role = "target"
address = "http://$HOST:${ports[0]}"
[[worker]]
role = "draft"
address = "http://$HOST:${ports[2]}"
WORKERS
  start_worker target "$1" "${ports[0]}" "${ports[1]}"
  start_worker draft "$1" "${ports[2]}" "${ports[3]}"
  "$BINARIES/outrider-router" --discovery "static:$scratch/workers.toml" --log error \
    --http "$HOST:${ports[4]}" --grpc "$HOST:${ports[5]}" --admin "$HOST:${ports[6]}" &
  processes+=($!)
  for port in "${ports[1]}" "${ports[3]}" "${ports[6]}"; do
    wait_until_ready "$port"
  done
  curl --fail-with-body --silent --show-error --max-time 120 "http://$HOST:${ports[4]}/v1/completions" \
    --header "Content-Type: application/json" --data "$REQUEST" >"$answer" || fail "no completion on $1: $(cat "$answer")"
  python3 - "$answer" "$scratch/$1" <<'PYTHON'
import json, sys

answer = json.load(open(sys.argv[1]))
text, usage = answer["choices"][0]["text"], answer["usage"]
open(sys.argv[2] + ".text", "w").write(text)
drafts = usage["speculation"]
print(f"{sys.argv[2].rsplit('/', 1)[1]}: {usage['completion_tokens']} tokens, {drafts['accepted_tokens']} of them drafted: {text!r}")
PYTHON
  stop
}

# numerics_id DEVICE ROLE: the one that the worker reported when its model was loaded.
numerics_id() {
  local id
  id=$(sed -n '/worker::serve: model loaded/s/.* numerics_id="\([^"]*\)".*/\1/p' "$scratch/$1-$2.log")
  [ -n "$id" ] || fail "the $2 worker on $1 reported no numerics id"
  echo "$id"
}

# start_worker ROLE DEVICE PORT ADMIN_PORT
start_worker() {
  env -i "${environment[@]}" "$ROOT/usr/local/bin/outrider-$1-worker" --model "models/demo/$1" --served-model-name demo \
    --device "$2" --kv-memory 64MiB --profile-steps false --listen "$HOST:$3" --admin "$HOST:$4" >"$scratch/$2-$1.log" 2>&1 &
  processes+=($!)
}

wait_until_ready() {
  for _ in {1..600}; do
    if curl --fail --silent --output /dev/null "http://$HOST:$1/health/ready"; then return; fi
    for process in "${processes[@]}"; do
      kill -0 "$process" 2>/dev/null || fail "a process ended before it was ready: $(tail -qn 1 "$scratch"/*.log)"
    done
    sleep 0.1
  done
  fail "a process was not ready after a minute"
}

stop() {
  if [ ${#processes[@]} -gt 0 ]; then
    kill "${processes[@]}" 2>/dev/null || true
    wait "${processes[@]}" 2>/dev/null || true
  fi
  processes=()
}

fail() { printf 'gpu-image-check: %s\n' "$1" >&2; exit 1; }

main
