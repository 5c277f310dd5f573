//! The two spellings of rope in config.json: `rope_theta` beside `rope_scaling`, and transformers 5's
//! `rope_parameters`. If a file has both, `rope_scaling` takes precedence.

use super::Rope;
use super::scaling::{Scaling, inverse_frequencies, yarn_mscale};
use crate::EngineError;
use crate::model_config::MAX_POSITIONS;
use crate::model_config::fields::Fields;

const DEFAULT_THETA: f64 = 10_000.0;
const DEFAULT_BETA_FAST: f64 = 32.0;
const DEFAULT_BETA_SLOW: f64 = 1.0;

/// Supported fields of a rope object. Other fields change positions in unknown ways and are rejected.
const SUPPORTED_FIELDS: [&str; 15] = [
    "type",
    "rope_type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "partial_rotary_factor",
    "finetuned",
];

/// The object of rope's settings that replaces `rope_parameters` if both are present: as in transformers,
/// `rope_scaling` unless it is empty.
fn scaling_object<'a>(config: &Fields<'a>) -> Result<Option<Fields<'a>>, EngineError> {
    Ok(config.nested("rope_scaling")?.filter(|object| object.names().next().is_some()))
}

/// Name of the object in use.
pub(crate) fn rope_field(config: &Fields<'_>) -> Result<&'static str, EngineError> {
    Ok(if scaling_object(config)?.is_some() { "rope_scaling" } else { "rope_parameters" })
}

impl Rope {
    /// Reads either spelling. Also returns the longest sequence that the model supports, which scaling may
    /// extend past `max_position_embeddings`.
    pub(crate) fn from_fields(
        config: &Fields<'_>,
        head_dim: usize,
        max_position_embeddings: usize,
    ) -> Result<(Self, usize), EngineError> {
        let parameters = config.nested("rope_parameters")?;
        let scaling_object = scaling_object(config)?;
        let theta = match (&scaling_object, &parameters) {
            (Some(scaling), Some(parameters)) => theta_beside(config, scaling, parameters)?,
            (rope, other) => theta(config, rope.as_ref().or(other.as_ref()))?,
        };
        refuse_partial_rotation(config)?;
        let rope = scaling_object.or(parameters);
        let Some(rope) = rope else {
            return Ok((Self::new(Scaling::None, theta, head_dim, 1.0), max_position_embeddings));
        };
        refuse_unknown_fields(&rope)?;
        let scaling = scaling(config, &rope, max_position_embeddings)?;
        let attention_factor = match scaling {
            Scaling::Yarn { factor, .. } => yarn_attention_factor(&rope, factor)?,
            _ => 1.0,
        };
        // The configuration may hold the original length or the extended one.
        let extended =
            |original_len: f64, factor: f64| max_position_embeddings.max((original_len * factor) as usize);
        let max_len = match scaling {
            Scaling::None | Scaling::Llama3 { .. } => max_position_embeddings,
            Scaling::Linear { factor } => {
                extended(original_len(config, &rope, max_position_embeddings)?, factor)
            }
            Scaling::Yarn { factor, original_len, .. } => extended(original_len, factor),
        };
        Ok((Self::new(scaling, theta, head_dim, attention_factor), max_len))
    }

    fn new(scaling: Scaling, theta: f64, head_dim: usize, attention_factor: f64) -> Self {
        Self {
            inverse_frequencies: inverse_frequencies(scaling, theta, head_dim),
            attention_factor: attention_factor as f32,
            theta,
            scaling: scaling.name(),
        }
    }
}

/// Theta for a `rope_scaling` that replaces `rope_parameters`.
fn theta_beside(
    config: &Fields<'_>,
    scaling: &Fields<'_>,
    parameters: &Fields<'_>,
) -> Result<f64, EngineError> {
    let has_theta = |fields: &Fields<'_>| fields.get("rope_theta").is_some();
    if has_theta(parameters) && !has_theta(scaling) && !has_theta(config) {
        return Err(config.bad(
            "rope_scaling",
            "replaces `rope_parameters`, which alone has a rope_theta: add rope_theta to rope_scaling, or remove one of the two fields",
        ));
    }
    theta(config, Some(scaling))
}

fn theta(config: &Fields<'_>, rope: Option<&Fields<'_>>) -> Result<f64, EngineError> {
    let source = match rope {
        Some(rope) if rope.get("rope_theta").is_some() => rope,
        _ => config,
    };
    let theta = source.optional_number("rope_theta")?.unwrap_or(DEFAULT_THETA);
    if theta > 1.0 {
        Ok(theta)
    } else {
        Err(source.bad("rope_theta", format!("is {theta}, expected a number above one")))
    }
}

fn refuse_unknown_fields(rope: &Fields<'_>) -> Result<(), EngineError> {
    if let Some(unknown) = rope.names().find(|name| !SUPPORTED_FIELDS.contains(name)) {
        return Err(
            rope.bad(unknown, format!("is not supported, expected one of {}", SUPPORTED_FIELDS.join(", ")))
        );
    }
    refuse_partial_rotation(rope)
}

/// Refuses heads of which only a part is rotated. The field is in the rope object or, in older files, beside
/// it.
fn refuse_partial_rotation(fields: &Fields<'_>) -> Result<(), EngineError> {
    match fields.optional_number("partial_rotary_factor")? {
        None | Some(1.0) => Ok(()),
        Some(part) => {
            Err(fields.bad("partial_rotary_factor", format!("is {part}, only whole heads (1) are supported")))
        }
    }
}

fn scaling(config: &Fields<'_>, rope: &Fields<'_>, max_positions: usize) -> Result<Scaling, EngineError> {
    let name = if rope.get("rope_type").is_some() { "rope_type" } else { "type" };
    match rope.optional_string(name)?.unwrap_or("default") {
        "default" => Ok(Scaling::None),
        "linear" => Ok(Scaling::Linear { factor: factor(rope)? }),
        "llama3" => {
            let low_freq_factor = rope.positive("low_freq_factor")?;
            let high_freq_factor = rope.positive("high_freq_factor")?;
            if low_freq_factor >= high_freq_factor {
                let reason =
                    format!("is {high_freq_factor}, expected more than low_freq_factor, {low_freq_factor}");
                return Err(rope.bad("high_freq_factor", reason));
            }
            let original_len = original_len(config, rope, max_positions)?;
            Ok(Scaling::Llama3 { factor: factor(rope)?, low_freq_factor, high_freq_factor, original_len })
        }
        "yarn" => yarn(config, rope, max_positions),
        other => {
            Err(rope.bad(name, format!("is \"{other}\", expected one of default, linear, llama3, yarn")))
        }
    }
}

fn yarn(config: &Fields<'_>, rope: &Fields<'_>, max_positions: usize) -> Result<Scaling, EngineError> {
    let original_len = original_len(config, rope, max_positions)?;
    let factor = match rope.get("factor") {
        Some(_) => factor(rope)?,
        None => max_positions as f64 / original_len,
    };
    // Zero means "the default" here, as in the reference implementation.
    let beta = |name, default| {
        Ok::<_, EngineError>(rope.optional_number(name)?.filter(|x| *x != 0.0).unwrap_or(default))
    };
    let (beta_fast, beta_slow) =
        (beta("beta_fast", DEFAULT_BETA_FAST)?, beta("beta_slow", DEFAULT_BETA_SLOW)?);
    if beta_slow <= 0.0 || beta_fast < beta_slow {
        return Err(rope.bad(
            "beta_fast",
            format!("is {beta_fast}, expected at least beta_slow, {beta_slow}, above zero"),
        ));
    }
    Ok(Scaling::Yarn { factor, original_len, beta_fast, beta_slow, truncate: rope.flag("truncate", true)? })
}

fn factor(rope: &Fields<'_>) -> Result<f64, EngineError> {
    let factor = rope.number("factor")?;
    if (1.0..=1e6).contains(&factor) {
        Ok(factor)
    } else {
        Err(rope.bad("factor", format!("is {factor}, expected a number from 1 to 1e6")))
    }
}

/// The context length trained on: beside the rope object in some families, inside it in most, else the
/// configuration's length.
fn original_len(config: &Fields<'_>, rope: &Fields<'_>, max_positions: usize) -> Result<f64, EngineError> {
    let name = "original_max_position_embeddings";
    let beside = config.optional_count(name, MAX_POSITIONS)?;
    let inside = rope.optional_count(name, MAX_POSITIONS)?;
    Ok(beside.or(inside).unwrap_or(max_positions) as f64)
}

fn yarn_attention_factor(rope: &Fields<'_>, factor: f64) -> Result<f64, EngineError> {
    if let Some(given) = rope.optional_number("attention_factor")? {
        return Ok(given);
    }
    let mscale = rope.optional_number("mscale")?.filter(|x| *x != 0.0);
    let all_dim = rope.optional_number("mscale_all_dim")?.filter(|x| *x != 0.0);
    Ok(match (mscale, all_dim) {
        (Some(mscale), Some(all_dim)) => yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim),
        _ => yarn_mscale(factor, 1.0),
    })
}
