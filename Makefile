# Every target calls cargo or a script. `make` without a target lists them.
.DEFAULT_GOAL := help
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' Makefile)

# Targets (except sanitize) compile the workspace with clippy-driver, so that lints, tests and binaries share
# build output. The settings are those of `cargo clippy -- --deny warnings`.
ifneq ($(shell command -v clippy-driver),)
export RUSTC_WORKSPACE_WRAPPER := $(CURDIR)/deploy/clippy.sh
export CLIPPY_ARGS := --deny__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__
endif

# Where cargo builds, and the binaries of `servers` and `programs`.
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
BIN := $(TARGET_DIR)/debug

# The model of measure-engine.
MODEL ?= random:tests/llama-cpp/254m.json

help: ## list the targets
	@awk -F ': .*## ' '/^[a-z-]+:.*## / { printf "  make %-21s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Builds the three servers and the tool.
servers:
	@deploy/deps.sh build
	cargo build --locked --workspace --exclude tests --bins

# Builds these and the programs of the tests.
programs:
	cargo build --locked --workspace --bins

deps: ## install what the build and the tests need (Debian; on other systems, print what to install)
	@deploy/deps.sh build test

up: servers ## build, then run a router, a draft worker and a target worker with the bundled pair (ARGS="--draft ngram ...")
	@"$(BIN)/outrider" up $(ARGS)

first-run: servers ## build, then record a new user's first run: time to ready, gain from drafting, memory (ARGS="--ballast 0")
	@tests/first-run.sh "$(BIN)/outrider" $(ARGS)

console-check: $(if $(URL),,servers) ## test the console of `outrider up` in headless Chromium, pictures in target/console (SCREENSHOTS=docs/console updates the documents' ones, URL=http://127.0.0.1:8002/ tests a running router)
	@deploy/deps.sh browser
	@PYTHONPATH="$$(deploy/wheel.sh websocket-client 1.9.2 websocket/__init__.py)/.." python3 tests/console/check.py $(if $(SCREENSHOTS),--screenshots $(SCREENSHOTS)) $(if $(URL),--url $(URL),--outrider "$(BIN)/outrider") $(if $(ARGS),-- $(ARGS))

test: ## the full gate: formatting, lints, kernels, documentation and all tests (what .ci/run runs)
	@deploy/deps.sh build test
	@$(MAKE) --no-print-directory check
	@$(MAKE) --no-print-directory kernels-check
	@$(MAKE) --no-print-directory docs
	cargo nextest run --locked --workspace --lib --tests --test-threads $$(($$(nproc) + 2))

test-release: ## all tests in the release profile without link-time optimization (too slow for a hundred programs), in a separate target directory; takes an hour on 2 cores
	CARGO_TARGET_DIR=$(TARGET_DIR)/suite CARGO_PROFILE_RELEASE_LTO=off SERVER_BINARIES=--release \
	cargo nextest run --locked --release --workspace --lib --tests --no-fail-fast

quick: ## formatting, lints and unit tests of every crate, without starting processes or clusters
	cargo fmt --all --check
	cargo nextest run --locked --workspace --lib

check: ## formatting and lints, warnings denied; compiles everything that `make test` runs
	cargo fmt --all --check
	cargo build --locked --workspace --lib --bins --tests --examples

fuzz: ## load 20,000 mutated checkpoints of each kind, which must be rejected or run (CASES=n; the gate runs 256; fuzz/Cargo.toml describes coverage-guided fuzzing)
	PROPTEST_CASES=$(or $(CASES),20000) cargo nextest run --locked --package outrider-engine --test load_fuzz

sanitize: ## the engine's unit and kernel tests under AddressSanitizer, in a separate target directory (TEST="is_its_twin" selects tests)
	RUSTC_WORKSPACE_WRAPPER=$(CURDIR)/engine/address-sanitizer.sh CARGO_TARGET_DIR=$(TARGET_DIR)/sanitize \
	cargo test --locked --package outrider-engine --package outrider-cpu-kernels --lib --test twins \
	  --config profile.dev.package.outrider-engine.opt-level=1 --config profile.dev.package.outrider-cpu-kernels.opt-level=1 -- $(TEST)

arm-check: ## the engine's CPU kernels for 64-bit ARM against their naive twins under qemu (needs rustup's target, gcc-aarch64-linux-gnu, qemu-user)
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu" \
	cargo test --locked --target aarch64-unknown-linux-gnu --package outrider-cpu-kernels --lib --test twins -- $(TEST)

measure: programs ## acceptance and time per token by task type on the bundled pair, with drafting and at k = 0 (ARGS="--temperature 1")
	@"$(BIN)/acceptance-table" $(ARGS)

chaos: programs ## inject seeded random faults into a fleet of real processes under load (ARGS="--seed 7 --faults 100", "--only kill-target", "overload", "--help")
	@"$(BIN)/chaos" $(ARGS)

clients: programs ## run client programs (anthropic, instructor, pydantic-ai, litellm, langchain-openai, lm-eval, aiperf from PyPI; openai from npm), each in its own environment, against a running cluster and print a table (ARGS="litellm" selects; guidellm and vllm run only if named, because their environments take 6 GB and more)
	@"$(BIN)/clients" $(ARGS)

schemas: programs ## 1,000 generated JSON schemas on the bundled pair, T in {0, 1}: checks that ids are equal at k = 0, 4, 8 and with trees, and that another library accepts the answers (ARGS="--from 0 --to 100"; ARGS="--pairs 40" measures the cost of a grammar)
	@"$(BIN)/schemas" $(ARGS)

