//! Names and shapes of a decoder's tensors, as transformers saves them, and the part of each that a rank
//! holds.

use std::ops::Range;
use std::time::{Duration, Instant};

use cpu_kernels::{KSlices, Norm};

use super::{Layer, Llama};
use crate::EngineError;
use crate::backend::{AttentionLayer, Backend};
use crate::model_config::ModelConfig;
use crate::model_config::tensors::{EMBEDDING, FINAL_NORM, LM_HEAD};
use crate::shard::Shard;
use crate::weights::{Formats, LinearFormat, LinearTensors, ModelSpec, TensorPart, TensorSource};

/// Interval between two log lines of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// Loads the tensors of one rank in one format.
struct Loader<'a, B> {
    backend: &'a B,
    source: &'a dyn TensorSource,
    config: &'a ModelConfig,
    formats: Formats,
    shard: Shard,
}

/// Projections with the same input.
struct Projections<'a> {
    /// Module name, total number of outputs, and this rank's range of them.
    outputs: Vec<(String, usize, Range<usize>)>,
    /// Name of the bias tensor of a module, if there is a bias.
    bias: Option<&'a str>,
    /// K-slices of the sums, in columns of the whole matrix; only this rank's slices if it does not hold all
    /// columns.
    slices: KSlices,
    /// Total length of the sums.
    k: usize,
}

impl<B: Backend> Llama<B> {
    /// Loads a rank's part of every tensor that the configuration implies, converted or quantized as needed.
    /// Ranks of one process may share the embedding table.
    pub(crate) fn load(
        backend: &B,
        source: &dyn TensorSource,
        model: ModelSpec,
        shard: Shard,
        embedding: Option<B::Table>,
    ) -> Result<Self, EngineError> {
        let ModelSpec { config, formats } = model;
        let loader = Loader { backend, source, config: &config, formats, shard };
        let shape = [config.vocab_size, config.hidden_size];
        let whole = TensorPart::whole(EMBEDDING.to_owned(), shape);
        let (embedding, lm_head) = match embedding {
            Some(table) => (table, loader.lm_head()?),
            None if loader.shares_tied_matrix() => backend.load_tied(source, &whole, formats.embedding)?,
            None => (backend.load_table(source, &whole, formats.embedding)?, loader.lm_head()?),
        };
        let mut layers = Vec::new();
        let mut last_log = Instant::now();
        for layer in 0..config.num_layers {
            layers.push(loader.layer(layer)?);
            if last_log.elapsed() >= PROGRESS_INTERVAL {
                last_log = Instant::now();
                let (done, of, rank) = (layer + 1, config.num_layers, shard.rank);
                tracing::info!(done, of, rank, weights = formats.as_str(), "loading layers");
            }
        }
        let final_norm = loader.norm(FINAL_NORM, config.hidden_size)?;
        Ok(Self { shard, embedding, layers, final_norm, lm_head, config })
    }

    /// Bytes of this rank's weights that a forward with logits reads, independent of its number of rows: all
    /// but the embedding table.
    pub(crate) fn weight_bytes(&self, backend: &B) -> u64 {
        let layers = self.layers.iter().map(|layer| {
            let linears = [&layer.qkv, &layer.o, &layer.gate_up, &layer.down];
            linears.iter().map(|linear| backend.linear_bytes(linear)).sum::<u64>()
        });
        layers.sum::<u64>() + backend.linear_bytes(&self.lm_head) + 4 * self.config.norm_numbers()
    }
}

