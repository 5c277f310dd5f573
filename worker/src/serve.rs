//! A worker process: load, bind, serve, register. The order matters: a checkpoint that cannot be loaded ends
//! the process before any port is bound, and a worker is registered only once it can be reached.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use engine::cuda::GpuOptions;
use engine::{Engine, Follower, LoadOptions, Nodes};
use proto::v1;
use proto::v1::worker_server::WorkerServer;
use scheduling::cost::StepTimes;
use service::accept::{Connections, Listener, bind};
use service::discovery::Discovery;
use service::health::{self, Health, serve_admin};
use service::metrics::Metrics;
use service::shutdown::Lifetime;
use service::tls::PresentedCertificates;
use speculation::Role;
use speculation::fingerprint::TokenList;
use text::asset;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tonic::service::Routes;

use crate::assets::Assets;
use crate::compute_device::ComputeDevice;
use crate::config::WorkerConfig;
use crate::executor::StepExecutor;
use crate::facts::WorkerFacts;
use crate::grammars::Grammars;
use crate::grpc::WorkerService;
use crate::metrics::WorkerMetrics;
use crate::model::{ModelExecutor, max_tree_tokens};
use crate::profile::{StepProfile, profile};
use crate::reactor::Reactor;
use crate::registration;
use crate::role_logic::RoleLogic;
use crate::step_loop::{MAILBOX_FRAMES, Mailbox, Message, StepLoop};
use crate::synthetic::wire::delayed;

/// A loaded worker, before any port is bound.
#[derive(Debug)]
pub struct LoadedWorker<M> {
    /// Computes the replies.
    pub executor: M,
    /// Facts for the handshake.
    pub facts: WorkerFacts,
    /// Text files of the model, if there is a model.
    pub assets: Option<Assets>,
    /// Maximum outcomes of a proposal to draft ahead of; 0 at target workers ([`crate::ahead`]).
    pub draft_ahead: usize,
    /// Simulated network round trip to a router; zero for a real network.
    pub round_trip: Duration,
}

impl<M> LoadedWorker<M> {
    /// A worker that drafts nothing ahead and has a real network.
    pub fn new(executor: M, facts: WorkerFacts, assets: Option<Assets>) -> Self {
        Self { executor, facts, assets, draft_ahead: 0, round_trip: Duration::ZERO }
    }
}

/// Addresses of a worker.
#[derive(Debug, Clone)]
pub struct Addresses {
    /// Address for routers.
    pub listen: SocketAddr,
    /// Address for health and metrics.
    pub admin: SocketAddr,
}

/// A loaded checkpoint.
pub struct LoadedModel {
    /// Runs the model.
    pub engine: Engine,
    /// Text files of the checkpoint.
    pub assets: Assets,
    /// Facts for the handshake.
    pub facts: WorkerFacts,
    /// Cores that compute threads are pinned to; `None`: not pinned.
    pub cores: Option<Vec<usize>>,
}

/// Loads the configured checkpoint for a role with the logic `role_logic`; with `nodes`, as node 0 of them.
pub fn load<D: RoleLogic>(
    config: &WorkerConfig,
    role: Role,
    role_logic: D,
    nodes: Option<Nodes>,
) -> anyhow::Result<LoadedWorker<ModelExecutor<D>>> {
    let LoadedModel { engine, assets, facts, cores } = load_model(config, role, nodes)?;
    let executor = ModelExecutor::new(engine, role, facts.vocab_size, config.max_batch_rows, role_logic)
        .with_grammars(grammars(&assets)?)
        .pinned_to(cores);
    Ok(LoadedWorker::new(executor, facts, Some(assets)))
}

/// Loads the ranks of another node, and returns the cores that its compute threads are to be pinned to.
pub fn load_follower(config: &WorkerConfig, nodes: Nodes) -> anyhow::Result<(Follower, Option<Vec<usize>>)> {
    use_isa(config)?;
    let loaded = Follower::load(&load_options(config)?, nodes);
    let follower = loaded.with_context(|| format!("--device {}", config.device))?;
    let cores = if config.pin { Some(cores_for(follower.num_threads())?) } else { None };
    Ok((follower, cores))
}

/// Loads the configured checkpoint; with `nodes`, as node 0 of them.
pub fn load_model(config: &WorkerConfig, role: Role, nodes: Option<Nodes>) -> anyhow::Result<LoadedModel> {
    let (mut engine, assets) = load_engine(config, role, nodes)?;
    let info = engine.info().clone();
    let StepProfile { step_times, batch_times } =
        if config.profile_steps { profile(&mut engine) } else { StepProfile::default() };
    let facts = WorkerFacts {
        worker_id: rand::random(),
        role,
        model_id: config.served_model_name.clone().unwrap_or(info.model_id),
        numerics_id: info.numerics_id,
        vocab_size: assets.token_list().num_ids().min(info.vocab_size),
        max_model_len: info.max_model_len,
        eos_token_ids: info.eos_token_ids,
        kv_blocks: info.kv_blocks,
        kv_block_size: info.kv_block_size,
        max_tree_tokens: max_tree_tokens(role),
        task_types: Vec::new(),
        is_shadow: false,
        ballast_parameters: info.ballast_parameters,
        step_times,
        batch_times,
        cpu: if matches!(config.device, ComputeDevice::Cpu) { cpu_share(engine.num_threads()) } else { None },
    };
    let cores = if config.pin { Some(cores_for(engine.num_threads())?) } else { None };
    Ok(LoadedModel { engine, assets, facts, cores })
}

