//! [`ResponseObject`]: a response object, complete or not.

use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use speculation::FinishReason;

use super::ID_PREFIX;
use super::body::{ResponseOptions, function_call_id};
use super::custom_tools::input_of;
use super::scored_output::{ScoredPart, ScoredParts};
use super::tool_search;
use super::tools::{ClientTool, ClientTools, ToolKind};
use crate::api::functions::{json_arguments, unique_part};
use crate::api::openai::logprobs::TextScores;
use crate::api::openai::response::{ASSISTANT, MetricsBody, SpeculationBody};
use crate::api::parsed_output::OutputPart;
use crate::error::RouterError;
use crate::pipeline::text_delta::ResponseInfo;
use crate::request::Usage;

/// Progress of a response.
#[derive(Clone, Copy)]
pub(super) enum ResponseState<'a> {
    /// More text will follow.
    Running,
    /// Complete, or cut off at its maximum length.
    Ended {
        /// Parts of the answer.
        output: ScoredParts<'a>,
        /// Finish reason.
        finish: FinishReason,
        /// Usage.
        usage: &'a Usage,
    },
    /// Ended with an error.
    Failed(&'a RouterError),
}

/// OpenAI's response object.
#[derive(Debug, Serialize)]
pub(super) struct ResponseObject<'a> {
    id: &'a str,
    object: &'static str,
    created_at: u64,
    status: &'static str,
    background: bool,
    error: Option<Value>,
    incomplete_details: Option<Value>,
    instructions: Option<&'a str>,
    max_output_tokens: Option<i64>,
    max_tool_calls: Option<()>,
    model: &'a str,
    output: Vec<Item<'a>>,
    parallel_tool_calls: bool,
    previous_response_id: Option<&'a str>,
    reasoning: Value,
    store: bool,
    temperature: f64,
    text: Value,
    tool_choice: &'a Value,
    tools: &'a [Value],
    top_logprobs: i64,
    top_p: f64,
    truncation: &'static str,
    usage: Option<ResponseUsage>,
    user: Option<&'a str>,
    metadata: &'a Map<String, Value>,
    /// Outrider's, as in chat completions.
    system_fingerprint: &'a str,
    seed: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<MetricsBody>,
}

/// One item of the output.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Item<'a> {
    /// Content of the model.
    Message { id: String, status: &'static str, role: &'static str, content: Vec<Content<'a>> },
    /// A call of a function.
    FunctionCall {
        id: String,
        call_id: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<&'a str>,
        name: &'a str,
        arguments: &'a str,
        status: &'static str,
    },
    /// A call of a custom tool.
    CustomToolCall {
        id: String,
        call_id: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<&'a str>,
        name: &'a str,
        input: String,
        status: &'static str,
    },
    /// A search for tools.
    ToolSearchCall {
        id: String,
        call_id: String,
        execution: &'static str,
        arguments: &'a RawValue,
        status: &'static str,
    },
    /// Reasoning of the model.
    Reasoning { id: String, summary: [(); 0], content: Vec<Content<'a>>, status: &'static str },
}

/// What an item is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ItemKind {
    Message,
    Reasoning,
    FunctionCall,
    CustomToolCall,
    ToolSearchCall,
}

impl ItemKind {
    /// Returns the kind of a part's item.
    pub(super) fn new(part: &OutputPart, client_tools: &ClientTools) -> Self {
        match part {
            OutputPart::Text(_) => Self::Message,
            OutputPart::Reasoning(_) => Self::Reasoning,
            OutputPart::Call { call, .. } => match client_tools.get(&call.name).kind {
                ToolKind::Function => Self::FunctionCall,
                ToolKind::Custom => Self::CustomToolCall,
                ToolKind::Search => Self::ToolSearchCall,
            },
        }
    }
}

/// The text of an item.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Content<'a> {
    OutputText { text: &'a str, annotations: [(); 0], logprobs: TextScores<'a> },
    ReasoningText { text: &'a str },
}

