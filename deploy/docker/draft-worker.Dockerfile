# A draft worker. The checkpoint is mounted, not part of the image. Build from the repository root:
#   docker build -f deploy/docker/draft-worker.Dockerfile -t outrider-draft-worker .
FROM rust:1.95-slim-bookworm AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends protobuf-compiler libprotobuf-dev \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# A name of this build for --version, /version and outrider_build_info, such as a commit.
ARG OUTRIDER_BUILD
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target,sharing=locked \
    cargo build --locked --release -p outrider-draft-worker \
 && install -D target/release/outrider-draft-worker /out/outrider-draft-worker

FROM debian:bookworm-slim
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates curl \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --system --gid 10001 outrider \
 && useradd --system --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin outrider
COPY --from=build /out/outrider-draft-worker /usr/local/bin/
# As numbers, by which Kubernetes sees that this is not root (runAsNonRoot).
USER 10001:10001
VOLUME /models
# 8120: gRPC for routers. 8121: health and metrics.
EXPOSE 8120 8121
STOPSIGNAL SIGTERM
# A worker binds its ports after the checkpoint is loaded, which takes time for a large one.
HEALTHCHECK --interval=5s --timeout=2s --start-period=300s \
    CMD ["curl", "--fail", "--silent", "--output", "/dev/null", "http://127.0.0.1:8121/health/ready"]
# To accept remote connections, add --listen and either certificates or --insecure.
ENTRYPOINT ["outrider-draft-worker"]
CMD ["--model", "/models/draft", "--admin", "0.0.0.0:8121"]
