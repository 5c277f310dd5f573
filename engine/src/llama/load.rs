//! Names and shapes of the tensors of a decoder, as transformers saves them.

use super::{Layer, Llama};
use std::time::{Duration, Instant};

use crate::EngineError;
use crate::backend::{Linear, LinearWeights, Norm};
use crate::cpu::{FloatMatrix, PackedMatrix, Threads};
use crate::k_slices::KSlices;
use crate::model_config::ModelConfig;
use crate::weights::{Formats, LinearFormat, RowReader, TensorSource};

/// Columns in a unit of down_proj's K-slices (docs/contract.md C2).
const DOWN_UNIT: usize = 32;

/// Between two lines of progress; what is mapped as it is loads before the first.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

const EMBEDDING: &str = "model.embed_tokens.weight";
const LM_HEAD: &str = "lm_head.weight";

/// Loads tensors of one model in one format.
struct Loader<'a> {
    source: &'a dyn TensorSource,
    config: &'a ModelConfig,
    formats: Formats,
    threads: &'a Threads,
}

impl Llama {
    /// Maps, converts or quantizes every tensor that the configuration implies.
    pub(crate) fn load(
        source: &dyn TensorSource,
        config: ModelConfig,
        formats: Formats,
        threads: &Threads,
    ) -> Result<Self, EngineError> {
        let loader = Loader { source, config: &config, formats, threads };
        let shape = [config.vocab_size, config.hidden_size];
        let embedding = source.matrix(EMBEDDING, shape, formats.embedding)?;
        let mut layers = Vec::new();
        let mut last_word = Instant::now();
        for layer in 0..config.num_layers {
            layers.push(loader.layer(layer)?);
            if last_word.elapsed() >= PROGRESS_INTERVAL {
                last_word = Instant::now();
                let (done, of) = (layer + 1, config.num_layers);
                tracing::info!(done, of, weights = formats.as_str(), "loading layers");
            }
        }
        let final_norm = loader.norm("model.norm.weight", config.hidden_size)?;
        let lm_head = match formats.linear {
            LinearFormat::Float(_) if config.tie_word_embeddings => {
                let slices = KSlices::whole(config.hidden_size);
                let packed = FloatMatrix::pack(std::slice::from_ref(&embedding), &slices, threads)?;
                Linear { weights: LinearWeights::Floats(packed), bias: None }
            }
            // Quantized, a tied table is there twice: as it was for looking up, and as a projection.
            _ => {
                let tensor = if config.tie_word_embeddings { EMBEDDING } else { LM_HEAD };
                let tensors = [(tensor.to_owned(), config.vocab_size)];
                loader.linear(&tensors, None, KSlices::whole(config.hidden_size))?
            }
        };
        Ok(Self { embedding, layers, final_norm, lm_head, config })
    }

    /// Bytes that a forward with logits reads whatever its rows: everything but the embedding table.
    pub(crate) fn weight_bytes(&self) -> u64 {
        let norm = |norm: &Norm| size_of_val(norm.weight.as_slice()) as u64;
        let layers = self.layers.iter().map(|layer| {
            let linears = [&layer.qkv, &layer.o, &layer.gate_up, &layer.down].map(Linear::bytes);
            let qk_norms = layer.qk_norms.as_ref().map_or(0, |(q, k)| norm(q) + norm(k));
            linears.iter().sum::<u64>()
                + norm(&layer.input_norm)
                + norm(&layer.post_attention_norm)
                + qk_norms
        });
        layers.sum::<u64>() + norm(&self.final_norm) + self.lm_head.bytes()
    }

    /// Weights, tied ones once.
    pub(crate) fn num_parameters(&self) -> u64 {
        let linear = |linear: &Linear| linear.width() * linear.k() + linear.bias.as_ref().map_or(0, Vec::len);
        let norm = |norm: &Norm| norm.weight.len();
        let layers = self.layers.iter().map(|layer| {
            let qk_norms = layer.qk_norms.as_ref().map_or(0, |(q, k)| norm(q) + norm(k));
            let linears =
                linear(&layer.qkv) + linear(&layer.o) + linear(&layer.gate_up) + linear(&layer.down);
            linears + norm(&layer.input_norm) + norm(&layer.post_attention_norm) + qk_norms
        });
        let embeddings = self.embedding.rows() * self.embedding.columns();
        let lm_head = if self.config.tie_word_embeddings { 0 } else { linear(&self.lm_head) };
        (layers.sum::<usize>() + embeddings + lm_head + norm(&self.final_norm)) as u64
    }
}

