# Every verb is one line over cargo or a script. `make` alone prints them.
.DEFAULT_GOAL := help
.PHONY: help deps helm-check observability-check traces-check up first-run console-check test test-release quick check fmt fuzz sanitize arm-check clients schemas docs measure measure-engine measure-never-lose measure-servers measure-lanes measure-lanes-cluster measure-plan measure-draft-ahead measure-router chaos kernels-check gpu-check gpu-check-dry gpu-bundle gpu-bundle-check clean

# Every verb compiles the workspace by clippy's driver, so that lints, tests and binaries share what is built. This is how
# `cargo clippy -- --deny warnings` calls it.
ifneq ($(shell command -v clippy-driver),)
export RUSTC_WORKSPACE_WRAPPER := clippy-driver
export CLIPPY_ARGS := --deny__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__
endif

# Of measure-engine.
MODEL ?= random:tests/llama-cpp/254m.json

help: ## print the verbs
	@awk -F ': .*## ' '/^[a-z-]+:.*## / { printf "  make %-21s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

deps: ## install what the build and the tests need (Debian; elsewhere it says what to install)
	@deploy/deps.sh build test

up: ## build, then run router, draft worker and target worker on the bundled pair (ARGS="--draft ngram ...")
	@deploy/deps.sh build
	cargo build --locked --workspace --exclude tests --bins
	@"$${CARGO_TARGET_DIR:-target}/debug/outrider" up $(ARGS)

first-run: ## build, then record the first minutes of a newcomer as text: time to ready, the line of evidence, memory (ARGS="--ballast 0")
	@deploy/deps.sh build
	cargo build --locked --workspace --exclude tests --bins
	@tests/first-run.sh "$${CARGO_TARGET_DIR:-target}/debug/outrider" $(ARGS)

console-check: ## click through the console of `outrider up` in headless Chromium and write docs/console/*.png (URL=http://127.0.0.1:8002/: of a router that runs)
	@deploy/deps.sh browser
	$(if $(URL),,cargo build --locked --workspace --exclude tests --bins)
	@PYTHONPATH="$$(deploy/wheel.sh websocket-client 1.9.2 websocket/__init__.py)/.." python3 tests/console/check.py $(if $(URL),--url $(URL),--outrider "$${CARGO_TARGET_DIR:-target}/debug/outrider") $(if $(ARGS),-- $(ARGS))

test: ## the one gate: formatting, lints, kernels, documentation, every test (what .ci/run runs)
	@deploy/deps.sh build test
	@$(MAKE) --no-print-directory check
	@$(MAKE) --no-print-directory kernels-check
	@$(MAKE) --no-print-directory docs
	cargo nextest run --locked --workspace --lib --bins --tests --test-threads $$(($$(nproc) + 2))

test-release: ## every test once as it is shipped, in the release profile, in a target directory of their own (an hour on 2 cores; no link-time optimisation, which each of a hundred programs would pay)
	CARGO_TARGET_DIR=$(or $(CARGO_TARGET_DIR),target)/suite CARGO_PROFILE_RELEASE_LTO=off SERVER_BINARIES=--release \
	cargo nextest run --locked --release --workspace --lib --bins --tests --no-fail-fast

quick: ## formatting, lints and unit tests of every crate: no processes, no clusters
	cargo fmt --all --check
	cargo nextest run --locked --workspace --lib

check: ## formatting and lints, warnings denied; compiles all that `make test` runs
	cargo fmt --all --check
	cargo build --locked --workspace --lib --bins --tests --examples

fmt: ## format the tree
	cargo fmt --all

fuzz: ## mutated checkpoints are refused or run, 20,000 of each kind (CASES=n); the gate tries 256; fuzz/Cargo.toml says how to fuzz by coverage
	PROPTEST_CASES=$(or $(CASES),20000) cargo nextest run --locked --package outrider-engine --test load_fuzz

sanitize: ## the engine's unit and kernel tests under the address sanitizer, in a target directory of their own (TEST="is_its_twin" picks)
	RUSTC_WORKSPACE_WRAPPER=$(CURDIR)/engine/address-sanitizer.sh CARGO_TARGET_DIR=$(or $(CARGO_TARGET_DIR),target)/sanitize \
	cargo test --locked --package outrider-engine --package outrider-cpu-kernels --lib --test twins \
	  --config profile.dev.package.outrider-engine.opt-level=1 --config profile.dev.package.outrider-cpu-kernels.opt-level=1 -- $(TEST)

