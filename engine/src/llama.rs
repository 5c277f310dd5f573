//! The decoder that Llama, Mistral, Qwen2 and Qwen3 share, from top to bottom. The differences between them
//! (biases, q/k norm, windows, rope) are data that `model_config` determines. The backend computes the
//! operations, and `shard` says which part of the model a rank holds.

mod load;

use cpu_kernels::{HeadLayout, Stage};

use crate::EngineError;
use crate::backend::{AttentionLayer, Backend, FeedForwardRows};
use crate::collective::Collective;
use crate::draws::DrawPlan;
use crate::forward_batch::ForwardBatch;
use crate::model_config::ModelConfig;
use crate::shard::Shard;

/// Weights of a decoder, or one rank's part of them.
pub(crate) struct Llama<B: Backend> {
    pub(crate) config: ModelConfig,
    shard: Shard,
    /// `[vocab, hidden]`, on every rank.
    pub(crate) embedding: B::Table,
    layers: Vec<Layer<B>>,
    final_norm: B::Norm,
    /// hidden -> this rank's part of the vocabulary. Shares memory with the embedding if it is tied and not
    /// split.
    lm_head: B::Linear,
}

/// One decoder layer, with this rank's heads and intermediate columns.
struct Layer<B: Backend> {
    attention: AttentionLayer,
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

/// Buffers of a pass, reused by the next pass.
pub(crate) struct Workspace<B: Backend> {
    /// All rows of the pass.
    rows: RowActivations<B>,
    /// Rows with logits only: after its KV is written, the last layer computes just these.
    logit_rows: RowActivations<B>,
    scratch: Scratch<B>,
    /// `[logit rows, vocab]` on the first rank at the end of a pass.
    pub(crate) logits: B::Rows,
}

/// Activations of rows that pass from one part of a layer to the next.
struct RowActivations<B: Backend> {
    /// The residual stream.
    hidden: B::Rows,
    qkv: B::Rows,
}

/// Buffers that only the part of a layer that wrote them reads.
struct Scratch<B: Backend> {
    normed: B::Rows,
    attended: B::Rows,
    delta: B::Rows,
    gate_up: B::Rows,
    gated: B::Rows,
}

impl<B: Backend> Default for Workspace<B> {
    fn default() -> Self {
        Self {
            rows: RowActivations::default(),
            logit_rows: RowActivations::default(),
            scratch: Scratch::default(),
            logits: B::Rows::default(),
        }
    }
}

impl<B: Backend> Default for RowActivations<B> {
    fn default() -> Self {
        Self { hidden: B::Rows::default(), qkv: B::Rows::default() }
    }
}

impl<B: Backend> Default for Scratch<B> {
    fn default() -> Self {
        Self {
            normed: B::Rows::default(),
            attended: B::Rows::default(),
            delta: B::Rows::default(),
            gate_up: B::Rows::default(),
            gated: B::Rows::default(),
        }
    }
}

/// The device state that a forward runs on.
pub(crate) struct DeviceContext<'a, B: Backend> {
    pub(crate) backend: &'a B,
    pub(crate) collective: &'a dyn Collective<B::Rows>,
    pub(crate) kv: &'a mut B::Kv,
}

impl<B: Backend> Llama<B> {
    /// Runs one pass: appends KV for every row and leaves the requested logits in `w.logits`, those of the
    /// whole vocabulary on the first rank. `draws` are those that the backend makes from them afterwards.
    /// Returns an error if another rank is lost.
    pub(crate) fn forward(
        &self,
        device: &mut DeviceContext<'_, B>,
        batch: &ForwardBatch<'_>,
        draws: &DrawPlan,
        w: &mut Workspace<B>,
    ) -> Result<(), EngineError> {
        let backend = device.backend;
        let Workspace { rows, logit_rows, scratch, logits } = w;
        let (last, others) = self.layers.split_last().expect("a model has a layer");
        let num_logit_rows = batch.logit_rows.len();
        let logit_batch = (1..batch.num_rows()).contains(&num_logit_rows).then(|| batch.logit_part());

        // Size all buffers now: a device allocation in the middle of a pass would split its graph.
        backend.resize(logits, num_logit_rows * self.shard.vocabulary(&self.config).len());
        if logit_batch.is_some() {
            self.resize_activations(backend, num_logit_rows, logit_rows);
        }
        self.resize_activations(backend, batch.num_rows(), rows);
        self.resize_scratch(backend, batch.num_rows(), scratch);
        let (mut pass, logit_pass) = backend.begin(batch, logit_batch.as_ref(), draws, &self.config.rope);
        backend.embed(&self.embedding, &pass, &mut rows.hidden);
        for layer in others {
            layer.project(device, &pass, rows, scratch);
            layer.attend(device, &pass, rows, scratch)?;
            layer.feed_forward(device, rows, scratch)?;
        }
        last.project(device, &pass, rows, scratch);
        backend.mark(Stage::Rest);
        if num_logit_rows == 0 {
            return Ok(());
        }
        // After the last layer's keys and values are stored, rows without logits are no longer needed.
        let mut rows = rows;
        if let Some(logit_pass) = logit_pass {
            self.resize_scratch(backend, num_logit_rows, scratch);
            backend.take_logit_rows(&pass, self.config.hidden_size, &rows.hidden, &mut logit_rows.hidden);
            backend.take_logit_rows(&pass, self.layout().row_width(), &rows.qkv, &mut logit_rows.qkv);
            backend.mark(Stage::Rest);
            pass = logit_pass;
            rows = logit_rows;
        }
        last.attend(device, &pass, rows, scratch)?;
        last.feed_forward(device, rows, scratch)?;

        backend.rms_norm(&self.final_norm, &rows.hidden, &mut scratch.normed);
        backend.mark(Stage::Rest);
        backend.linear(&self.lm_head, &mut scratch.normed, logits); // [logit rows, this rank's vocab]
        backend.mark(Stage::Vocabulary);
        device.collective.gather(logits, &self.vocabulary_parts())
    }

