#!/usr/bin/env bash
# Compiles a crate of the workspace with its lints: the RUSTC_WORKSPACE_WRAPPER of the Makefile. It records how
# libraries and programs are compiled, so that `make docs` can document them with the dependencies that are
# built already. `cargo doc` compiles the metadata of all dependencies once more, which takes minutes.
set -euo pipefail

# Tests and examples are optimized less than what they call in other crates: the optimizer would take longer than
# they run. The engine's unit tests wait for kernels, which are in another crate or compiled by c++.
arguments=("$@")
if [[ " $* " == *" --test "* || " $* " == *"/examples/"* ]]; then
  arguments=("${arguments[@]/#opt-level=1/opt-level=0}")
  level=1
  if [[ " $* " == *" --crate-name engine "* ]]; then level=0; fi
  arguments=("${arguments[@]/#opt-level=3/opt-level=$level}")
fi
clippy-driver "${arguments[@]}"

# Arguments of the compiler: the compiler, --crate-name NAME, --edition=.., the main file, ..
if [ "${2-}" != --crate-name ] || [ "$3" = build_script_build ]; then exit 0; fi
name=$3
out_dir=
for ((i = 4; i <= $#; i++)); do
  case "${!i}" in
    --test | */examples/*) exit 0 ;;
    --out-dir) j=$((i + 1)) && out_dir=${!j} ;;
  esac
done
mkdir -p "$out_dir/../rustdoc"
{
  printf 'cd %q\n' "$PWD"
  export -p | grep -E '^declare -x (CARGO_(PKG|MANIFEST|CRATE|BIN)_[A-Z_]+|OUT_DIR)='
  printf 'args=('
  printf ' %q' "${@:2}"
  printf ' )\n'
} >"$out_dir/../rustdoc/$name"