impl<B: Backend> Loader<'_, B> {
    fn layer(&self, layer: usize) -> Result<Layer<B>, EngineError> {
        let (config, shard) = (self.config, self.shard);
        let (hidden, dim) = (config.hidden_size, config.head_dim);
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let attention = |part: &str| name(&format!("self_attn.{part}"));
        let mlp = |part: &str| name(&format!("mlp.{part}"));
        let in_numbers = |heads: Range<usize>| heads.start * dim..heads.end * dim;
        let (q, kv) = (in_numbers(shard.heads(config)), in_numbers(shard.kv_heads(config)));
        let columns = shard.intermediate(config);

        let qk_norms = if config.qk_norm {
            let norm = |part| self.norm(&attention(part), dim);
            Some((norm("q_norm.weight")?, norm("k_norm.weight")?))
        } else {
            None
        };
        let bias = |present: bool| present.then_some("bias");
        let inputs = |outputs, present| Projections {
            outputs,
            bias: bias(present),
            slices: KSlices::whole(hidden),
            k: hidden,
        };
        let outputs = |module, present, slices, k| Projections {
            outputs: vec![(module, hidden, 0..hidden)],
            bias: bias(present),
            slices,
            k,
        };
        let qkv = vec![
            (attention("q_proj"), config.q_width(), q),
            (attention("k_proj"), config.kv_width(), kv.clone()),
            (attention("v_proj"), config.kv_width(), kv),
        ];
        let gate_up = ["gate_proj", "up_proj"]
            .map(|module| (mlp(module), config.intermediate_size, columns.clone()))
            .to_vec();
        let o = outputs(attention("o_proj"), config.biases.o, shard.o_slices(config), config.q_width());
        let down =
            outputs(mlp("down_proj"), config.biases.mlp, shard.down_slices(config), config.intermediate_size);
        Ok(Layer {
            attention: AttentionLayer { layout: shard.layout(config), layer, window: config.windows[layer] },
            input_norm: self.norm(&name("input_layernorm.weight"), hidden)?,
            qkv: self.linear(inputs(qkv, config.biases.qkv))?,
            qk_norms,
            o: self.linear(o)?,
            post_attention_norm: self.norm(&name("post_attention_layernorm.weight"), hidden)?,
            gate_up: self.linear(inputs(gate_up, config.biases.mlp))?,
            down: self.linear(down)?,
        })
    }

    /// Whether table and vocabulary projection are one matrix: tied, not split and in a float format.
    /// Otherwise a tied table is stored twice: as stored for lookup, and as a projection.
    fn shares_tied_matrix(&self) -> bool {
        self.formats.ties() && self.config.tie_word_embeddings && !self.shard.is_split()
    }

    fn lm_head(&self) -> Result<B::Linear, EngineError> {
        let (config, shard) = (self.config, self.shard);
        let tensor = if config.tie_word_embeddings { EMBEDDING } else { LM_HEAD };
        let module = tensor.trim_end_matches(".weight").to_owned();
        let (linear, tied) = (self.formats.linear, config.tie_word_embeddings);
        let is_fp8 = matches!(linear, LinearFormat::Fp8(_));
        let as_stored = is_fp8 && !tied && self.source.stores_fp8(tensor);
        let format = if as_stored { linear } else { self.formats.vocabulary() };
        self.linear_in_format(
            format,
            Projections {
                outputs: vec![(module, config.vocab_size, shard.vocabulary(config))],
                bias: None,
                slices: KSlices::whole(config.hidden_size),
                k: config.hidden_size,
            },
        )
    }

    fn linear(&self, projections: Projections<'_>) -> Result<B::Linear, EngineError> {
        self.linear_in_format(self.formats.linear, projections)
    }

    fn linear_in_format(
        &self,
        format: LinearFormat,
        projections: Projections<'_>,
    ) -> Result<B::Linear, EngineError> {
        let Projections { outputs, bias, slices, k } = projections;
        let columns = slices.start()..slices.end();
        let mut biases = Vec::new();
        if let Some(bias) = bias {
            for (module, width, own_rows) in &outputs {
                let whole = self.source.vector(&format!("{module}.{bias}"), *width)?;
                biases.extend_from_slice(&whole[own_rows.clone()]);
            }
        }
        let part = |(module, width, rows): (String, usize, Range<usize>)| TensorPart {
            name: format!("{module}.weight"),
            shape: [width, k],
            rows,
            columns: columns.clone(),
        };
        self.backend.load_linear(&LinearTensors {
            source: self.source,
            format,
            parts: outputs.into_iter().map(part).collect(),
            bias: bias.map(|_| biases),
            partial: columns.len() < k,
            slices,
        })
    }

    fn norm(&self, name: &str, width: usize) -> Result<B::Norm, EngineError> {
        let weight = self.source.vector(name, width)?;
        self.backend.load_norm(Norm { weight, eps: self.config.rms_norm_eps })
    }
}