/// Starts computing grammar masks for the tokenizer of these assets.
pub fn grammars(assets: &Assets) -> anyhow::Result<Grammars> {
    let tokenizer = assets.get(asset::TOKENIZER).context("a model's assets hold its tokenizer.json")?;
    Ok(Grammars::start(tokenizer)?)
}

/// The cores that this number of compute threads may use; `None` if the system does not tell.
fn cpu_share(threads: usize) -> Option<v1::CpuShare> {
    // The kernel's boot id is the same in all containers of a host.
    let host_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let cores = engine::allowed_cores().ok()?.into_iter().filter_map(|core| u32::try_from(core).ok());
    Some(v1::CpuShare {
        host_id: host_id.trim().to_owned(),
        cores: cores.collect(),
        threads: threads.try_into().unwrap_or(u32::MAX),
    })
}

/// Cores for the compute threads, from those that this process may run on.
fn cores_for(threads: usize) -> anyhow::Result<Vec<usize>> {
    let cores = engine::allowed_cores()?;
    anyhow::ensure!(
        threads <= cores.len(),
        "pin: {threads} threads need a core each, but this process may only use {}: lower --threads or set --pin false",
        cores.len()
    );
    Ok(cores)
}

fn use_isa(config: &WorkerConfig) -> anyhow::Result<()> {
    Ok(config.isa.as_deref().map_or(Ok(()), engine::use_instruction_set)?)
}

/// What the engine is loaded with.
fn load_options(config: &WorkerConfig) -> anyhow::Result<LoadOptions> {
    let gpus = match &config.device {
        ComputeDevice::Cpu => None,
        ComputeDevice::Cuda(ordinals) => Some(GpuOptions {
            ordinals: ordinals.clone(),
            memory_utilization: config.gpu_memory_utilization,
            graphs: config.cuda_graphs,
            clusters: false,
            peer_sums: false,
            cublaslt_min_rows: (!config.cuda_deterministic).then_some(GpuOptions::CUBLASLT_MIN_ROWS),
            kernels: config.cuda_kernels.clone(),
        }),
    };
    Ok(LoadOptions {
        model_dir: config.model.clone().context("no model was given: pass --model DIR")?,
        weights: config.weights,
        threads: config.threads,
        tensor_parallel: config.tensor_parallel,
        kv_memory_bytes: config.kv_memory.bytes().map_err(|reason| anyhow::anyhow!("kv_memory: {reason}"))?,
        max_model_len: config.max_model_len,
        ballast: config.ballast,
        gpus,
    })
}

fn load_engine(config: &WorkerConfig, role: Role, nodes: Option<Nodes>) -> anyhow::Result<(Engine, Assets)> {
    use_isa(config)?;
    let options = load_options(config)?;
    let model_dir = &options.model_dir;
    let assets = Assets::load(model_dir)?;
    if role == Role::Target {
        // Routers fetch the text files from targets. A target with unusable ones would never be served,
        // without an error here.
        assets.check_text().with_context(|| {
            format!("{}: its text cannot be served, save it again with save_pretrained", model_dir.display())
        })?;
    }
    let tokenizer = model_dir.join("tokenizer.json");
    let began = std::time::Instant::now();
    let engine = match nodes {
        None => Engine::load(&options),
        Some(nodes) => Engine::load_on_nodes(&options, nodes),
    };
    let engine = match options.gpus {
        None => engine?,
        Some(_) => engine.with_context(|| format!("--device {}", config.device))?,
    };
    let info = engine.info();
    check_embeddings(&tokenizer, assets.token_list(), info.vocab_size)?;
    tracing::info!(
        model = info.model_id,
        parameters = info.num_parameters,
        ballast_parameters = info.ballast_parameters,
        kv_blocks = info.kv_blocks,
        numerics_id = info.numerics_id,
        isa = engine::instruction_set()?,
        took = ?began.elapsed(),
        "model loaded"
    );
    Ok((engine, assets))
}

/// Refuses a tokenizer with more ids than the model has embeddings, unless the others are added tokens: many
/// models were saved with some that they were not trained with. Prompts with such tokens are refused.
fn check_embeddings(tokenizer: &Path, tokens: &TokenList, num_embeddings: u32) -> anyhow::Result<()> {
    let num_ids = tokens.num_ids();
    if num_ids <= num_embeddings {
        return Ok(());
    }
    let shown = tokenizer.display();
    anyhow::ensure!(
        tokens.first_not_added(num_embeddings).is_none(),
        "{shown}: the tokenizer needs {num_ids} embeddings, the model has {num_embeddings}: use the tokenizer that the model was trained with"
    );
    let tokens =
        (num_embeddings..num_ids).filter_map(|id| tokens.get(id)).take(4).collect::<Vec<_>>().join(", ");
    tracing::warn!(
        "{shown}: added tokens have ids up to {}, but the model has {num_embeddings} embeddings: prompts with them are refused (first: {tokens})",
        num_ids - 1
    );
    Ok(())
}

