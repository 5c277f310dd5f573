//! The arms that are compared: an endpoint and the settings of its requests.

use std::str::FromStr;

use serde_json::{Map, Value};

use super::error::BenchError;
use crate::load::{Access, Dialect, Endpoint, Settings};
use crate::usage::UsageError;

/// `NAME[:KEY=VALUE,..]`, as given on the command line.
#[derive(Debug, Clone, PartialEq)]
pub struct ArmSpec {
    /// Name in all reports.
    pub name: String,
    /// The endpoint's URL, if not the shared one.
    pub url: Option<String>,
    /// The model's name, if not the shared one.
    pub model: Option<String>,
    /// Speculation; only for an outrider router.
    pub speculation: Option<SpeculationArg>,
    /// Additional fields of the request's body.
    pub fields: Map<String, Value>,
}

/// Speculation setting of an arm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpeculationArg {
    /// The router chooses k.
    On,
    /// No drafts.
    Off,
    /// A fixed number of drafted tokens per round.
    Pinned(u32),
}

/// An arm with a reachable endpoint.
#[derive(Debug, Clone)]
pub(super) struct Arm {
    pub(super) spec: ArmSpec,
    pub(super) endpoint: Endpoint,
}

impl FromStr for ArmSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, rest) = text.split_once(':').unwrap_or((text, ""));
        if name.is_empty() {
            return Err("expected NAME[:KEY=VALUE,..]".to_owned());
        }
        let mut arm = Self {
            name: name.to_owned(),
            url: None,
            model: None,
            speculation: None,
            fields: parse_fields(rest)?,
        };
        let mut take = |key: &str| {
            let value = arm.fields.shift_remove(key);
            value.map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_owned))
        };
        (arm.url, arm.model) = (take("url"), take("model"));
        arm.speculation = match take("speculation").as_deref() {
            None => None,
            Some("on") => Some(SpeculationArg::On),
            Some("off") => Some(SpeculationArg::Off),
            Some(k) => {
                let k = k.parse().map_err(|_| format!("speculation is `{k}`, expected on, off or a k"))?;
                Some(SpeculationArg::Pinned(k))
            }
        };
        Ok(arm)
    }
}

/// Parses `KEY=VALUE,..`: a value is parsed as JSON if possible, else kept as text.
pub(super) fn parse_fields(text: &str) -> Result<Map<String, Value>, String> {
    let mut fields = Map::new();
    for field in text.split(',').filter(|field| !field.is_empty()) {
        let (key, value) = field.split_once('=').ok_or_else(|| format!("`{field}`: expected KEY=VALUE"))?;
        let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
        fields.insert(key.to_owned(), value);
    }
    Ok(fields)
}

impl ArmSpec {
    fn with_speculation(name: &str, speculation: SpeculationArg) -> Self {
        let speculation = Some(speculation);
        Self { name: name.to_owned(), url: None, model: None, speculation, fields: Map::new() }
    }

    /// The default arms: with and without drafts; at a foreign endpoint a single arm.
    pub(super) fn defaults(dialect: Dialect) -> Vec<Self> {
        let on = Self::with_speculation("on", SpeculationArg::On);
        match dialect {
            Dialect::Outrider => vec![on, Self::with_speculation("off", SpeculationArg::Off)],
            Dialect::OpenAi => vec![Self { speculation: None, name: "all".to_owned(), ..on }],
        }
    }
}

impl Arm {
    /// Finds the arm's endpoint.
    pub(super) async fn connect(spec: ArmSpec, url: &str, access: Access) -> Result<Self, BenchError> {
        let model = spec.model.clone().or(access.model);
        let access = Access { model, ..access };
        let endpoint = Endpoint::connect(spec.url.as_deref().unwrap_or(url), access).await?;
        if spec.speculation.is_some() && endpoint.dialect() != Dialect::Outrider {
            let error = UsageError {
                flag: "--arm",
                value: format!("`{}`", spec.name),
                expected: format!(
                    "a field that {} knows: `speculation` is a setting of an outrider router, and {} is served by {}",
                    endpoint.url(),
                    endpoint.model(),
                    endpoint.served_by()
                ),
            };
            return Err(error.into());
        }
        Ok(Self { spec, endpoint })
    }

    /// The settings of the arm's requests, derived from the shared ones.
    pub(super) fn settings(&self, shared: &Settings) -> Settings {
        let mut settings = shared.clone();
        match self.spec.speculation {
            None | Some(SpeculationArg::On) => (),
            Some(SpeculationArg::Off) => settings.speculation = Some(false),
            Some(SpeculationArg::Pinned(k)) => settings.num_draft_tokens = Some(k),
        }
        settings.fields.extend(self.spec.fields.clone());
        settings
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn arms_are_read_with_their_settings() {
        let arm: ArmSpec =
            "new:url=http://10.0.0.1:9/v1,speculation=3,speculative.n_max=0,stop=x".parse().unwrap();
        assert_eq!((arm.name.as_str(), arm.url.as_deref()), ("new", Some("http://10.0.0.1:9/v1")));
        assert_eq!(arm.speculation, Some(SpeculationArg::Pinned(3)));
        assert_eq!(Value::Object(arm.fields), json!({ "speculative.n_max": 0, "stop": "x" }));
        assert_eq!("on".parse::<ArmSpec>().unwrap().speculation, None);
        for (text, fault) in [
            ("", "expected NAME"),
            (":speculation=on", "expected NAME"),
            ("a:speculation=maybe", "expected on, off or a k"),
            ("a:model", "`model`: expected KEY=VALUE"),
        ] {
            assert!(text.parse::<ArmSpec>().unwrap_err().contains(fault), "{text}");
        }
    }
}
