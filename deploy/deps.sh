#!/usr/bin/env bash
# Installs missing tools and libraries that the build and the tests need. Changes nothing if all are present.
#
#   deploy/deps.sh build        a C linker, and protoc with its standard types (to build the etcd client)
#   deploy/deps.sh build test   also c++ (the tests run CUDA kernels on the host), etcd (the tests start one),
#                               Python with venv (for the openai package), curl and cargo-nextest
#   deploy/deps.sh browser      Chromium, and Python with venv (for `make console-check`)
#   deploy/deps.sh prometheus   Prometheus with promtool, and Python with venv (`make observability-check`)
#
# Rust must be installed already: rust-toolchain.toml names the channel (stable), `rust-version` in Cargo.toml the
# oldest version.
set -euo pipefail

readonly NEXTEST_VERSION=0.9.143
readonly STEPS=("${@:-build}")

main() {
  command -v cargo >/dev/null || fail "cargo is not installed: install Rust $(toolchain) from https://rustup.rs or your distribution"
  local packages=()
  for step in "${STEPS[@]}"; do
    case "$step" in
      build) have_command cc || packages+=(build-essential)
             have_protoc || packages+=(protobuf-compiler libprotobuf-dev) ;;
      test)  have_command c++ || packages+=(g++)
             have_command etcd || packages+=(etcd-server)
             have_command python3 || packages+=(python3)
             have_command curl || packages+=(curl)
             have_venv || packages+=(python3-venv) ;;
      browser) have_command chromium || packages+=(chromium)
               have_venv || packages+=(python3-venv) ;;
      prometheus) have_command promtool || packages+=(prometheus)
               have_venv || packages+=(python3-venv) ;;
      *)     fail "unknown step '$step': expected build, test, browser or prometheus" ;;
    esac
  done
  if [ "${#packages[@]}" -gt 0 ]; then install_packages "${packages[@]}"; fi
  if [[ " ${STEPS[*]} " == *" test "* ]] && ! cargo nextest --version >/dev/null 2>&1; then install_nextest; fi
}

have_command() { command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ]; }

# Also checks for the standard types, which Debian ships in a separate package.
have_protoc() {
  have_command protoc &&
    protoc --proto_path=/dev --descriptor_set_out=/dev/null stdin <<<'syntax = "proto3"; import "google/protobuf/descriptor.proto";' 2>/dev/null
}

# Also checks for ensurepip, without which a new environment has no pip.
have_venv() { python3 -c 'import venv, ensurepip' >/dev/null 2>&1; }

toolchain() { sed -n 's/^channel = "\(.*\)"/\1/p' "$(dirname "$0")/../rust-toolchain.toml"; }

install_packages() {
  if ! have_command apt-get; then
    fail "install these packages with the package manager of this system (Debian's names): $*
  (build-essential: a C compiler and linker; protobuf-compiler and libprotobuf-dev: protoc and google/protobuf/*.proto; g++: c++; etcd-server: the etcd binary, 3.4 or later; python3-venv: Python 3.10 or later with venv and ensurepip)"
  fi
  local sudo=()
  if [ "$(id -u)" -ne 0 ]; then
    have_command sudo || fail "not running as root, and sudo is not installed: run apt-get install $* as root"
    sudo=(sudo)
  fi
  echo "installing: $*"
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

install_nextest() {
  echo "installing cargo-nextest $NEXTEST_VERSION, the test runner (built from source once, which takes a few minutes)"
  # Without the self-updater, which would require compiling a TLS stack.
  cargo install --locked --quiet --debug --no-default-features --features default-no-update "cargo-nextest@$NEXTEST_VERSION"
}

fail() { printf 'deps: %s\n' "$1" >&2; exit 1; }

main
