#!/usr/bin/env bash
# first-run.sh OUTRIDER [ARGUMENT..]: records what a new user sees. Runs `outrider up` on free ports, runs the
# command that it prints in a shell, and stops it with SIGINT, as Ctrl-C does. Prints the machine, every line
# of standard output with its time in seconds, and the peak memory of each process. `make first-run` builds
# first.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly OUTRIDER=$1
shift
readonly LOG=$(mktemp)

flags=" $(sed -n 's/^flags[^:]*: //p' /proc/cpuinfo | head -1) "
sets=""
for set in avx2 avx512f avx512_vnni avx512_bf16; do
  case $flags in *" $set "*) sets="$sets $set" ;; esac
done
echo "commit: $(git rev-parse --short HEAD)$(git diff --quiet HEAD -- || echo ', with changes')"
echo "machine: $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), $(nproc) cores,${sets:- no vector sets of interest}"
echo "command: outrider up $*"
echo

coproc UP { exec "$OUTRIDER" up --http 127.0.0.1:0 --grpc 127.0.0.1:0 --admin 127.0.0.1:0 "$@" 2>"$LOG"; }
readonly PID=$UP_PID
# Bash drops a coprocess's variables and file descriptors when the coprocess exits, so they are copied here.
exec {lines}<&"${UP[0]}"
trap 'kill -INT "$PID" 2>/dev/null || true; rm -f "$LOG"' EXIT
began=$(date +%s%N)
pasted=""
while IFS= read -r line <&"$lines"; do
  printf '%6.1f s  %s\n' "$((($(date +%s%N) - began) / 100000000))e-1" "$line"
  case $line in
    "curl "*) pasted=$line ;;
    "Ctrl-C stops it."*) break ;;
  esac
done
if [ -z "$pasted" ]; then
  tail -1 "$LOG" >&2
  exit 1 # the line above is the reason
fi

echo
echo "memory at most, MiB:"
for child in $(cat "/proc/$PID/task/"*/children); do
  printf '  %-24s %6d\n' "$(basename "$(readlink "/proc/$child/exe")")" \
    "$(($(sed -n 's/^VmHWM:[^0-9]*\([0-9]*\).*/\1/p' "/proc/$child/status") / 1024))"
done
echo "the pasted command answers with $(sh -c "$pasted --silent" | grep -c '^data: {') chunks"
