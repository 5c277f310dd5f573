//! The minimum that a step reads and multiplies, and the time of that at the rates of a data sheet: the ideal
//! that `gpu-check` compares steps with.

/// Bytes and bf16 operations per second, from a data sheet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rates {
    bytes: f64,
    operations: f64,
}

/// H100 SXM.
pub(crate) const H100: Rates = Rates { bytes: 3.35e12, operations: 9.89e14 };
pub(super) const H200: Rates = Rates { bytes: 4.8e12, operations: 9.89e14 };

/// Rates of a device by the name that its driver reports; `None` if its data sheet is not listed. The PCIe
/// and NVL variants of the H100 have other rates and other names.
pub(super) fn rates_of(name: &str) -> Option<Rates> {
    [("H100 80GB HBM3", H100), ("H200", H200)]
        .into_iter()
        .find(|(part, _)| name.contains(part))
        .map(|(_, rates)| rates)
}

/// Shape of a step: sequences with equal numbers of rows after equally long contexts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepShape {
    pub(crate) sequences: usize,
    pub(crate) rows_of_each: usize,
    pub(crate) context: usize,
}

/// Minimum work of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepWork {
    /// Weights of all layers, and of the vocabulary projection.
    pub(crate) layer_weights: f64,
    pub(crate) vocabulary_weights: f64,
    /// Number of rows, and number of drawn rows.
    pub(crate) rows: usize,
    pub(crate) drawn: usize,
    /// Bytes of keys and values of all layers.
    pub(crate) kv_bytes: f64,
    /// Operations of attention: scores and values.
    pub(crate) attention_operations: f64,
}

impl StepWork {
    /// Seconds: bf16 weights and KV read once, or all multiplications, whichever takes longer.
    pub(crate) fn ideal(&self, rates: Rates) -> f64 {
        let bytes = self.weight_bytes() + self.kv_bytes;
        (bytes / rates.bytes).max(self.operations() / rates.operations)
    }

    /// Bytes of the weights in bf16.
    pub(super) fn weight_bytes(&self) -> f64 {
        2.0 * (self.layer_weights + self.vocabulary_weights)
    }

    /// Operations of products and of attention.
    pub(super) fn operations(&self) -> f64 {
        let products = self.layer_weights * self.rows as f64 + self.vocabulary_weights * self.drawn as f64;
        2.0 * products + self.attention_operations
    }
}

/// The numbers of a config.json that determine a step's work.
#[derive(Debug, Clone, Copy)]
pub(super) struct ModelSize {
    layers: f64,
    query_width: f64,
    kv_width: f64,
    layer_weights: f64,
    vocabulary_weights: f64,
}

impl ModelSize {
    pub(super) fn of(config: &serde_json::Value) -> Self {
        let number = |name: &str| config[name].as_f64().unwrap_or(0.0);
        let (hidden, inner, layers) =
            (number("hidden_size"), number("intermediate_size"), number("num_hidden_layers"));
        let heads = number("num_attention_heads");
        let head = config["head_dim"].as_f64().unwrap_or(hidden / heads);
        let (query_width, kv_width) = (head * heads, head * number("num_key_value_heads"));
        let of_layer = hidden * (2.0 * query_width + 2.0 * kv_width + 3.0 * inner);
        let vocabulary_weights = number("vocab_size") * hidden;
        Self { layers, query_width, kv_width, layer_weights: layers * of_layer, vocabulary_weights }
    }

    /// The part of one of `ranks` ranks, a divisor of the numbers of heads.
    pub(super) fn of_rank(self, ranks: usize) -> Self {
        let part = |whole: f64| whole / ranks as f64;
        Self {
            layers: self.layers,
            query_width: part(self.query_width),
            kv_width: part(self.kv_width),
            layer_weights: part(self.layer_weights),
            vocabulary_weights: part(self.vocabulary_weights),
        }
    }

    pub(super) fn work(&self, shape: StepShape, drawn: usize) -> StepWork {
        let rows = shape.sequences * shape.rows_of_each;
        let len = (shape.context + shape.rows_of_each) as f64;
        // On average a row attends to half of the rows of its own step.
        let seen = (shape.context + shape.rows_of_each.div_ceil(2)) as f64;
        StepWork {
            layer_weights: self.layer_weights,
            vocabulary_weights: self.vocabulary_weights,
            rows,
            drawn,
            // Keys and values have two bytes per number.
            kv_bytes: shape.sequences as f64 * len * self.kv_width * 4.0 * self.layers,
            attention_operations: 4.0 * rows as f64 * seen * self.query_width * self.layers,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::gpu_check::decode::LLAMA_8B;

    #[test]
    fn only_devices_whose_data_sheet_is_known_have_rates() {
        assert_eq!(rates_of("NVIDIA H200"), Some(H200));
        assert_eq!(rates_of("NVIDIA H100 80GB HBM3"), Some(H100));
        assert_eq!(rates_of("NVIDIA H100 PCIe"), None);
        assert_eq!(rates_of("the host (emulated, no GPU)"), None);
    }

    /// 8B: 15 GB of weights, and 131,072 bytes of KV per token.
    #[test]
    fn an_ideal_step_reads_weights_and_kv_once() {
        let model = ModelSize::of(&serde_json::from_str(LLAMA_8B).unwrap());
        let ms = |sequences, rows_of_each, context, drawn| {
            model.work(StepShape { sequences, rows_of_each, context }, drawn).ideal(H100) * 1e3
        };
        let one = |context| ms(1, 1, context, 1);
        assert!((4.47..4.50).contains(&one(128)), "{}", one(128));
        assert!((one(8192) - one(128) - 8064.0 * 131_072.0 / 3.35e9).abs() < 1e-6);
        let prompt = ms(1, 2048, 128, 1);
        assert!((30.0..30.4).contains(&prompt), "{prompt}");
    }
}