#[derive(Debug, Serialize)]
struct ResponseUsage {
    input_tokens: u64,
    input_tokens_details: InputDetails,
    output_tokens: u64,
    output_tokens_details: OutputDetails,
    total_tokens: u64,
    speculation: SpeculationBody,
}

#[derive(Debug, Serialize)]
struct InputDetails {
    cached_tokens: u64,
    /// Always 0: what a prompt adds to the cache has no price of its own.
    cache_write_tokens: u64,
}

#[derive(Debug, Serialize)]
struct OutputDetails {
    reasoning_tokens: u64,
}

impl<'a> Content<'a> {
    /// Returns the text of a part; `None` for a call.
    pub(super) fn from_part(ScoredPart { part, scores }: ScoredPart<'a>) -> Option<Self> {
        match part {
            OutputPart::Text(text) => Some(Self::OutputText { text, annotations: [], logprobs: scores }),
            OutputPart::Reasoning(text) => Some(Self::ReasoningText { text }),
            OutputPart::Call { .. } => None,
        }
    }
}

impl<'a> Item<'a> {
    /// Creates the item of a part from what is known so far.
    pub(super) fn new(
        id: String,
        status: &'static str,
        response_id: &str,
        scored: ScoredPart<'a>,
        client_tools: &'a ClientTools,
    ) -> Self {
        let content = Content::from_part(scored).into_iter().collect();
        match scored.part {
            OutputPart::Text(_) => Self::Message { id, status, role: ASSISTANT, content },
            OutputPart::Reasoning(_) => Self::Reasoning { id, summary: [], content, status },
            OutputPart::Call { idx, call } => {
                let call_id = function_call_id(response_id, *idx);
                let ClientTool { namespace, name, kind } = client_tools.get(&call.name);
                let arguments = &call.arguments;
                match kind {
                    ToolKind::Function => {
                        Self::FunctionCall { id, call_id, namespace, name, arguments, status }
                    }
                    ToolKind::Custom => {
                        let input = input_of(arguments);
                        Self::CustomToolCall { id, call_id, namespace, name, input, status }
                    }
                    ToolKind::Search => {
                        let (execution, arguments) = (tool_search::CLIENT, json_arguments(arguments));
                        Self::ToolSearchCall { id, call_id, execution, arguments, status }
                    }
                }
            }
        }
    }

    /// Returns the item at its beginning: without content, but with a call's name.
    pub(super) fn in_progress(self) -> Self {
        match self {
            Self::Message { id, role, .. } => {
                Self::Message { id, status: IN_PROGRESS, role, content: Vec::new() }
            }
            Self::Reasoning { id, summary, .. } => {
                Self::Reasoning { id, summary, content: Vec::new(), status: IN_PROGRESS }
            }
            Self::FunctionCall { id, call_id, namespace, name, .. } => {
                Self::FunctionCall { id, call_id, namespace, name, arguments: "", status: IN_PROGRESS }
            }
            Self::CustomToolCall { id, call_id, namespace, name, .. } => {
                let input = String::new();
                Self::CustomToolCall { id, call_id, namespace, name, input, status: IN_PROGRESS }
            }
            Self::ToolSearchCall { id, call_id, execution, .. } => {
                let arguments = json_arguments("");
                Self::ToolSearchCall { id, call_id, execution, arguments, status: IN_PROGRESS }
            }
        }
    }
}

/// Status of an item that is still growing.
const IN_PROGRESS: &str = "in_progress";

/// Returns the id of the item at this index of the output.
pub(super) fn item_id(response_id: &str, kind: ItemKind, idx: usize) -> String {
    let prefix = match kind {
        ItemKind::Message => "msg",
        ItemKind::Reasoning => "rs",
        ItemKind::FunctionCall => "fc",
        ItemKind::CustomToolCall => "ctc",
        ItemKind::ToolSearchCall => "tsc",
    };
    format!("{prefix}_{}_{idx}", unique_part(response_id))
}

