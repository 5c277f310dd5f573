#!/usr/bin/env bash
# first-run.sh OUTRIDER [ARGUMENT..]: records a new user's first run. Runs `outrider up` on free ports, runs
# the command that it prints in a shell, and stops it with SIGINT, as Ctrl-C does. Prints the machine, every
# line of standard output with its time in seconds, and the peak memory of each process. `make first-run`
# builds first.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly OUTRIDER=${1:?usage: first-run.sh OUTRIDER [ARGUMENT of outrider up ..]}
shift
readonly LOG=$(mktemp)

cpu_flags=" $(sed -n 's/^flags[^:]*: //p' /proc/cpuinfo | head -1) "
instruction_sets=""
for set in avx2 avx512f avx512_vnni avx512_bf16; do
  case $cpu_flags in *" $set "*) instruction_sets="$instruction_sets $set" ;; esac
done
echo "commit: $(git rev-parse --short HEAD)$(git diff --quiet HEAD -- || echo ', with changes')"
echo "machine: $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), $(nproc) cores,${instruction_sets:- no AVX2 or AVX-512}"
echo "command: outrider up $*"
echo

coproc UP { exec "$OUTRIDER" up --http 127.0.0.1:0 --grpc 127.0.0.1:0 --admin 127.0.0.1:0 "$@" 2>"$LOG"; }
readonly PID=$UP_PID
# Bash drops a coprocess's variables and file descriptors when the coprocess exits, so they are copied here.
exec {lines}<&"${UP[0]}"
trap 'kill -INT "$PID" 2>/dev/null || true; rm -f "$LOG"' EXIT
started_at=$(date +%s%N)
curl_command=""
while IFS= read -r line <&"$lines"; do
  printf '%6.1f s  %s\n' "$((($(date +%s%N) - started_at) / 100000000))e-1" "$line"
  case $line in
    "curl "*) curl_command=$line ;;
    "Ctrl-C stops it."*) break ;;
  esac
done
if [ -z "$curl_command" ]; then
  grep -m 1 '^error' "$LOG" >&2 || tail -1 "$LOG" >&2
  exit 1
fi

echo
echo "peak memory, MiB:"
for child in $(cat "/proc/$PID/task/"*/children); do
  printf '  %-24s %6d\n' "$(basename "$(readlink "/proc/$child/exe")")" \
    "$(($(sed -n 's/^VmHWM:[^0-9]*\([0-9]*\).*/\1/p' "/proc/$child/status") / 1024))"
done
echo "the printed curl command receives $(sh -c "$curl_command --silent" | grep -c '^data: {') chunks"