arm-check: ## the engine's CPU kernels for 64-bit ARM against their twins under qemu (needs rustup's target, gcc-aarch64-linux-gnu, qemu-user)
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu" \
	cargo test --locked --target aarch64-unknown-linux-gnu --package outrider-cpu-kernels --lib --test twins -- $(TEST)

measure: ## acceptance and time per token by task type on the bundled pair, drafting against k = 0 (ARGS="--temperature 1")
	cargo build --locked --workspace --bins
	@"$${CARGO_TARGET_DIR:-target}/debug/acceptance-table" $(ARGS)

chaos: ## faults of every kind, by a seed, to a fleet of real processes under load (ARGS="--seed 7 --faults 100", "--only kill-target", "overload", "--help")
	cargo build --locked --workspace --bins
	@"$${CARGO_TARGET_DIR:-target}/debug/chaos" $(ARGS)

clients: ## programs that people have (anthropic, instructor, pydantic-ai, litellm, langchain-openai, lm-eval, aiperf from PyPI; openai from npm), each in its own environment, against a running cluster, as a table (ARGS="litellm" picks; guidellm and vllm, whose environments take 6 GB and more, only by name)
	cargo build --locked --workspace --bins
	@"$${CARGO_TARGET_DIR:-target}/debug/clients" $(ARGS)

schemas: ## 1,000 generated JSON schemas on the bundled pair, T in {0, 1}: ids equal at k = 0, 4, 8 and with trees, answers valid by another library (ARGS="--from 0 --to 100"; ARGS="--pairs 40" measures what a grammar costs)
	cargo build --locked --workspace --bins
	@"$${CARGO_TARGET_DIR:-target}/debug/schemas" $(ARGS)

measure-router: ## what the router (release build) costs, with workers that only keep time: CPU, added latency, memory at scale, traces (ARGS="cpu --streams 16", latency, scale, traces)
	cargo build --locked --workspace --bins
	cargo build --locked --release --package outrider-router
	@"$${CARGO_TARGET_DIR:-target}/debug/router-cost" $(or $(ARGS),cpu) --router "$${CARGO_TARGET_DIR:-target}/release/outrider-router"

measure-engine: ## the CPU engine (release build) beside llama.cpp by turns, by format and rows; builds llama.cpp first (MODEL=random:CONFIG.json ARGS="--isa avx2")
	cargo build --locked --release --package outrider-engine --example speed
	@tests/llama-cpp/build.sh
	@.deps/llama-cpp/venv/bin/python tests/llama-cpp/to_gguf.py --model $(MODEL) --out .deps/llama-cpp/gguf
	@python3 tests/llama-cpp/engine.py --model $(MODEL) --gguf .deps/llama-cpp/gguf --llama .deps/llama-cpp --speed "$${CARGO_TARGET_DIR:-target}/release/examples/speed" $(ARGS)

measure-never-lose: ## the router's own choice against no speculation, by streams and temperature, fresh processes each time, the pair of `make up` (ARGS="--isa native,avx2 --runs 10")
	cargo build --locked --workspace --bins
	@tests/never-lose.py --outrider "$${CARGO_TARGET_DIR:-target}/debug/outrider" $(ARGS)

measure-servers: ## `outrider up` (release build) beside llama.cpp's server by turns, the bundled pair with ballast: tokens/s, TTFT, CPU; builds llama.cpp first (ARGS="--weights bf16 --kinds none")
	cargo build --locked --release --workspace --exclude tests --bins
	@tests/llama-cpp/build.sh server
	@.deps/llama-cpp/venv/bin/python tests/llama-cpp/servers.py --outrider "$${CARGO_TARGET_DIR:-target}/release/outrider" $(ARGS)

measure-lanes: ## lanes on a virtual clock: every fixed k, none, mixed traffic, overlap, scale (simulated; PROFILE=FILE ARGS="quick map")
	cargo run --locked --package outrider-simulator --example lanes_sim -- $(ARGS) $(PROFILE)

measure-lanes-cluster: ## five points of the lanes map with real processes and workers that only keep time, against the simulator (some 6 minutes on a quiet machine; ARGS="1 3" picks)
	cargo build --locked --workspace --bins
	cargo run --locked --package outrider --example lanes_against_cluster -- $(ARGS)

