#!/usr/bin/env bash
# Documents all crates of the workspace, including private items, in TARGET/doc, from what clippy.sh recorded.
# A broken link is an error.
#
#   deploy/docs.sh TARGET
set -euo pipefail

document() {
  local target=$1 name=$2
  # Sets `args`, the environment of the crate and the working directory.
  # shellcheck disable=SC1090
  source "$target/debug/rustdoc/$name"
  local kept=() i
  for ((i = 0; i < ${#args[@]}; i++)); do
    case "${args[i]}" in
      -C | --out-dir) i=$((i + 1)) ;;
      --emit=* | --json=* | --error-format=* | *=clippy::*) ;;
      *) kept+=("${args[i]}") ;;
    esac
  done
  rustdoc "${kept[@]}" --out-dir "$target/doc" --document-private-items \
    --deny warnings --allow rustdoc::private-intra-doc-links
}

if [ $# -eq 2 ]; then
  document "$@"
else
  target=$(cd "$1" && pwd)
  if ! [ -d "$target/debug/rustdoc" ]; then
    echo "docs: $target holds no crates that were compiled with clippy.sh: install clippy (rustup component add clippy), then run make docs" >&2
    exit 1
  fi
  printf '%s\n' "$target"/debug/rustdoc/* | xargs -n 1 basename | xargs -P "$(nproc)" -n 1 "$0" "$target"
  echo "documented $(ls "$target/debug/rustdoc" | wc -l) crates in $target/doc"
fi
