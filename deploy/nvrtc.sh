#!/usr/bin/env bash
# Fetches NVRTC, CUDA's run-time compiler, and CUDA's disassembler from PyPI into .deps/ and prints the folder of NVRTC's libraries. The
# kernels are compiled, and their machine code is looked into, where there is no CUDA and no GPU; servers with a GPU use the NVRTC of
# their own CUDA. NVRTC's version is the one that engine/Cargo.toml pins cudarc to (feature cuda-13000); the disassembler is the oldest
# one on PyPI and reads machine code of older versions.
set -euo pipefail
wheel="$(dirname "$0")/wheel.sh"

libraries=$("$wheel" nvidia-cuda-nvrtc 13.0.88 nvidia/cu13/lib/libnvrtc.so.13)
programs=$("$wheel" nvidia-cuda-nvdisasm 13.2.51 nvidia/cu13/bin/nvdisasm)
# As in a toolkit: programs in a folder beside the one of the libraries.
ln -sfn "$programs" "$(dirname "$libraries")/bin"
echo "$libraries"
