#!/usr/bin/env bash
# Fetches cuBLASLt from PyPI (400 MB) into .deps/ and prints the folder of its library: for checking, where there is no GPU, that
# every function that the engine uses is there (docs/cuda.md). Servers with a GPU use the one of their own CUDA.
# The version is of the CUDA that engine/Cargo.toml pins cudarc to (feature cuda-13000).
exec "$(dirname "$0")/wheel.sh" nvidia-cublas 13.0.2.14 nvidia/cu13/lib/libcublasLt.so.13
