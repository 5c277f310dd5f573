#!/usr/bin/env bash
# draft-ahead.sh BINARIES [ARGUMENT..]: uses `outrider bench` to compare a cluster whose draft worker drafts
# ahead with one whose draft worker does not. Both run at the same time, and requests alternate between them.
# ARGUMENTs are passed to `outrider bench`. At the end the script prints, of the cluster that drafts ahead, the
# counters of the draft worker and of the router, and how much of the time between verify steps is no forward.
# PROFILE: the profile whose step times the synthetic workers simulate, at half its speed (default: 70B on
# H100s with drafts on an L4). PROFILE=pair uses the bundled pair instead, with 250 M parameters of ballast
# for the target and 62 M for the draft.
# WIRE_US: replaces the one-way network delay of the profile, in microseconds.
# BRANCHES: outcomes to draft ahead of (16).
# SPECULATION: `on` (default) or a k.
# `make measure-draft-ahead` builds the binaries first.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly BINARIES=${1:?usage: draft-ahead.sh BINARIES [ARGUMENT of outrider bench ..]}
shift
readonly PROFILE=${PROFILE:-deploy/profiles/70b-8xh100-l4.toml}
readonly WORK_DIR=$(mktemp -d)
processes=()
trap 'kill "${processes[@]}" 2>/dev/null || true; wait; rm -rf "$WORK_DIR"' EXIT

if [ "$PROFILE" = pair ]; then
  target=(--model models/demo/target --ballast 250M --threads 1)
  draft=(--model models/demo/draft --ballast 62M --threads 1)
else
  sed "s/^wire_us = [0-9]*/wire_us = ${WIRE_US:-$(sed -n 's/^wire_us = \([0-9]*\).*/\1/p' "$PROFILE")}/" "$PROFILE" >"$WORK_DIR/profile.toml"
  target=(--engine "synthetic:$WORK_DIR/profile.toml" --time-scale 2)
  draft=("${target[@]}")
fi

# start PORT OUTCOMES: starts a target worker, a draft worker (`--draft-ahead OUTCOMES`) and a router on PORT
# and the ports after it.
start() {
  local host=127.0.0.1
  cat >"$WORK_DIR/$1.toml" <<WORKERS
[[worker]]
role = "target"
address = "http://$host:$(($1 + 1))"
[[worker]]
role = "draft"
address = "http://$host:$(($1 + 2))"
WORKERS
  "$BINARIES/outrider-target-worker" "${target[@]}" --served-model-name measured --log warn \
    --listen "$host:$(($1 + 1))" --admin "$host:$(($1 + 4))" &
  processes+=($!)
  "$BINARIES/outrider-draft-worker" "${draft[@]}" --draft-ahead "$2" --log warn \
    --listen "$host:$(($1 + 2))" --admin "$host:$(($1 + 5))" &
  processes+=($!)
  "$BINARIES/outrider-router" --discovery "static:$WORK_DIR/$1.toml" --log warn \
    --http "$host:$1" --grpc "$host:$(($1 + 3))" --admin "$host:$(($1 + 6))" &
  processes+=($!)
  until curl -fs "http://$host:$(($1 + 6))/health/ready" >/dev/null; do
    kill -0 "${processes[@]}"
    sleep 0.2
  done
}

readonly PLAIN_PORT=${PORT:-9300} AHEAD_PORT=$((${PORT:-9300} + 10))
start "$PLAIN_PORT" 0
start "$AHEAD_PORT" "${BRANCHES:-16}"
"$BINARIES/outrider" bench --url "http://127.0.0.1:$PLAIN_PORT" \
  --arm "ahead:url=http://127.0.0.1:$AHEAD_PORT,speculation=${SPECULATION:-on}" \
  --arm "plain:url=http://127.0.0.1:$PLAIN_PORT,speculation=${SPECULATION:-on}" "$@"
curl -s "http://127.0.0.1:$((AHEAD_PORT + 5))/metrics" | grep '^outrider_worker_draft_ahead'
curl -s "http://127.0.0.1:$((AHEAD_PORT + 6))/metrics" | grep '^outrider_proposals_ahead'
curl -s "http://127.0.0.1:$((AHEAD_PORT + 6))/console/requests" | python3 tests/programs/between_verify_steps.py
