#!/usr/bin/env bash
# venv.sh NAME: creates the Python environment .deps/NAME from deploy/requirements/NAME.txt, again whenever that
# file changes, and prints its interpreter. If the file has hashes, pip requires one for every package.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly REQUIREMENTS=deploy/requirements/$1.txt ENVIRONMENT=.deps/$1

# The copy is written last: an environment whose creation was interrupted has none.
if ! cmp --quiet "$REQUIREMENTS" "$ENVIRONMENT/requirements.txt" 2>/dev/null; then
  python3 -m venv --clear "$ENVIRONMENT"
  "$ENVIRONMENT/bin/pip" install --quiet --disable-pip-version-check --requirement "$REQUIREMENTS" >&2
  cp "$REQUIREMENTS" "$ENVIRONMENT/requirements.txt"
fi
echo "$PWD/$ENVIRONMENT/bin/python"
