//! The part of a model that one tensor parallel rank holds (docs/contract.md C2): query heads and blocks of
//! 32 feed-forward columns in K-slices, key-value heads with their query heads, an equal part of the
//! vocabulary. Arithmetic on ranges, the same for every backend. A single rank holds the whole model.

use std::ops::Range;

use cpu_kernels::{HeadLayout, KSlices, NUM_SLICES};

use crate::EngineError;
use crate::model_config::ModelConfig;

/// Columns per unit of down_proj's K-slices.
pub(crate) const DOWN_UNIT: usize = 32;

/// Rank `rank` of `ranks`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shard {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
}

impl Shard {
    /// Returns all ranks of a model, or an error that says why it cannot be split this way.
    pub(crate) fn all(ranks: usize, config: &ModelConfig) -> Result<Vec<Shard>, EngineError> {
        let refuse = |reason: String| {
            Err(EngineError::BadOption { option: "tensor_parallel", value: ranks.to_string(), reason })
        };
        if !matches!(ranks, 1 | 2 | 4 | 8) {
            return refuse("expected 1, 2, 4 or 8".to_owned());
        }
        let (heads, kv_heads) = (config.num_heads, config.num_kv_heads);
        if !heads.is_multiple_of(ranks) {
            return refuse(format!("the model has {heads} attention heads, expected a divisor of that"));
        }
        if !kv_heads.is_multiple_of(ranks) && !ranks.is_multiple_of(kv_heads) {
            return refuse(format!(
                "the model has {kv_heads} key-value heads, expected a divisor or a multiple of that"
            ));
        }
        let shards: Vec<Shard> = (0..ranks).map(|rank| Shard { rank, ranks }).collect();
        if shards.iter().any(|shard| shard.intermediate(config).is_empty()) {
            let width = config.intermediate_size;
            return refuse(format!(
                "a feed-forward of {width} columns has too few blocks of {DOWN_UNIT} columns"
            ));
        }
        if config.vocab_size < ranks {
            return refuse(format!("the vocabulary has only {} entries", config.vocab_size));
        }
        Ok(shards)
    }

    /// Whether there are other ranks.
    pub(crate) fn is_split(self) -> bool {
        self.ranks > 1
    }

    /// This rank's query heads.
    pub(crate) fn heads(self, config: &ModelConfig) -> Range<usize> {
        self.split_evenly(config.num_heads)
    }

    /// This rank's key-value heads: its share, or the single head that its query heads read, which other
    /// ranks hold too.
    pub(crate) fn kv_heads(self, config: &ModelConfig) -> Range<usize> {
        let kv_heads = config.num_kv_heads;
        if kv_heads.is_multiple_of(self.ranks) {
            return self.split_evenly(kv_heads);
        }
        let head = self.rank * kv_heads / self.ranks;
        head..head + 1
    }

    /// Layout of this rank's heads in a row.
    pub(crate) fn layout(self, config: &ModelConfig) -> HeadLayout {
        HeadLayout {
            num_heads: self.heads(config).len(),
            num_kv_heads: self.kv_heads(config).len(),
            head_dim: config.head_dim,
        }
    }

    /// K-slices of o_proj: whole heads.
    pub(crate) fn o_slices(self, config: &ModelConfig) -> KSlices {
        KSlices::eighths(config.q_width(), config.head_dim).owned(self.slices())
    }

    /// K-slices of down_proj: whole blocks of columns.
    pub(crate) fn down_slices(self, config: &ModelConfig) -> KSlices {
        KSlices::eighths(config.intermediate_size, DOWN_UNIT).owned(self.slices())
    }

    /// This rank's feed-forward columns: those of [`Shard::down_slices`].
    pub(crate) fn intermediate(self, config: &ModelConfig) -> Range<usize> {
        let slices = self.down_slices(config);
        slices.start()..slices.end()
    }

    /// This rank's rows of the vocabulary projection.
    pub(crate) fn vocabulary(self, config: &ModelConfig) -> Range<usize> {
        self.split_evenly(config.vocab_size)
    }

    fn slices(self) -> Range<usize> {
        self.split_evenly(NUM_SLICES)
    }

    fn split_evenly(self, n: usize) -> Range<usize> {
        self.rank * n / self.ranks..(self.rank + 1) * n / self.ranks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(num_heads: usize, num_kv_heads: usize, intermediate_size: usize) -> ModelConfig {
        let mut config = crate::model_config::tests::tiny();
        config.num_heads = num_heads;
        config.num_kv_heads = num_kv_heads;
        config.intermediate_size = intermediate_size;
        config
    }

    #[test]
    fn ranks_cover_the_model_and_share_only_key_value_heads() {
        for (heads, kv_heads, intermediate) in [(8, 8, 704), (16, 2, 256), (8, 1, 300), (24, 8, 2_816)] {
            let config = config(heads, kv_heads, intermediate);
            for ranks in [1, 2, 4, 8] {
                let shards = Shard::all(ranks, &config).unwrap();
                let covered = |part: fn(Shard, &ModelConfig) -> Range<usize>| -> Vec<usize> {
                    shards.iter().flat_map(|shard| part(*shard, &config)).collect()
                };
                assert_eq!(covered(Shard::heads), (0..heads).collect::<Vec<_>>());
                assert_eq!(covered(Shard::intermediate), (0..intermediate).collect::<Vec<_>>());
                assert_eq!(covered(Shard::vocabulary), (0..config.vocab_size).collect::<Vec<_>>());
                for shard in &shards {
                    // Each query head reads a key-value head that this rank holds.
                    let group = heads / kv_heads;
                    let (q, kv) = (shard.heads(&config), shard.kv_heads(&config));
                    let local = shard.layout(&config);
                    for (i, head) in q.clone().enumerate() {
                        let read = kv.start + i / (local.num_heads / local.num_kv_heads);
                        assert_eq!(read, head / group, "{ranks} ranks, head {head}");
                    }
                    assert_eq!(
                        shard.o_slices(&config).start()..shard.o_slices(&config).end(),
                        q.start * config.head_dim..q.end * config.head_dim
                    );
                }
            }
        }
    }

    #[test]
    fn counts_that_do_not_divide_are_rejected_by_name() {
        let check = |ranks, (heads, kv_heads, intermediate), words: &str| {
            let error = Shard::all(ranks, &config(heads, kv_heads, intermediate)).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("tensor_parallel"), "{error}");
        };
        check(3, (6, 3, 96), "1, 2, 4 or 8");
        check(8, (12, 4, 704), "12 attention heads");
        check(4, (24, 6, 704), "6 key-value heads");
        check(8, (8, 8, 128), "too few");
    }
}