measure-router: programs ## costs of the router (release build) with synthetic workers: CPU, added latency, memory at scale, traces (ARGS="cpu --streams 16", latency, scale, traces)
	cargo build --locked --release --package outrider-router
	@"$(BIN)/router-cost" $(or $(ARGS),cpu) --router "$(TARGET_DIR)/release/outrider-router"

measure-engine: ## compare the CPU engine (release build) with llama.cpp by format and rows; builds llama.cpp first (MODEL=random:CONFIG.json ARGS="--isa avx2")
	cargo build --locked --release --package outrider-engine --example speed
	@tests/llama-cpp/build.sh
	@"$$(deploy/venv.sh llama-cpp-programs)" tests/llama-cpp/to_gguf.py --model $(MODEL) --out .deps/llama-cpp/gguf
	@python3 tests/llama-cpp/engine.py --model $(MODEL) --gguf .deps/llama-cpp/gguf --llama .deps/llama-cpp --speed "$(TARGET_DIR)/release/examples/speed" $(ARGS)

measure-never-lose: programs ## compare the k that the router chooses with no speculation, by streams and temperature, on the pair of `make up`; each cell starts new processes (ARGS="--isa native,avx2 --runs 10")
	@tests/never-lose.py --outrider "$(BIN)/outrider" $(ARGS)

measure-servers: ## compare `outrider up` (release build) with llama.cpp's server on the bundled pair with ballast: tokens/s, TTFT, CPU; builds llama.cpp first (ARGS="--weights bf16 --kinds none")
	cargo build --locked --release --workspace --exclude tests --bins
	@tests/llama-cpp/build.sh server
	@"$$(deploy/venv.sh llama-cpp-programs)" tests/llama-cpp/servers.py --outrider "$(TARGET_DIR)/release/outrider" $(ARGS)

measure-lanes: ## simulate lanes on a virtual clock: every fixed k, no drafting, mixed traffic, overlap, scale (PROFILE=FILE ARGS="quick map")
	cargo run --locked --package outrider-simulator --example lanes_sim -- $(ARGS) $(PROFILE)

measure-lanes-cluster: programs ## compare five points of the lanes map between the simulator and real processes with synthetic workers (about 6 minutes on an idle machine; ARGS="1 3" selects)
	cargo run --locked --package outrider --example lanes_against_cluster -- $(ARGS)

measure-draft-ahead: programs ## compare a draft worker that drafts ahead with one that does not, by `outrider bench`, with synthetic workers or PROFILE=pair (ARGS="--concurrency 1")
	@tests/draft-ahead.sh "$(BIN)" $(ARGS)

measure-plan: programs ## compare the results of `outrider plan` with the simulator and with a running cluster
	cargo run --locked --package outrider --example plan_against_simulator
	cargo run --locked --package outrider --example plan_against_cluster

helm-check: ## lint and render the Helm chart, and check its objects against Kubernetes' schema; needs no cluster (ARGS="--show defaults")
	@"$$(deploy/venv.sh helm)" deploy/helm-check.py $(ARGS)

observability-check: servers ## check the alerts and their tests with promtool, the dashboard with Grafana's types, and every query with a Prometheus that scrapes a cluster under load
	@deploy/deps.sh prometheus
	@"$$(deploy/venv.sh observability)" tests/observability/check.py --binaries "$(BIN)" $(ARGS)

traces-check: servers ## check a request's trace over three processes in a real collector, over gRPC and HTTP, and take a screenshot of it (docs/console/trace.png)
	@deploy/deps.sh browser
	@"$$(deploy/venv.sh phoenix)" tests/observability/traces.py --outrider "$(BIN)/outrider" $(ARGS)

kernels-check: ## compile every CUDA kernel for every supported architecture and report registers and spills; needs no GPU
	@cargo build --locked --workspace --lib --bins --tests --examples
	@LD_LIBRARY_PATH="$$(deploy/nvrtc.sh):$$LD_LIBRARY_PATH" "$(BIN)/examples/kernels_check"

gpu-check: ## on a machine with a GPU: every CUDA kernel against its naive twin, whole models against the CPU engine, timings (ARGS="--out FILE kernels models ..")
	@cargo build --locked --package outrider-engine --example gpu_check
	@"$(BIN)/examples/gpu_check" $(ARGS)

gpu-check-dry: ## gpu-check at small sizes with a driver that runs kernels on the host; its times are meaningless
	@cargo build --locked --package outrider-engine --example kernels_check --example gpu_check
	@LD_LIBRARY_PATH="$$("$(BIN)/examples/kernels_check" --host-driver):$$(deploy/nvrtc.sh):$$LD_LIBRARY_PATH" \
	  "$(BIN)/examples/gpu_check" --dry $(ARGS)

gpu-bundle: ## collect what a machine with a GPU needs for gpu-check in one folder: program, kernels as machine code, models (ARGS=DIR)
	@deploy/gpu-bundle.sh $(ARGS)

gpu-bundle-check: ## run that bundle in another folder with an empty environment and a driver that runs kernels on the host (ARGS="device text" selects sections)
	@deploy/gpu-bundle-check.sh $(ARGS)

gpu-image-check: ## assemble the files of the image for GPU workers, print their sizes, and serve a completion with them on a driver that runs kernels on the host; needs no docker (downloads 800 MB once)
	@deploy/gpu-image-check.sh

docs: ## the API documentation, including private items, in target/doc
	@cargo build --locked --workspace --lib --bins --tests --examples
	@deploy/docs.sh "$(TARGET_DIR)"