impl Loader<'_> {
    fn layer(&self, layer: usize) -> Result<Layer, EngineError> {
        let config = self.config;
        let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
        let (q, kv) = (config.q_width(), config.kv_width());
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let attention = |part: &str| name(&format!("self_attn.{part}"));
        let mlp = |part: &str| name(&format!("mlp.{part}"));

        let qk_norms = if config.qk_norm {
            let norm = |part| self.norm(&attention(part), config.head_dim);
            Some((norm("q_norm.weight")?, norm("k_norm.weight")?))
        } else {
            None
        };
        let weight = |module: String| format!("{module}.weight");
        let qkv =
            [("q_proj", q), ("k_proj", kv), ("v_proj", kv)].map(|(part, n)| (weight(attention(part)), n));
        let gate_up =
            [("gate_proj", intermediate), ("up_proj", intermediate)].map(|(part, n)| (weight(mlp(part)), n));
        let o = [(weight(attention("o_proj")), hidden)];
        let down = [(weight(mlp("down_proj")), hidden)];
        let bias = |there: bool| there.then_some("bias");
        Ok(Layer {
            input_norm: self.norm(&name("input_layernorm.weight"), hidden)?,
            qkv: self.linear(&qkv, bias(config.biases.qkv), KSlices::whole(hidden))?,
            qk_norms,
            o: self.linear(&o, bias(config.biases.o), KSlices::eighths(q, config.head_dim))?,
            post_attention_norm: self.norm(&name("post_attention_layernorm.weight"), hidden)?,
            gate_up: self.linear(&gate_up, bias(config.biases.mlp), KSlices::whole(hidden))?,
            down: self.linear(&down, bias(config.biases.mlp), KSlices::eighths(intermediate, DOWN_UNIT))?,
        })
    }

    /// Projections of one input, each the name of its weights and its outputs. `bias` names what stands
    /// beside `weight` where they have one.
    fn linear(
        &self,
        tensors: &[(String, usize)],
        bias: Option<&str>,
        slices: KSlices,
    ) -> Result<Linear, EngineError> {
        let k = slices.ranges().last().map_or(0, |slice| slice.end);
        let mut biases = Vec::new();
        if let Some(bias) = bias {
            for (tensor, width) in tensors {
                let module = tensor.strip_suffix("weight").unwrap_or(tensor);
                biases.extend(self.source.vector(&format!("{module}{bias}"), *width)?);
            }
        }
        let weights = match self.formats.linear {
            LinearFormat::Float(format) => {
                let parts =
                    tensors.iter().map(|(tensor, width)| self.source.matrix(tensor, [*width, k], format));
                let parts = parts.collect::<Result<Vec<_>, _>>()?;
                LinearWeights::Floats(FloatMatrix::pack(&parts, &slices, self.threads)?)
            }
            LinearFormat::Quantized(format) => {
                let readers = tensors
                    .iter()
                    .map(|(tensor, width)| Ok((self.source.rows(tensor, [*width, k])?, *width)))
                    .collect::<Result<Vec<_>, EngineError>>()?;
                let width = tensors.iter().map(|(_, width)| width).sum();
                let row = |row| row_of(&readers, row);
                LinearWeights::Packed(PackedMatrix::pack(format, &slices, (width, &row), self.threads)?)
            }
        };
        Ok(Linear { weights, bias: bias.map(|_| biases) })
    }

    fn norm(&self, name: &str, width: usize) -> Result<Norm, EngineError> {
        Ok(Norm { weight: self.source.vector(name, width)?, eps: self.config.rms_norm_eps })
    }
}

/// A row of matrices that stand one on the other, each so many rows high.
fn row_of(matrices: &[(RowReader<'_>, usize)], mut row: usize) -> Vec<f32> {
    for (read, rows) in matrices {
        if row < *rows {
            return read(row);
        }
        row -= rows;
    }
    unreachable!("rows are counted by the same heights")
}
