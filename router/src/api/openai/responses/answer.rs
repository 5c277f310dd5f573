//! [`ResponseObject`]: what a response looks like, at whichever point of its making.

use serde::Serialize;
use serde_json::{Map, Value, json};
use speculation::FinishReason;

use super::body::ResponseForm;
use crate::api::openai::response::MetricsBody;
use crate::error::RouterError;
use crate::pipeline::text_stream::ResponseInfo;
use crate::request::Usage;

/// How far a response has come.
#[derive(Debug, Clone, Copy)]
pub(super) enum Outcome<'a> {
    /// Text is still to come.
    Running,
    /// It is complete, or as long as it may be.
    Ended {
        /// All of it.
        text: &'a str,
        /// Why it ended.
        finish: FinishReason,
        /// What it cost.
        usage: &'a Usage,
    },
    /// It cannot go on.
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
    output: Vec<OutputMessage<'a>>,
    parallel_tool_calls: bool,
    previous_response_id: Option<&'a str>,
    reasoning: Value,
    store: bool,
    temperature: f64,
    text: Value,
    tool_choice: &'static str,
    tools: [(); 0],
    top_logprobs: u32,
    top_p: f64,
    truncation: &'static str,
    usage: Option<ResponseUsage>,
    user: Option<&'a str>,
    metadata: &'a Map<String, Value>,
    /// Ours, as in conversations.
    system_fingerprint: &'a str,
    seed: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<MetricsBody>,
}

/// The message that a model says.
#[derive(Debug, Serialize)]
pub(super) struct OutputMessage<'a> {
    id: String,
    r#type: &'static str,
    status: &'static str,
    role: &'static str,
    content: Vec<OutputText<'a>>,
}

/// The text of a message.
#[derive(Debug, Serialize)]
pub(super) struct OutputText<'a> {
    r#type: &'static str,
    text: &'a str,
    annotations: [(); 0],
    logprobs: [(); 0],
}

#[derive(Debug, Serialize)]
struct ResponseUsage {
    input_tokens: u64,
    input_tokens_details: InputDetails,
    output_tokens: u64,
    output_tokens_details: OutputDetails,
    total_tokens: u64,
    speculation: crate::api::openai::response::SpeculationBody,
}

#[derive(Debug, Serialize)]
struct InputDetails {
    cached_tokens: u64,
}

#[derive(Debug, Serialize)]
struct OutputDetails {
    reasoning_tokens: u64,
}

impl<'a> OutputText<'a> {
    pub(super) fn of(text: &'a str) -> Self {
        Self { r#type: "output_text", text, annotations: [], logprobs: [] }
    }
}

impl<'a> OutputMessage<'a> {
    /// The one message of a response; its text is absent while nothing is known of it.
    pub(super) fn of(response_id: &str, status: &'static str, text: Option<&'a str>) -> Self {
        let content = text.into_iter().map(OutputText::of).collect();
        Self { id: message_id(response_id), r#type: "message", status, role: "assistant", content }
    }
}

/// The id of a response's message.
pub(super) fn message_id(response_id: &str) -> String {
    format!("msg_{}", response_id.strip_prefix("resp_").unwrap_or(response_id))
}

impl<'a> ResponseObject<'a> {
    /// The response of a request.
    pub(super) fn of(form: &'a ResponseForm, info: &'a ResponseInfo, outcome: Outcome<'a>) -> Self {
        let (status, output, usage) = match outcome {
            Outcome::Running => ("in_progress", Vec::new(), None),
            Outcome::Failed(_) => ("failed", Vec::new(), None),
            Outcome::Ended { text, finish, usage } => {
                let status = status_of(finish);
                (status, vec![OutputMessage::of(&info.id, status, Some(text))], Some(usage))
            }
        };
        let failed = |error: &RouterError| json!({ "code": "server_error", "message": error.to_string() });
        Self {
            id: &info.id,
            object: "response",
            created_at: info.created,
            status,
            background: false,
            error: if let Outcome::Failed(error) = outcome { Some(failed(error)) } else { None },
            incomplete_details: (status == "incomplete").then(|| json!({ "reason": "max_output_tokens" })),
            instructions: form.instructions.as_deref(),
            max_output_tokens: form.max_output_tokens,
            max_tool_calls: None,
            model: &info.model,
            output,
            parallel_tool_calls: true,
            previous_response_id: form.previous_response_id.as_deref(),
            reasoning: json!({ "effort": null, "summary": null }),
            store: form.store,
            temperature: form.temperature,
            text: json!({ "format": { "type": "text" } }),
            tool_choice: "auto",
            tools: [],
            top_logprobs: 0,
            top_p: form.top_p,
            truncation: "disabled",
            usage: usage.map(ResponseUsage::from),
            user: form.user.as_deref(),
            metadata: &form.metadata,
            system_fingerprint: &info.system_fingerprint,
            seed: info.seed as i64,
            metrics: usage.and_then(MetricsBody::of),
        }
    }

    /// One line of JSON.
    pub(super) fn to_json(&self) -> String {
        serde_json::to_string(self).expect("text, numbers and lists of them can be written")
    }
}

/// OpenAI's word for how a response ended.
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
            input_tokens_details: InputDetails { cached_tokens: usage.cached_tokens },
            output_tokens: usage.completion_tokens,
            output_tokens_details: OutputDetails { reasoning_tokens: 0 },
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
            speculation: (&usage.speculation).into(),
        }
    }
}
