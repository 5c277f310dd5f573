# A worker for NVIDIA GPUs of compute capability 8.x and 9.0: one image for target and draft workers. It contains
# NCCL, cuBLASLt and the kernels as machine code; the driver comes from the host, by the NVIDIA container toolkit,
# and must be for CUDA 13 (branch 580 or later). The checkpoint is mounted, not part of the image. Build from the
# repository root; CUBLAS=0 leaves cuBLASLt (540 MB) out, which only `--cuda-deterministic false` uses:
#   docker build -f deploy/docker/gpu-worker.Dockerfile -t outrider-gpu-worker [--build-arg CUBLAS=0] .
#   docker run --gpus all -v DIR:/models/target:ro outrider-gpu-worker
#   docker run --gpus all -v DIR:/models/draft:ro --entrypoint outrider-draft-worker outrider-gpu-worker \
#     --model /models/draft --device cuda:0 --admin 0.0.0.0:8121
FROM rust:1.95-slim-bookworm AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends protobuf-compiler libprotobuf-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
ARG CUBLAS=1
# A name of this build for --version and outrider_build_info, such as a commit.
ARG OUTRIDER_BUILD
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target,sharing=locked \
    --mount=type=cache,target=/src/.deps,sharing=locked \
    CUBLAS=$CUBLAS deploy/gpu-root.sh /out

FROM debian:bookworm-slim
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates curl \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --system --gid 10001 outrider \
 && useradd --system --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin outrider
# The largest layer is first: it changes only with the versions of the libraries.
COPY --from=build /out/usr/local/lib/outrider /usr/local/lib/outrider
COPY --from=build /out/usr/local/share/outrider /usr/local/share/outrider
COPY --from=build /out/usr/local/bin /usr/local/bin
# `utility` provides libnvidia-ml, which NCCL uses.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    LD_LIBRARY_PATH=/usr/local/lib/outrider \
    OUTRIDER_CUDA_KERNELS=/usr/local/share/outrider/kernels
# As numbers, by which Kubernetes sees that this is not root (runAsNonRoot).
USER 10001:10001
VOLUME /models
# 8110, 8120: gRPC for routers, of a target and of a draft worker. 8111, 8121: health and metrics.
EXPOSE 8110 8111 8120 8121
STOPSIGNAL SIGTERM
# A worker binds its ports after the checkpoint is loaded, which takes time for a large one.
HEALTHCHECK --interval=5s --timeout=2s --start-period=300s \
    CMD curl --fail --silent --output /dev/null http://127.0.0.1:8111/health/ready \
     || curl --fail --silent --output /dev/null http://127.0.0.1:8121/health/ready
# To accept remote connections, add --listen and either certificates or --insecure.
ENTRYPOINT ["outrider-target-worker"]
CMD ["--model", "/models/target", "--device", "cuda:0", "--admin", "0.0.0.0:8111"]
