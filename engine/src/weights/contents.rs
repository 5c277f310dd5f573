//! What a checkpoint holds, compared with what its configuration implies: the format that loses no number, a
//! vocabulary projection beside tied embeddings, and tensors that nothing uses.

use std::collections::HashSet;

use cpu_kernels::{MatrixFormat, NumbersMut};

use super::fp8::{Granularity, SCALE_NAMES};
use super::{Checkpoint, Formats, Fp8Scales, LinearFormat, TensorPart, TensorSource, chunks_of_rows};
use crate::model_config::tensors::{EMBEDDING, LM_HEAD};
use crate::model_config::{CONFIG_FILE, ModelConfig};
use crate::{EngineError, WeightFormat};

/// Number of unused tensors that a warning names.
const NAMED_TENSORS: usize = 4;
/// Tables of rope's frequencies, which old checkpoints store and nothing needs.
const ROPE_TABLE: &str = ".rotary_emb.inv_freq";

impl Checkpoint {
    /// Formats of a model of this configuration. "As stored" is FP8 if every projection is stored as FP8, bf16
    /// if some are; else bf16 or f32, so that no number loses precision. Norms and biases do not count: they
    /// are always held as f32. FP8 has scales by block if any matrix has.
    pub(crate) fn formats(&self, wanted: WeightFormat, config: &ModelConfig) -> Formats {
        let projections = config.projections();
        let is_fp8 = |(name, _): &(String, [usize; 2])| self.is_fp8(name);
        let head = (!config.tie_word_embeddings).then_some(LM_HEAD);
        let all_bf16 = [EMBEDDING].into_iter().chain(head).all(|name| self.is_bf16(name))
            && projections.iter().all(|(name, _)| self.is_bf16(name) || self.is_fp8(name));
        let wanted = match wanted {
            WeightFormat::AsStored if !projections.iter().any(is_fp8) => WeightFormat::AsStored,
            WeightFormat::AsStored if projections.iter().all(is_fp8) => WeightFormat::Fp8,
            WeightFormat::AsStored => WeightFormat::Bf16,
            other => other,
        };
        let stored = if all_bf16 { MatrixFormat::Bf16 } else { MatrixFormat::F32 };
        let formats = Formats::resolve(wanted, stored);
        let vocabulary = head.map(|name| (name.to_owned(), [config.vocab_size, config.hidden_size]));
        let is_by_block = matches!(formats.linear, LinearFormat::Fp8(_))
            && projections.iter().chain(&vocabulary).any(|matrix| self.has_blocks(matrix));
        if is_by_block { Formats::fp8(Fp8Scales::Blocks) } else { formats }
    }

    /// Whether an FP8 matrix has a scale per block. Other faults of its scales are reported when it is read.
    fn has_blocks(&self, (name, shape): &(String, [usize; 2])) -> bool {
        self.tensor(name, shape)
            .is_ok_and(|tensor| tensor.scales.is_some_and(|scales| scales.granularity == Granularity::Block))
    }

    /// Refuses a vocabulary projection that differs from the embeddings although the configuration ties the
    /// two: which of them the model was trained with cannot be known.
    pub(crate) fn check_tied(&self, config: &ModelConfig) -> Result<(), EngineError> {
        if !config.tie_word_embeddings || !self.names().any(|name| name == LM_HEAD) {
            return Ok(());
        }
        let shape = [config.vocab_size, config.hidden_size];
        let [table, head] = [EMBEDDING, LM_HEAD].map(|name| TensorPart::whole(name.to_owned(), shape));
        let rows = |part: &TensorPart, rows: std::ops::Range<usize>| {
            let mut numbers = vec![0.0f32; rows.len() * config.hidden_size];
            self.read(part, rows, NumbersMut::F32(&mut numbers)).map(|()| numbers)
        };
        for chunk in chunks_of_rows(0..config.vocab_size, 4 * config.hidden_size) {
            if rows(&table, chunk.clone())? != rows(&head, chunk)? {
                return Err(EngineError::BadField {
                    path: self.directory().join(CONFIG_FILE),
                    field: "tie_word_embeddings".to_owned(),
                    reason: format!(
                        "is true, but the checkpoint has a `{LM_HEAD}` that differs from `{EMBEDDING}`: set it to false \
                         to use `{LM_HEAD}`, or remove that tensor"
                    ),
                });
            }
        }
        Ok(())
    }

    /// Warns of tensors that the configuration does not imply: they may mean that it is not this model's.
    pub(crate) fn warn_of_unused(&self, config: &ModelConfig) {
        let unused = self.unused(config);
        if unused.is_empty() {
            return;
        }
        let named = unused.iter().take(NAMED_TENSORS).copied().collect::<Vec<_>>().join(", ");
        tracing::warn!(num_unused = unused.len(), "tensors of the checkpoint are not used: {named}");
    }

    /// Names of the unused tensors, sorted.
    fn unused(&self, config: &ModelConfig) -> Vec<&str> {
        let mut used: HashSet<String> = config.other_tensors().into_iter().map(|(name, _)| name).collect();
        let mut matrices: Vec<String> = config.projections().into_iter().map(|(name, _)| name).collect();
        // A tied projection equals the embeddings: `check_tied`.
        matrices.extend([EMBEDDING, LM_HEAD].map(str::to_owned));
        for name in matrices {
            if self.is_fp8(&name) {
                used.extend(SCALE_NAMES.map(|end| format!("{name}{end}")));
            }
            used.insert(name);
        }
        let is_unused = |name: &&str| !used.contains(*name) && !name.ends_with(ROPE_TABLE);
        let mut unused: Vec<&str> = self.names().filter(is_unused).collect();
        unused.sort_unstable();
        unused
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// The golden checkpoints have exactly the tensors that their configurations imply.
    #[test]
    fn the_implied_tensors_are_those_of_transformers() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        let mut num_cases = 0;
        for entry in std::fs::read_dir(golden).unwrap() {
            let dir = entry.unwrap().path();
            if !dir.join(CONFIG_FILE).exists() {
                continue;
            }
            num_cases += 1;
            let config = ModelConfig::load(&dir).unwrap();
            let checkpoint = Checkpoint::open(&dir, &config).unwrap();
            let (mut implied, mut num_parameters) = (Vec::new(), 0);
            for (name, shape) in config.tensors() {
                checkpoint.tensor(&name, &shape).unwrap();
                num_parameters += shape.iter().product::<usize>() as u64;
                implied.push(name);
            }
            assert_eq!(config.num_parameters(), num_parameters, "{}", dir.display());
            let mut stored: Vec<&str> = checkpoint.names().collect();
            implied.sort();
            stored.sort_unstable();
            assert_eq!(implied, stored, "{}", dir.display());
            assert_eq!(checkpoint.unused(&config), [""; 0]);

            let fewer = ModelConfig { num_layers: config.num_layers - 1, ..config };
            let unused = checkpoint.unused(&fewer);
            assert!(!unused.is_empty() && unused.iter().all(|name| name.contains("layers.")), "{unused:?}");
        }
        assert!(num_cases >= 15, "{num_cases}");
    }
}
