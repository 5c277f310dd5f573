#!/usr/bin/env bash
# Fetches NCCL from PyPI (300 MB) into .deps/ and prints the folder of its library: for checking, where there is no GPU, that
# every function that the engine uses is there (docs/cuda.md). Servers with several GPUs use the NCCL of their own CUDA.
exec "$(dirname "$0")/wheel.sh" nvidia-nccl-cu13 2.32.3 nvidia/nccl/lib/libnccl.so.2