/// Starts a loaded worker and registers it; everything it starts runs under `lifetime`.
pub async fn start<M: StepExecutor>(
    loaded: LoadedWorker<M>,
    config: &WorkerConfig,
    discovery: &dyn Discovery,
    lifetime: &Lifetime,
    health: &Health,
) -> anyhow::Result<Addresses> {
    let metrics = Metrics::of_process();
    health.register(&metrics);
    let worker_metrics = WorkerMetrics::new(&metrics);
    let connections = Connections::new(config.listener, &metrics);
    PresentedCertificates {
        listener: config.tls.as_ref(),
        worker: None,
        discovery: config.process.discovery.tls.as_ref(),
    }
    .register(&metrics);
    let LoadedWorker { executor, facts, assets, draft_ahead, round_trip } = loaded;
    worker_metrics.ballast_parameters.set(i64::try_from(facts.ballast_parameters).unwrap_or(i64::MAX));
    let listener = bind(config.listen).await?;
    let admin = bind(config.admin).await?;
    let addresses = Addresses { listen: listener.local_addr()?, admin: admin.local_addr()? };

    let reactor = Reactor::start(lifetime).context("cannot start the gRPC runtime")?;
    let runtime = reactor.handle();
    let (messages, inbox) = mpsc::channel(MAILBOX_FRAMES);
    let inbox = if round_trip.is_zero() { inbox } else { delayed(inbox, round_trip, lifetime)? };
    let mailbox = Mailbox { messages, read_delay: reactor.read_delay() };
    let times = StepTimes::with_batches(&facts.step_times, &facts.batch_times);
    let step_loop =
        StepLoop::new(executor, &times, worker_metrics.clone()).drafting_ahead(draft_ahead, &times);
    let device_lifetime = lifetime.clone();
    lifetime.spawn_essential_thread("device", move || step_loop.run(inbox, reactor, &device_lifetime))?;

    announce_drain(mailbox.messages.clone(), lifetime);
    let member = registration::member(&facts, assets.as_ref(), config, addresses.listen);
    let registered = worker_metrics.registered.clone();
    let worker_service = WorkerService::new(facts, assets, mailbox, worker_metrics, lifetime.clone());
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
        .build_v1()
        .context("the bundled proto descriptors are invalid")?;
    let services = Routes::new(health.grpc_service(&["outrider.v1.Worker"], lifetime).await)
        .add_service(reflection)
        .add_service(WorkerServer::new(worker_service).max_decoding_message_size(4 * proto::MAX_FRAME_BYTES));
    let listener = listener.into_std()?;
    {
        // Connections run on the runtime that accepts them.
        let _in_runtime = runtime.enter();
        let listener = Listener::new(TcpListener::from_std(listener)?, config.tls.clone(), &connections);
        listener.serve_grpc("grpc", services, lifetime);
    }
    serve_admin(admin, health::router(health.clone(), metrics), &connections, lifetime);
    registration::register(member, discovery, registered, lifetime).await?;
    health.set_ready();
    tracing::info!(listen = %addresses.listen, admin = %addresses.admin, "ready");
    Ok(addresses)
}

/// Notifies the device thread when the worker drains.
fn announce_drain(messages: mpsc::Sender<Message>, lifetime: &Lifetime) {
    let (draining, cancelled) = (lifetime.draining(), lifetime.cancelled());
    lifetime.spawn("drain", async move {
        draining.await;
        // If the device thread has ended, there is nothing to drain.
        drop(messages.send(Message::Drain).await);
        // Keeps the mailbox open as long as the worker runs.
        cancelled.await;
    });
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use speculation::fingerprint::token_list_from_json;

    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn a_worker_reports_the_cores_that_it_may_use() {
        let cpu = cpu_share(3).unwrap();
        let cores = engine::allowed_cores().unwrap();
        assert_eq!((cpu.cores.len(), cpu.threads), (cores.len(), 3));
        assert!(!cpu.cores.is_empty() && cpu.host_id.len() > 8, "{cpu:?}");
    }

    #[test]
    fn only_added_tokens_may_lack_embeddings() {
        let tokenizer = json!({ "model": { "vocab": { "a": 0, "b": 1, "c": 2 } }, "added_tokens": [
            { "id": 2, "content": "c" }, { "id": 3, "content": "<x>" }] });
        let tokens = token_list_from_json(&tokenizer.to_string()).unwrap();
        let check = |num_embeddings| check_embeddings(Path::new("t.json"), &tokens, num_embeddings);
        assert!([4, 3, 2].into_iter().all(|num_embeddings| check(num_embeddings).is_ok()));
        let error = check(1).unwrap_err().to_string();
        assert!(error.contains("needs 4 embeddings, the model has 1"), "{error}");
    }
}
