//! The decoder that Llama, Mistral, Qwen2 and Qwen3 share, top to bottom. What differs between them (biases,
//! q/k norm, windows, rope) is data, decided in `model_config`; how an operation is computed is the backend's
//! business; what of the model is here, where several ranks share it, is `shard`'s.

mod load;

use cpu_kernels::{HeadLayout, Stage};

use crate::EngineError;
use crate::backend::{AttentionLayer, Backend};
use crate::collective::Collective;
use crate::forward_batch::ForwardBatch;
use crate::model_config::ModelConfig;
use crate::shard::Shard;

/// A decoder's weights, or one rank's part of them.
pub(crate) struct Llama<B: Backend> {
    pub(crate) config: ModelConfig,
    shard: Shard,
    /// `[vocab, hidden]`, on every rank.
    pub(crate) embedding: B::Table,
    layers: Vec<Layer<B>>,
    final_norm: B::Norm,
    /// hidden -> this rank's part of the vocabulary; shares the embedding where it is tied and whole.
    lm_head: B::Linear,
}

/// One decoder layer. Heads and intermediate columns are this rank's.
struct Layer<B: Backend> {
    input_norm: B::Norm,
    /// hidden -> `[q | k | v]`.
    qkv: B::Linear,
    /// Query and key norms, over one head.
    qk_norms: Option<(B::Norm, B::Norm)>,
    /// q width -> hidden, summed in K-slices of whole heads.
    o: B::Linear,
    post_attention_norm: B::Norm,
    /// hidden -> `[gate | up]`.
    gate_up: B::Linear,
    /// intermediate -> hidden, summed in K-slices of blocks of 32 columns.
    down: B::Linear,
}

/// Buffers of a pass, kept between passes.
pub(crate) struct Workspace<B: Backend> {
    hidden: B::Rows,
    normed: B::Rows,
    qkv: B::Rows,
    attended: B::Rows,
    delta: B::Rows,
    gate_up: B::Rows,
    gated: B::Rows,
    /// `[logit rows, hidden]`.
    last_hidden: B::Rows,
    last_normed: B::Rows,
    /// `[logit rows, vocab]` on the first rank once a pass is done.
    pub(crate) logits: B::Rows,
}

impl<B: Backend> Default for Workspace<B> {
    fn default() -> Self {
        Self {
            hidden: B::Rows::default(),
            normed: B::Rows::default(),
            qkv: B::Rows::default(),
            attended: B::Rows::default(),
            delta: B::Rows::default(),
            gate_up: B::Rows::default(),
            gated: B::Rows::default(),
            last_hidden: B::Rows::default(),
            last_normed: B::Rows::default(),
            logits: B::Rows::default(),
        }
    }
}

/// What a forward runs on.
pub(crate) struct Device<'a, B: Backend> {
    pub(crate) backend: &'a B,
    pub(crate) collective: &'a dyn Collective<B::Rows>,
    pub(crate) kv: &'a mut B::Kv,
}

impl<B: Backend> Llama<B> {
    fn layout(&self) -> HeadLayout {
        self.shard.layout(&self.config)
    }

