//! What a config.json says of a decoder, for programs that compute its forward themselves.

use std::path::Path;

use crate::EngineError;
use crate::model_config::ModelConfig;
use crate::model_config::fields::{Fields, read_json_object};
use crate::model_shape::ModelShape;
use crate::rope::rope_field;

/// A scaling of rope, as a config.json names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScaledRope {
    /// `rope_scaling` or `rope_parameters`.
    pub field: &'static str,
    /// `linear`, `llama3` or `yarn`.
    pub kind: &'static str,
}

/// Shape and settings of a decoder that the engine can run.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSettings {
    /// Its shape.
    pub shape: ModelShape,
    /// Added to the mean square by RMS norms.
    pub rms_norm_eps: f32,
    /// Base of rope's frequencies.
    pub rope_theta: f64,
    /// The scaling of rope, if there is one.
    pub scaled_rope: Option<ScaledRope>,
    /// The smallest sliding window of a layer, in positions, if a layer has one.
    pub sliding_window: Option<u32>,
    /// Name and shape of every tensor that the engine loads; a matrix is `[outputs, inputs]`.
    pub tensors: Vec<(String, Vec<usize>)>,
}

impl ModelSettings {
    /// Reads a config.json.
    pub fn read(path: &Path) -> Result<Self, EngineError> {
        let object = read_json_object(path)?;
        let fields = Fields::top(path, &object);
        let (config, field) = (ModelConfig::from_fields(&fields)?, rope_field(&fields)?);
        Ok(Self {
            shape: ModelShape::of(&config),
            rms_norm_eps: config.rms_norm_eps,
            rope_theta: config.rope.theta,
            scaled_rope: config.rope.scaling.map(|kind| ScaledRope { field, kind }),
            sliding_window: config.windows.iter().flatten().min().copied(),
            tensors: config.tensors(),
        })
    }
}