measure-draft-ahead: ## a draft worker that drafts ahead against one that does not, by `outrider bench`; workers that only keep time, or PROFILE=pair (ARGS="--concurrency 1")
	cargo build --locked --workspace --bins
	@tests/draft-ahead.sh "$${CARGO_TARGET_DIR:-target}/debug" $(ARGS)

measure-plan: ## what `outrider plan` computes against the simulator and against a running cluster
	cargo build --locked --workspace --bins
	cargo run --locked --package outrider --example plan_against_simulator
	cargo run --locked --package outrider --example plan_against_cluster

helm-check: ## lint and render the Helm chart, and check its objects against Kubernetes' schema; no cluster needed (ARGS="--show defaults")
	@test -e .deps/helm/ready || { python3 -m venv .deps/helm && .deps/helm/bin/pip install --quiet --disable-pip-version-check \
	  helm-python-sdk==0.2.2 kubernetes-validate==1.37.0 && touch .deps/helm/ready; }
	@.deps/helm/bin/python deploy/helm-check.py $(ARGS)

observability-check: ## promtool on the alerts and their tests, Grafana's types on the dashboard, every query against a Prometheus that scrapes a cluster under load
	@deploy/deps.sh build prometheus
	cargo build --locked --workspace --exclude tests --bins
	@test -e .deps/observability/ready || { python3 -m venv .deps/observability && .deps/observability/bin/pip install --quiet \
	  --disable-pip-version-check 'grafana-foundation-sdk==1769699998!10.1.0' PyYAML==6.0.3 && touch .deps/observability/ready; }
	@.deps/observability/bin/python tests/observability/check.py --binaries "$${CARGO_TARGET_DIR:-target}/debug" $(ARGS)

traces-check: ## a request's trace over three processes in a real collector, over gRPC and HTTP, and its picture in that collector's viewer (docs/console/trace.png)
	@deploy/deps.sh build browser
	cargo build --locked --workspace --exclude tests --bins
	@test -e .deps/phoenix/ready || { python3 -m venv .deps/phoenix && .deps/phoenix/bin/pip install --quiet --disable-pip-version-check \
	  arize-phoenix==20.26.1 websocket-client==1.9.2 && touch .deps/phoenix/ready; }
	@.deps/phoenix/bin/python tests/observability/traces.py --outrider "$${CARGO_TARGET_DIR:-target}/debug/outrider" $(ARGS)

kernels-check: ## every CUDA kernel compiled for every architecture that is served, with registers and spills; no GPU needed
	@cargo build --locked --workspace --lib --bins --tests --examples
	@LD_LIBRARY_PATH="$$(deploy/nvrtc.sh):$$LD_LIBRARY_PATH" "$${CARGO_TARGET_DIR:-target}/debug/examples/kernels_check"

gpu-check: ## on a machine with a GPU: every CUDA kernel against its naive twin, whole models against the CPU engine, timings (ARGS="--out FILE kernels models ..")
	@cargo build --locked --package outrider-engine --example gpu_check
	@"$${CARGO_TARGET_DIR:-target}/debug/examples/gpu_check" $(ARGS)

gpu-check-dry: ## the same program at small sizes over a driver that is the host; its times are of no meaning
	@cargo build --locked --package outrider-engine --example kernels_check --example gpu_check
	@LD_LIBRARY_PATH="$$("$${CARGO_TARGET_DIR:-target}/debug/examples/kernels_check" --host-driver):$$(deploy/nvrtc.sh):$$LD_LIBRARY_PATH" \
	  "$${CARGO_TARGET_DIR:-target}/debug/examples/gpu_check" --dry $(ARGS)

gpu-bundle: ## what a machine with a GPU needs for gpu-check, in one folder: program, kernels as machine code, models (ARGS=DIR)
	@deploy/gpu-bundle.sh $(ARGS)

gpu-bundle-check: ## that folder, unpacked elsewhere and run from an empty environment over a driver that is the host (ARGS="device text" picks sections)
	@deploy/gpu-bundle-check.sh $(ARGS)

docs: ## the API documentation, private items too, in target/doc
	RUSTDOCFLAGS="--deny warnings --allow rustdoc::private-intra-doc-links" cargo doc --locked --workspace --no-deps --document-private-items

clean: ## remove what was built
	cargo clean
