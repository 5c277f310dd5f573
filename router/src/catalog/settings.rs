//! [`ModelSettings`]: an operator's settings for a model, `[models."name"]` in the router's configuration
//! file: an alias, and defaults of absent request fields.

use serde::{Deserialize, Serialize};

/// A name under which a model is served, and the defaults of its requests.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSettings {
    /// The model that targets serve; absent: the one with the name itself.
    pub serves: Option<String>,
    /// Defaults of absent request fields.
    #[serde(flatten)]
    pub defaults: RequestDefaults,
}

/// Defaults of absent request fields; absent here: the router's own default.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are those of requests")]
pub struct RequestDefaults {
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub top_k: Option<i64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub max_tokens: Option<i64>,
    pub task_type: Option<String>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn settings_are_parsed_and_misspelt_ones_are_refused() {
        let read = |settings| serde_json::from_value::<ModelSettings>(settings);
        let defaults = RequestDefaults { temperature: Some(0.5), ..RequestDefaults::default() };
        let expected = ModelSettings { serves: Some("demo".to_owned()), defaults };
        assert_eq!(read(json!({ "serves": "demo", "temperature": 0.5 })).unwrap(), expected);
        let error = read(json!({ "serves": "demo", "temperatur": 0.5 })).unwrap_err().to_string();
        assert!(error.contains("temperatur"), "{error}");
    }
}
