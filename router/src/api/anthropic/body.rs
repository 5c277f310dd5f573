//! Request body of `/v1/messages`. Unknown fields are refused by name, and so are unsupported fields that
//! would change the answer.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

use super::blocks::Content;
use crate::api::conversation::ConversationBuilder;
use crate::api::disabled::{is_disabled, refuse_fields};
use crate::api::functions::ToolFormat;
use crate::api::grammars::{FormatNames, grammar_from_format};
use crate::api::integer;
use crate::api::object::Object;
use crate::api::speculation_settings::SpeculationSettings;
use crate::api::template_variables::PromptEnd;
use crate::error::RouterError;
use crate::request::RawRequest;
use crate::request::raw::{FieldNames, RawPrompt, RawSampling};
use crate::request::structure::RawGrammar;
use crate::request::tools::{AllowedTools, ToolChoice};
use text::ConversationMessage;

/// A request body.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Body {
    model: Option<String>,
    messages: Option<Vec<Object<RawMessage>>>,
    #[serde(deserialize_with = "integer::optional")]
    pub(super) max_tokens: Option<i64>,
    system: Option<Content>,
    stop_sequences: Option<Vec<String>>,
    stream: Option<bool>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    #[serde(deserialize_with = "integer::optional")]
    top_k: Option<i64>,

    // Outrider's, as for chat completions.
    #[serde(deserialize_with = "integer::optional")]
    seed: Option<i64>,
    ignore_eos: Option<bool>,
    #[serde(deserialize_with = "integer::optional")]
    priority: Option<i64>,
    task_type: Option<String>,
    speculation: Option<Object<SpeculationSettings>>,
    // vLLM's.
    cache_salt: Option<String>,

    tools: Option<Vec<Value>>,
    tool_choice: Option<Object<RawToolChoice>>,

    thinking: Option<Object<Thinking>>,
    container: Option<Value>,
    mcp_servers: Option<Value>,
    output_config: Option<Object<OutputConfig>>,
    output_format: Option<Object<OutputFormat>>,

    // It may shorten a conversation; here all of it is the prompt.
    #[serde(rename = "context_management")]
    _context_management: IgnoredAny,

    #[serde(rename = "metadata")]
    _metadata: IgnoredAny,
    #[serde(rename = "service_tier")]
    _service_tier: IgnoredAny,
    #[serde(rename = "speed")]
    _speed: IgnoredAny,
    #[serde(rename = "inference_geo")]
    _inference_geo: IgnoredAny,
    #[serde(rename = "cache_control")]
    _cache_control: IgnoredAny,
    // Asks why a prefix was not cached; Claude Code sends it.
    #[serde(rename = "diagnostics")]
    _diagnostics: IgnoredAny,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawMessage {
    role: String,
    content: Content,
}

/// `thinking`. Nothing but its type is read: a model that thinks does so by itself.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Thinking {
    r#type: String,
    #[serde(default, rename = "budget_tokens", deserialize_with = "integer::optional")]
    _budget_tokens: Option<i64>,
    #[serde(default, rename = "display")]
    _display: IgnoredAny,
}

impl Thinking {
    fn check(&self) -> Result<(), RouterError> {
        let known = ["enabled", "adaptive", "disabled"];
        if known.contains(&self.r#type.as_str()) {
            return Ok(());
        }
        Err(RouterError::not_one_of("thinking.type", &known, &self.r#type))
    }
}

/// `output_config`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct OutputConfig {
    #[serde(rename = "effort")]
    _effort: IgnoredAny,
    // A hint to the model, not a limit.
    #[serde(rename = "task_budget")]
    _task_budget: IgnoredAny,
    format: Option<Object<OutputFormat>>,
}

/// `output_config.format`, or `output_format`, its name before.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct OutputFormat {
    r#type: String,
    #[serde(default)]
    schema: Option<Value>,
}

/// `tool_choice`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawToolChoice {
    r#type: String,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    disable_parallel_tool_use: Option<bool>,
}

impl RawToolChoice {
    /// Returns which calls are requested, and whether several are allowed.
    fn read(self) -> Result<(ToolChoice, bool), RouterError> {
        let choice = match (self.r#type.as_str(), self.name) {
            ("auto", None) => ToolChoice::default(),
            ("any", None) => ToolChoice::Required(AllowedTools::All),
            ("none", None) => ToolChoice::None,
            ("tool", Some(name)) => ToolChoice::Named(name),
            ("tool", None) => {
                let field = "tool_choice.name";
                return Err(RouterError::invalid(
                    field,
                    format!("{field} is required where its type is tool"),
                ));
            }
            ("auto" | "any" | "none", Some(_)) => {
                let field = "tool_choice.name";
                let message = format!("{field} is only allowed where tool_choice.type is tool");
                return Err(RouterError::invalid(field, message));
            }
            (other, _) => {
                let known = ["auto", "any", "tool", "none"];
                return Err(RouterError::not_one_of("tool_choice.type", &known, other));
            }
        };
        Ok((choice, self.disable_parallel_tool_use != Some(true)))
    }
}

