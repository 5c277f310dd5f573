//! Constructors of [`Engine`]: from a checkpoint, or with random weights from a configuration.

use std::marker::PhantomData;
use std::sync::Arc;

use cpu_kernels::{BLOCK_SIZE, MatrixFormat, Threads};

use super::Engine;
use crate::EngineError;
use crate::ballast::Ballast;
use crate::block_manager::BlockManager;
use crate::cuda::load_on_gpus;
use crate::kv_limits::max_model_len;
use crate::load::{Loaded, MAX_THREADS, load_on_cpu};
use crate::model_config::fields::read_file;
use crate::model_config::{CONFIG_FILE, ModelConfig};
use crate::model_name::model_name;
use crate::nodes::{Follower, Nodes};
use crate::numerics_id::{NumericsClass, NumericsParts};
use crate::options::{EngineInfo, EngineStats, LoadOptions};
use crate::weights::{Checkpoint, Formats, ModelSpec, RandomTensors, TensorSource};

impl Engine {
    /// Loads a checkpoint into memory, converted or quantized if the requested format differs from the stored
    /// one. Reads every byte twice, the second time for [`EngineInfo::numerics_id`]. Nothing is read later.
    pub fn load(options: &LoadOptions) -> Result<Engine, EngineError> {
        Self::load_by(options, |source, model| load_on_device(options, source, model, None))
    }

    /// Like [`Engine::load`], for the leader of several nodes, each of which loads its own ranks.
    /// `tensor_parallel` counts the ranks of all nodes. KV memory is this node's; the node with memory for
    /// the fewest blocks determines their number.
    pub fn load_on_nodes(options: &LoadOptions, nodes: Nodes) -> Result<Engine, EngineError> {
        assert!(nodes.is_leader(), "the other nodes follow");
        Self::load_part(options, &Arc::new(nodes))
    }

    /// Loads the ranks of a node. A failure on any node fails all of them.
    fn load_part(options: &LoadOptions, nodes: &Arc<Nodes>) -> Result<Engine, EngineError> {
        let load = |source: &dyn TensorSource, model| load_on_device(options, source, model, Some(nodes));
        let loaded = Self::load_by(options, load).and_then(|engine| {
            nodes.agree_on_numerics(&engine.info.numerics_id)?;
            Ok(engine)
        });
        loaded.inspect_err(|error| nodes.report_failure(error))
    }

    /// Loads a checkpoint with a function that puts its weights on a device.
    pub(crate) fn load_by(
        options: &LoadOptions,
        load: impl FnOnce(&dyn TensorSource, ModelSpec) -> Result<Loaded, EngineError>,
    ) -> Result<Engine, EngineError> {
        check_threads(options)?;
        let config = ModelConfig::load(&options.model_dir)?;
        max_model_len(options, &config, None)?;
        let mut identity = read_file(&options.model_dir.join(CONFIG_FILE))?;
        let checkpoint = Checkpoint::open(&options.model_dir, &config)?;
        let formats = checkpoint.formats(options.weights, &config);
        let num_parameters = config.num_parameters();
        let (loaded, model) = if options.ballast == 0 {
            let model = ModelSpec { config, formats };
            (load(&checkpoint, model.clone())?, model)
        } else {
            Ballast::check_formats(options.ballast, formats)?;
            let ballast = Ballast::plan(options.ballast, &config)?;
            identity.extend_from_slice(ballast.name().as_bytes());
            let model = ModelSpec { config: ballast.apply(config), formats };
            (load(&ballast.wrap(&checkpoint), model.clone())?, model)
        };
        let digest = checkpoint.digest(&Threads::new(options.threads)?)?;
        let mut engine = Self::from_loaded(options, loaded, &model, &identity, digest)?;
        engine.info.ballast_parameters = engine.info.num_parameters - num_parameters;
        engine.log_loaded(formats);
        Ok(engine)
    }

    /// Creates a model with random weights from a configuration alone: `options.model_dir` is the path of a
    /// config.json. The same seed gives the same model in every format; "as stored" is bf16. For measuring
    /// speed; its text is noise. Refuses ballast.
    pub fn random(options: &LoadOptions, seed: u64) -> Result<Engine, EngineError> {
        Self::random_by(options, seed, |source, model| load_on_device(options, source, model, None))
    }