    fn layout(&self) -> HeadLayout {
        self.shard.layout(&self.config)
    }

    /// Number of vocabulary entries that each rank projects to.
    fn vocabulary_parts(&self) -> Vec<usize> {
        let ranks = 0..self.shard.ranks;
        ranks.map(|rank| Shard { rank, ..self.shard }.vocabulary(&self.config).len()).collect()
    }

    fn resize_activations(&self, backend: &B, rows: usize, activations: &mut RowActivations<B>) {
        backend.resize(&mut activations.hidden, rows * self.config.hidden_size);
        backend.resize(&mut activations.qkv, rows * self.layout().row_width());
    }

    fn resize_scratch(&self, backend: &B, rows: usize, scratch: &mut Scratch<B>) {
        let (hidden, intermediate) = (self.config.hidden_size, self.shard.intermediate(&self.config).len());
        backend.resize(&mut scratch.normed, rows * hidden);
        backend.resize(&mut scratch.attended, rows * self.layout().q_width());
        backend.resize(&mut scratch.delta, rows * hidden);
        backend.resize(&mut scratch.gate_up, rows * 2 * intermediate);
        backend.resize(&mut scratch.gated, rows * intermediate);
    }
}

impl<B: Backend> Layer<B> {
    /// Computes queries, keys and values of the rows and stores the keys and values.
    fn project(
        &self,
        device: &mut DeviceContext<'_, B>,
        pass: &B::Pass<'_>,
        rows: &mut RowActivations<B>,
        scratch: &mut Scratch<B>,
    ) {
        let (backend, layout) = (device.backend, self.attention.layout);
        backend.rms_norm(&self.input_norm, &rows.hidden, &mut scratch.normed); // [rows, hidden]
        backend.mark(Stage::Rest);
        backend.linear(&self.qkv, &mut scratch.normed, &mut rows.qkv); // [rows, layout.row_width()]
        backend.mark(Stage::Products);
        if let Some((q_norm, k_norm)) = &self.qk_norms {
            backend.norm_heads(layout, (q_norm, k_norm), &mut rows.qkv);
        }
        backend.rotate(layout, pass, &mut rows.qkv);
        backend.mark(Stage::Rest);
        backend.write_kv(device.kv, self.attention, pass, &rows.qkv);
    }

    /// Adds the attention output of the rows to the residual stream.
    fn attend(
        &self,
        device: &mut DeviceContext<'_, B>,
        pass: &B::Pass<'_>,
        rows: &mut RowActivations<B>,
        scratch: &mut Scratch<B>,
    ) -> Result<(), EngineError> {
        let DeviceContext { backend, collective, kv } = device;
        backend.attention(kv, self.attention, (pass, &rows.qkv), &mut scratch.attended); // [rows, q width]
        backend.mark(Stage::Attention);
        backend.linear(&self.o, &mut scratch.attended, &mut scratch.delta); // [rows, hidden], partial sum
        backend.mark(Stage::Products);
        collective.all_reduce(&mut scratch.delta)?;
        backend.finish_sum(&self.o, &mut scratch.delta);
        backend.add(&mut rows.hidden, &scratch.delta);
        Ok(())
    }

    fn feed_forward(
        &self,
        device: &DeviceContext<'_, B>,
        rows: &mut RowActivations<B>,
        scratch: &mut Scratch<B>,
    ) -> Result<(), EngineError> {
        let DeviceContext { backend, collective, .. } = device;
        backend.rms_norm(&self.post_attention_norm, &rows.hidden, &mut scratch.normed); // [rows, hidden]
        backend.mark(Stage::Rest);
        let Scratch { normed, gate_up, gated, delta, .. } = scratch;
        let operands = FeedForwardRows { x: normed, gates_and_ups: gate_up, gated, out: delta };
        backend.feed_forward(&self.gate_up, &self.down, operands); // delta: [rows, hidden], partial sum
        backend.mark(Stage::Products);
        collective.all_reduce(&mut scratch.delta)?;
        backend.finish_sum(&self.down, &mut scratch.delta);
        backend.add(&mut rows.hidden, &scratch.delta);
        Ok(())
    }
}
