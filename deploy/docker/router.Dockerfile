# The router: no model files, no engine. Build from the repository root:
#   docker build -f deploy/docker/router.Dockerfile -t outrider-router .
FROM rust:1.95-slim-bookworm AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends protobuf-compiler libprotobuf-dev \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# A name of this build for --version, /version and outrider_build_info, such as a commit.
ARG OUTRIDER_BUILD
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target,sharing=locked \
    cargo build --locked --release -p outrider-router \
 && install -D target/release/outrider-router /out/outrider-router

FROM debian:bookworm-slim
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates curl \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --system --gid 10001 outrider \
 && useradd --system --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin outrider
COPY --from=build /out/outrider-router /usr/local/bin/
# As numbers, by which Kubernetes sees that this is not root (runAsNonRoot).
USER 10001:10001
# 8000: OpenAI API. 8001: gRPC. 8002: health and metrics.
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=2s --start-period=10s \
    CMD ["curl", "--fail", "--silent", "--output", "/dev/null", "http://127.0.0.1:8002/health/live"]
# These arguments do not suffice: without --discovery the router finds no worker, and without --api-keys it
# refuses to listen beyond loopback (exit code 64). Give both, with the addresses below:
#   docker run -v ./keys:/keys:ro outrider-router --http 0.0.0.0:8000 --grpc 0.0.0.0:8001 --admin 0.0.0.0:8002 \
#       --api-keys /keys --discovery etcd://10.0.0.5:2379/outrider
ENTRYPOINT ["outrider-router"]
CMD ["--http", "0.0.0.0:8000", "--grpc", "0.0.0.0:8001", "--admin", "0.0.0.0:8002"]
