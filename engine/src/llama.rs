//! The decoder that Llama, Mistral, Qwen2 and Qwen3 share, top to bottom. What differs between them (biases,
//! q/k norm, windows, rope) is data, decided in `model_config`; how an operation is computed is the backend's
//! business.

mod load;

use crate::backend::{Angles, AttentionStep, Backend, HeadLayout, Linear, Norm};
use crate::forward_batch::ForwardBatch;
use crate::kv_cache::KvCache;
use crate::model_config::ModelConfig;
use crate::weights::Matrix;

/// A decoder's weights.
#[derive(Debug)]
pub(crate) struct Llama {
    pub(crate) config: ModelConfig,
    /// `[vocab, hidden]`.
    embedding: Matrix,
    layers: Vec<Layer>,
    final_norm: Norm,
    /// hidden -> vocab; shares the embedding where it is tied.
    lm_head: Linear,
}

/// One decoder layer.
#[derive(Debug)]
struct Layer {
    input_norm: Norm,
    /// hidden -> `[q | k | v]`.
    qkv: Linear,
    /// Query and key norms, over one head.
    qk_norms: Option<(Norm, Norm)>,
    /// q width -> hidden, summed in K-slices of whole heads.
    o: Linear,
    post_attention_norm: Norm,
    /// hidden -> `[gate | up]`.
    gate_up: Linear,
    /// intermediate -> hidden, summed in K-slices of blocks of 32 columns.
    down: Linear,
}

/// Buffers of a pass, kept between passes.
#[derive(Debug, Default)]
pub(crate) struct Workspace {
    hidden: Vec<f32>,
    normed: Vec<f32>,
    qkv: Vec<f32>,
    attended: Vec<f32>,
    delta: Vec<f32>,
    gate_up: Vec<f32>,
    gated: Vec<f32>,
    angles: Angles,
}

impl Workspace {
    fn resize(&mut self, rows: usize, config: &ModelConfig, layout: HeadLayout) {
        self.hidden.resize(rows * config.hidden_size, 0.0);
        self.normed.resize(rows * config.hidden_size, 0.0);
        self.qkv.resize(rows * layout.row_width(), 0.0);
        self.attended.resize(rows * layout.q_width(), 0.0);
        self.delta.resize(rows * config.hidden_size, 0.0);
        self.gate_up.resize(rows * 2 * config.intermediate_size, 0.0);
        self.gated.resize(rows * config.intermediate_size, 0.0);
    }
}

impl Llama {
    /// How heads lie in a row.
    fn layout(&self) -> HeadLayout {
        HeadLayout {
            num_heads: self.config.num_heads,
            num_kv_heads: self.config.num_kv_heads,
            head_dim: self.config.head_dim,
        }
    }

    /// One pass: appends KV for every row, writes `[batch.logit_rows.len(), vocab]` to `logits`.
    pub(crate) fn forward<B: Backend>(
        &self,
        backend: &B,
        kv: &mut KvCache,
        batch: &ForwardBatch<'_>,
        (w, logits): (&mut Workspace, &mut [f32]),
    ) {
        let layout = self.layout();
        w.resize(batch.num_rows(), &self.config, layout);
        w.angles.set(&self.config.rope, &batch.positions);

        backend.embed(&self.embedding, &batch.token_ids, &mut w.hidden); // [rows, hidden]
        for (index, layer) in self.layers.iter().enumerate() {
            backend.rms_norm(&layer.input_norm, &w.hidden, &mut w.normed); // [rows, hidden]
            backend.linear(&layer.qkv, &mut w.normed, &mut w.qkv); // [rows, (heads + 2 kv heads) * head_dim]
            if let Some((q_norm, k_norm)) = &layer.qk_norms {
                backend.norm_heads(layout, (q_norm, k_norm), &mut w.qkv);
            }
            backend.rotate(layout, &w.angles, &mut w.qkv);
            let window = self.config.windows[index];
            let step = AttentionStep { layout, layer: index, window, batch, qkv: &w.qkv };
            backend.write_kv(kv, &step);
            backend.attention(kv, &step, &mut w.attended); // [rows, heads * head_dim]
            backend.linear(&layer.o, &mut w.attended, &mut w.delta); // [rows, hidden]
            backend.add(&mut w.hidden, &w.delta);

            backend.rms_norm(&layer.post_attention_norm, &w.hidden, &mut w.normed); // [rows, hidden]
            backend.linear(&layer.gate_up, &mut w.normed, &mut w.gate_up); // [rows, 2 * intermediate]
            backend.silu_mul(&w.gate_up, self.config.intermediate_size, &mut w.gated); // [rows, intermediate]
            backend.linear(&layer.down, &mut w.gated, &mut w.delta); // [rows, hidden]
            backend.add(&mut w.hidden, &w.delta);
        }

        self.project_to_vocabulary(backend, batch, w, logits);
    }

    /// Only the rows that want logits: `[logit rows, hidden]` -> `[logit rows, vocab]`.
    fn project_to_vocabulary<B: Backend>(
        &self,
        backend: &B,
        batch: &ForwardBatch<'_>,
        w: &mut Workspace,
        logits: &mut [f32],
    ) {
        if batch.logit_rows.is_empty() {
            return;
        }
        let hidden_size = self.config.hidden_size;
        // A row never moves up, so gathering in place is safe.
        for (to, &from) in batch.logit_rows.iter().enumerate() {
            w.hidden.copy_within(from * hidden_size..(from + 1) * hidden_size, to * hidden_size);
        }
        let len = batch.logit_rows.len() * hidden_size;
        backend.rms_norm(&self.final_norm, &w.hidden[..len], &mut w.normed[..len]);
        backend.linear(&self.lm_head, &mut w.normed[..len], logits);
    }
}