    /// One pass: appends KV for every row and leaves the logits that were asked for in `w.logits`, those of the
    /// whole vocabulary on the first rank. Fails where another rank is lost.
    pub(crate) fn forward(
        &self,
        device: &mut Device<'_, B>,
        batch: &ForwardBatch<'_>,
        w: &mut Workspace<B>,
    ) -> Result<(), EngineError> {
        let Device { backend, collective, kv } = device;
        let (layout, intermediate) = (self.layout(), self.shard.intermediate(&self.config).len());
        self.resize(*backend, batch, w);
        let pass = backend.begin(batch, &self.config.rope);

        backend.embed(&self.embedding, &pass, &mut w.hidden); // [rows, hidden]
        for (index, layer) in self.layers.iter().enumerate() {
            backend.rms_norm(&layer.input_norm, &w.hidden, &mut w.normed); // [rows, hidden]
            backend.mark(Stage::Rest);
            backend.linear(&layer.qkv, &mut w.normed, &mut w.qkv); // [rows, (heads + 2 kv heads) * head_dim]
            backend.mark(Stage::Products);
            if let Some((q_norm, k_norm)) = &layer.qk_norms {
                backend.norm_heads(layout, (q_norm, k_norm), &mut w.qkv);
            }
            backend.rotate(layout, &pass, &mut w.qkv);
            backend.mark(Stage::Rest);
            let at = AttentionLayer { layout, layer: index, window: self.config.windows[index] };
            backend.write_kv(kv, at, &pass, &w.qkv);
            backend.attention(kv, at, (&pass, &w.qkv), &mut w.attended); // [rows, heads * head_dim]
            backend.mark(Stage::Attention);
            backend.linear(&layer.o, &mut w.attended, &mut w.delta); // [rows, hidden], this rank's part
            backend.mark(Stage::Products);
            collective.all_reduce(&mut w.delta)?;
            backend.finish_sum(&layer.o, &mut w.delta);
            backend.add(&mut w.hidden, &w.delta);

            backend.rms_norm(&layer.post_attention_norm, &w.hidden, &mut w.normed); // [rows, hidden]
            backend.mark(Stage::Rest);
            backend.linear(&layer.gate_up, &mut w.normed, &mut w.gate_up); // [rows, 2 * intermediate]
            backend.mark(Stage::Products);
            backend.silu_mul(&w.gate_up, intermediate, &mut w.gated); // [rows, intermediate]
            backend.mark(Stage::Rest);
            backend.linear(&layer.down, &mut w.gated, &mut w.delta); // [rows, hidden], this rank's part
            backend.mark(Stage::Products);
            collective.all_reduce(&mut w.delta)?;
            backend.finish_sum(&layer.down, &mut w.delta);
            backend.add(&mut w.hidden, &w.delta);
        }

        backend.mark(Stage::Rest);
        if batch.logit_rows.is_empty() {
            return Ok(());
        }
        // The vocabulary only for rows that are drawn.
        backend.take_logit_rows(&pass, self.config.hidden_size, &w.hidden, &mut w.last_hidden);
        backend.rms_norm(&self.final_norm, &w.last_hidden, &mut w.last_normed);
        backend.mark(Stage::Rest);
        backend.linear(&self.lm_head, &mut w.last_normed, &mut w.logits); // [logit rows, this rank's vocab]
        backend.mark(Stage::Vocabulary);
        collective.gather(&mut w.logits, &self.vocabulary_parts())
    }

    /// Entries of the vocabulary that each rank projects to.
    fn vocabulary_parts(&self) -> Vec<usize> {
        let ranks = 0..self.shard.ranks;
        ranks.map(|rank| Shard { rank, ..self.shard }.vocabulary(&self.config).len()).collect()
    }

    fn resize(&self, backend: &B, batch: &ForwardBatch<'_>, w: &mut Workspace<B>) {
        let (config, layout) = (&self.config, self.layout());
        let (rows, logit_rows) = (batch.num_rows(), batch.logit_rows.len());
        let intermediate = self.shard.intermediate(config).len();
        backend.resize(&mut w.hidden, rows * config.hidden_size);
        backend.resize(&mut w.normed, rows * config.hidden_size);
        backend.resize(&mut w.qkv, rows * layout.row_width());
        backend.resize(&mut w.attended, rows * layout.q_width());
        backend.resize(&mut w.delta, rows * config.hidden_size);
        backend.resize(&mut w.gate_up, rows * 2 * intermediate);
        backend.resize(&mut w.gated, rows * intermediate);
        backend.resize(&mut w.last_hidden, logit_rows * config.hidden_size);
        backend.resize(&mut w.last_normed, logit_rows * config.hidden_size);
        backend.resize(&mut w.logits, logit_rows * self.shard.vocabulary(config).len());
    }
}