/// Properties of the request that the response depends on.
#[derive(Debug, Clone, Copy)]
pub(super) struct MessageOptions {
    /// Stream the response as server-sent events.
    pub(super) stream: bool,
}

impl Body {
    /// Converts the body to the common request.
    pub(super) fn into_request(
        mut self,
        header_task_type: Option<String>,
    ) -> Result<(RawRequest, MessageOptions), RouterError> {
        self.refuse_unsupported()?;
        if self.max_tokens.is_none() {
            return Err(RouterError::invalid("max_tokens", "max_tokens is required"));
        }
        let grammar = self.take_grammar()?;
        let tool_format = ToolFormat::InputSchema;
        let (choice, parallel) =
            self.tool_choice.map_or(Ok((ToolChoice::default(), true)), |Object(choice)| choice.read())?;
        let mut tools = tool_format.parse(self.tools.unwrap_or_default(), choice, Some(parallel))?;
        let mut template_kwargs = Map::new();
        tools.set_template_tools(&mut template_kwargs);
        let mut builder = ConversationBuilder::default();
        if let Some(system) = self.system {
            builder.push_message("system", system.into_text("system")?);
        }
        let messages =
            self.messages.ok_or_else(|| RouterError::invalid("messages", "messages is required"))?;
        for (idx, Object(RawMessage { role, content })) in messages.into_iter().enumerate() {
            // Claude Code sends messages of the system between those of the user.
            let known = ["user", "assistant", "system"];
            if !known.contains(&role.as_str()) {
                return Err(RouterError::not_one_of(&format!("messages[{idx}].role"), &known, &role));
            }
            content.read(&format!("messages[{idx}].content"), &role, &mut builder)?;
        }
        let messages = builder.into_messages();
        prompt_end(&messages)?.set(&mut template_kwargs)?;
        let raw_request = RawRequest {
            model: self.model,
            prompts: vec![RawPrompt::Chat { messages, template_kwargs }],
            sampling: RawSampling {
                temperature: self.temperature,
                top_p: self.top_p,
                top_k: self.top_k,
                ..RawSampling::default()
            },
            max_tokens: self.max_tokens,
            seed: self.seed,
            stop: self.stop_sequences.unwrap_or_default(),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            priority: self.priority,
            task_type: self.task_type.or(header_task_type),
            speculation: self.speculation.map(|Object(speculation)| speculation.into()).unwrap_or_default(),
            cache_salt: self.cache_salt,
            tools: tools.raw,
            grammar,
            names: FieldNames { prompt: "messages", stop: "stop_sequences", ..FieldNames::default() },
            ..RawRequest::default()
        };
        Ok((raw_request, MessageOptions { stream: self.stream == Some(true) }))
    }

    /// Refuses unsupported fields that would change the answer.
    fn refuse_unsupported(&self) -> Result<(), RouterError> {
        if let Some(Object(thinking)) = &self.thinking {
            thinking.check()?;
        }
        refuse_fields("", &[("container", &self.container), ("mcp_servers", &self.mcp_servers)], is_disabled)
    }

    /// Takes the grammar of the requested format.
    fn take_grammar(&mut self) -> Result<Option<RawGrammar>, RouterError> {
        let config = self.output_config.take().map(|Object(config)| config).unwrap_or_default();
        let names = FormatNames {
            format: "output_config.format",
            kind: "output_config.format.type",
            schema: "output_config.format.schema",
        };
        let older_names = FormatNames {
            format: "output_format",
            kind: "output_format.type",
            schema: "output_format.schema",
        };
        match (config.format, self.output_format.take()) {
            (Some(_), Some(_)) => {
                let (format, older) = (names.format, older_names.format);
                let message = format!("{format} and {older} both constrain the output: send one of them");
                Err(RouterError::invalid(older, message))
            }
            (Some(Object(format)), None) => grammar_from_format(&names, &format.r#type, format.schema),
            (None, Some(Object(format))) => grammar_from_format(&older_names, &format.r#type, format.schema),
            (None, None) => Ok(None),
        }
    }
}

/// A last message of the assistant is the beginning of its answer, which the model continues. Its text must
/// not end with whitespace, as in Anthropic's API: tokens begin with the space before a word.
fn prompt_end(messages: &[ConversationMessage]) -> Result<PromptEnd, RouterError> {
    let last = messages.last().filter(|last| last.role == "assistant" && last.tool_calls.is_empty());
    if last.is_some_and(|last| last.text().ends_with(char::is_whitespace)) {
        let message = "messages: the text of a last message of role assistant must not end with whitespace";
        return Err(RouterError::invalid("messages", message));
    }
    Ok(PromptEnd { continue_final_message: last.map(|_| true), ..PromptEnd::default() })
}