/// Returns the id of the response that has the item with this id; `None` if it is not an id of an item.
pub(super) fn response_id_of(item_id: &str) -> Option<String> {
    let (_kind, rest) = item_id.split_once('_')?;
    let (unique, _idx) = rest.split_once('_')?;
    Some(format!("{ID_PREFIX}{unique}"))
}

/// Returns the status of the part at this index: only the last one can be incomplete.
pub(super) fn item_status(idx: usize, parts: &[OutputPart], finish: Option<FinishReason>) -> &'static str {
    match finish {
        Some(finish) if idx + 1 == parts.len() => status_of(finish),
        _ => status_of(FinishReason::Stop),
    }
}

/// Creates all items of a complete answer.
fn items<'a>(
    client_tools: &'a ClientTools,
    response_id: &str,
    output: ScoredParts<'a>,
    finish: FinishReason,
) -> Vec<Item<'a>> {
    let item = |idx| {
        let scored = output.get(idx);
        let id = item_id(response_id, ItemKind::new(scored.part, client_tools), idx);
        Item::new(id, item_status(idx, output.parts, Some(finish)), response_id, scored, client_tools)
    };
    (0..output.parts.len()).map(item).collect()
}

impl<'a> ResponseObject<'a> {
    /// Creates the response of a request.
    pub(super) fn new(
        options: &'a ResponseOptions,
        info: &'a ResponseInfo,
        response_state: ResponseState<'a>,
    ) -> Self {
        let (status, output, usage) = match response_state {
            ResponseState::Running => (IN_PROGRESS, Vec::new(), None),
            ResponseState::Failed(_) => ("failed", Vec::new(), None),
            ResponseState::Ended { output, finish, usage } => {
                (status_of(finish), items(&options.client_tools, &info.id, output, finish), Some(usage))
            }
        };
        let failed = |error: &RouterError| json!({ "code": "server_error", "message": error.message() });
        Self {
            id: &info.id,
            object: "response",
            created_at: info.created,
            status,
            background: false,
            error: if let ResponseState::Failed(error) = response_state { Some(failed(error)) } else { None },
            incomplete_details: (status == "incomplete").then(|| json!({ "reason": "max_output_tokens" })),
            instructions: options.instructions.as_deref(),
            max_output_tokens: options.max_output_tokens,
            max_tool_calls: None,
            model: &info.model,
            output,
            parallel_tool_calls: options.parallel_tool_calls,
            previous_response_id: options.previous_response_id.as_deref(),
            reasoning: json!({ "effort": options.reasoning_effort, "summary": null }),
            store: options.store,
            temperature: options.temperature,
            text: json!({ "format": options.text_format }),
            tool_choice: &options.tool_choice,
            tools: &options.tools,
            top_logprobs: options.top_logprobs,
            top_p: options.top_p,
            truncation: if options.drop_oldest_items { "auto" } else { "disabled" },
            usage: usage.map(ResponseUsage::from),
            user: options.user.as_deref(),
            metadata: &options.metadata,
            system_fingerprint: &info.system_fingerprint,
            seed: info.seed as i64,
            metrics: usage.and_then(MetricsBody::from_usage),
        }
    }
}

/// Maps a finish reason to OpenAI's status.
pub(super) fn status_of(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::Stop => "completed",
        FinishReason::Length => "incomplete",
    }
}

impl From<&Usage> for ResponseUsage {
    fn from(usage: &Usage) -> Self {
        Self {
            input_tokens: usage.prompt_tokens,
            input_tokens_details: InputDetails { cached_tokens: usage.cached_tokens, cache_write_tokens: 0 },
            output_tokens: usage.completion_tokens,
            output_tokens_details: OutputDetails { reasoning_tokens: 0 },
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
            speculation: (&usage.speculation).into(),
        }
    }
}
