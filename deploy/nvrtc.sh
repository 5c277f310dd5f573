#!/usr/bin/env bash
# Fetches NVRTC, CUDA's run-time compiler, from PyPI into .deps/ and prints the folder of its libraries. The kernels are
# compiled with it where there is no CUDA and no GPU; servers with a GPU use the one of their own CUDA.
# The version is the one that engine/Cargo.toml pins cudarc to (feature cuda-13000).
exec "$(dirname "$0")/wheel.sh" nvidia-cuda-nvrtc 13.0.88 nvidia/cu13/lib/libnvrtc.so.13
