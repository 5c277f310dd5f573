#!/usr/bin/env bash
# Downloads NCCL from PyPI (300 MB) into .deps/ and prints the folder of its library. Machines without a GPU
# use it to check that the library has every function that the engine calls (docs/cuda.md). Servers with
# several GPUs use the NCCL of their CUDA installation.
exec "$(dirname "$0")/wheel.sh" nvidia-nccl-cu13 2.32.3 nvidia/nccl/lib/libnccl.so.2
