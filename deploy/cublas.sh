#!/usr/bin/env bash
# Downloads cuBLASLt from PyPI (400 MB) into .deps/ and prints the folder of its library. Machines without a
# GPU use it to check that the library has every function that the engine calls (docs/cuda.md). Servers with a
# GPU use the cuBLASLt of their CUDA installation. The version matches the CUDA version that engine/Cargo.toml
# pins for cudarc (feature cuda-13000).
exec "$(dirname "$0")/wheel.sh" nvidia-cublas 13.0.2.14 nvidia/cu13/lib/libcublasLt.so.13
