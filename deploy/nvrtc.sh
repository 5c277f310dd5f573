#!/usr/bin/env bash
# Downloads NVRTC, CUDA's run-time compiler, and CUDA's disassembler from PyPI into .deps/ and prints the
# folder of NVRTC's libraries. Machines without CUDA and without a GPU use them to compile the kernels and
# inspect their machine code. Servers with a GPU use the NVRTC of their CUDA installation. NVRTC's version
# matches the CUDA version that engine/Cargo.toml pins for cudarc (feature cuda-13000). The disassembler is
# the oldest one on PyPI; it also reads machine code of older CUDA versions.
set -euo pipefail
wheel="$(dirname "$0")/wheel.sh"

libraries=$("$wheel" nvidia-cuda-nvrtc 13.0.88 nvidia/cu13/lib/libnvrtc.so.13)
programs=$("$wheel" nvidia-cuda-nvdisasm 13.2.51 nvidia/cu13/bin/nvdisasm)
# As in a CUDA toolkit, the programs are in a `bin` folder next to the folder of the libraries.
ln -sfn "$programs" "$(dirname "$libraries")/bin"
echo "$libraries"