    /// Creates a model with random weights with a function that puts them on a device.
    pub(crate) fn random_by(
        options: &LoadOptions,
        seed: u64,
        load: impl FnOnce(&dyn TensorSource, ModelSpec) -> Result<Loaded, EngineError>,
    ) -> Result<Engine, EngineError> {
        check_threads(options)?;
        if options.ballast != 0 {
            let reason = "expected 0: a model with random weights has no original".to_owned();
            let value = options.ballast.to_string();
            return Err(EngineError::BadOption { option: "ballast", value, reason });
        }
        let config = ModelConfig::read(&options.model_dir)?;
        let config_bytes = read_file(&options.model_dir)?;
        let source = RandomTensors { seed };
        let formats = Formats::resolve(options.weights, MatrixFormat::Bf16);
        let model = ModelSpec { config, formats };
        let loaded = load(&source, model.clone())?;
        let mut digest = [0; 32];
        digest[..8].copy_from_slice(&seed.to_le_bytes());
        let engine = Self::from_loaded(options, loaded, &model, &config_bytes, digest)?;
        engine.log_loaded(formats);
        Ok(engine)
    }

    /// Creates an engine from a loaded model. The id is hashed from config.json's bytes and `checkpoint`, a
    /// digest of the weights.
    fn from_loaded(
        options: &LoadOptions,
        loaded: Loaded,
        model: &ModelSpec,
        config_bytes: &[u8],
        checkpoint: [u8; 32],
    ) -> Result<Engine, EngineError> {
        let ModelSpec { config, formats } = model;
        let Loaded { numerics, runner, draws, .. } = loaded;
        let NumericsClass { kernel_class, device_class } = numerics;
        let blocks = BlockManager::new(loaded.kv_blocks);
        let numerics = NumericsParts {
            config: config_bytes,
            checkpoint,
            weight_format: formats.as_str(),
            kv_format: formats.kv().as_str(),
            kernel_class,
            device_class,
        };
        let info = EngineInfo {
            model_id: model_name(config.name.as_deref(), &options.model_dir),
            vocab_size: config.vocab_size as u32,
            max_model_len: max_model_len(options, config, Some((loaded.kv_size, loaded.kv_blocks)))?,
            eos_token_ids: config.eos_token_ids.clone(),
            numerics_id: numerics.id(),
            kv_blocks: blocks.total_blocks(),
            kv_block_size: BLOCK_SIZE as u32,
            num_parameters: config.num_parameters(),
            ballast_parameters: 0,
            weight_bytes: loaded.weight_bytes,
            resident_bytes: loaded.weight_bytes + loaded.table_bytes,
            kv_bytes_per_token: loaded.kv_bytes_per_token,
        };
        Ok(Engine { info, runner, draws, blocks, stats: EngineStats::default(), not_sync: PhantomData })
    }

    fn log_loaded(&self, formats: Formats) {
        let info = &self.info;
        tracing::info!(
            model_id = info.model_id,
            parameters = info.num_parameters,
            ballast_parameters = info.ballast_parameters,
            weights = formats.as_str(),
            weight_bytes = info.weight_bytes,
            max_model_len = info.max_model_len,
            kv_blocks = info.kv_blocks,
            numerics_id = info.numerics_id,
            "model loaded"
        );
    }
}

impl Follower {
    /// Loads the ranks of a node other than the leader, see [`Engine::load_on_nodes`].
    pub fn load(options: &LoadOptions, nodes: Nodes) -> Result<Follower, EngineError> {
        assert!(!nodes.is_leader(), "the leader has the engine");
        let nodes = Arc::new(nodes);
        let engine = Engine::load_part(options, &nodes)?;
        Ok(Follower::new(engine, nodes))
    }
}

/// Loads a model's ranks onto the CPU or GPUs; with `nodes`, those of this node.
fn load_on_device(
    options: &LoadOptions,
    source: &dyn TensorSource,
    model: ModelSpec,
    nodes: Option<&Arc<Nodes>>,
) -> Result<Loaded, EngineError> {
    match &options.gpus {
        Some(gpus) => load_on_gpus(options, source, model, (gpus, nodes)),
        None => load_on_cpu(options, source, model, nodes),
    }
}

fn check_threads(options: &LoadOptions) -> Result<(), EngineError> {
    if options.threads == 0 || options.threads > MAX_THREADS {
        let reason = format!("expected 1 to {MAX_THREADS}");
        return Err(EngineError::BadOption { option: "threads", value: options.threads.to_string(), reason });
    }
    Ok(())
}
