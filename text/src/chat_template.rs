//! [`ChatTemplate`]: renders a conversation to one prompt with the model's template.
//!
//! A template is untrusted code from the author of the checkpoint, run on untrusted input from clients. It
//! gets fuel, a recursion limit and an output limit, and can access only its arguments. The environment is
//! that of `transformers`: trimmed blocks, `raise_exception`, `strftime_now` (UTC), `tojson` without HTML
//! escaping, Python's string methods, and tags around the assistant's text for training.
//!
//! User text cannot become a special token: see `escaper`.

mod calls;
pub(crate) mod continuation;
mod json;
mod large_integers;
mod strings;
mod tags;

use std::io;

use jiff::fmt::strtime::{BrokenDownTime, Config, PosixCustom};
use minijinja::value::{Serde, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value, context};
use serde::Serialize;
use serde_json::Map;

use super::{ModelTextError, TextError};

/// Maximum instructions per rendering; a conversation of a thousand messages takes some hundred thousand.
const FUEL: u64 = 20_000_000;
/// Maximum recursion depth: a macro counts four and each frame in it one, so some 60 macros may nest.
const RECURSION_MAX: usize = 500;
/// Stack of a thread that renders conversations, in bytes: enough for [`RECURSION_MAX`].
pub const STACK_BYTES: usize = 8 << 20;
/// Maximum size of rendered text, in bytes. A request's body is at most 2 MiB.
const RENDERED_BYTES_MAX: usize = 8 << 20;

const NAME: &str = "chat";

/// Variable that requests the beginning of the assistant's next message.
pub const ADD_GENERATION_PROMPT: &str = "add_generation_prompt";

/// One message, as passed to templates.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct ConversationMessage {
    /// The role, such as "user".
    pub role: String,
    /// The text; `None` if an assistant's message has tool calls only and the client sent null.
    pub content: Option<String>,
    /// The participant's name, for templates that use it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The assistant's reasoning, for templates that show it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The assistant's tool calls: objects in OpenAI's format, with arguments as
    /// [`parse_arguments`](crate::parse_arguments) returns them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<serde_json::Value>,
    /// Id of the tool call that this tool message answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
}

impl ConversationMessage {
    /// Creates a message with a role and content only.
    pub fn new(role: &str, content: String) -> Self {
        Self { role: role.to_owned(), content: Some(content), ..Self::default() }
    }

    /// The text, empty if there is none.
    pub fn text(&self) -> &str {
        self.content.as_deref().unwrap_or_default()
    }
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    source: String,
    environment: Environment<'static>,
    bos_token: String,
    eos_token: String,
    /// Further special tokens, by the names of their variables.
    special_tokens: Map<String, serde_json::Value>,
}

impl ChatTemplate {
    /// Compiles a template's source.
    pub fn compile(source: &str, bos_token: &str, eos_token: &str) -> Result<Self, ModelTextError> {
        let mut environment = Environment::new();
        let syntax = environment.syntax().to_builder().trim_blocks(true).lstrip_blocks(true).build();
        environment
            .set_syntax(syntax.map_err(|error| ModelTextError::ChatTemplate { reason: describe(&error) })?);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(RECURSION_MAX);
        environment.set_unknown_method_callback(strings::call_method);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", json::to_json);
        for name in ["length", "count"] {
            environment.add_filter(name, length);
        }
        environment.add_test("sequence", is_sequence);
        // As in Jinja, which normalizes the line ends of a template.
        let unix_lines = source.replace("\r\n", "\n").replace('\r', "\n");
        environment
            .add_template_owned(NAME, tags::without_generation_tags(&unix_lines).into_owned())
            .map_err(|error| ModelTextError::ChatTemplate { reason: describe(&error) })?;
        Ok(Self {
            source: source.to_owned(),
            environment,
            bos_token: bos_token.to_owned(),
            eos_token: eos_token.to_owned(),
            special_tokens: Map::new(),
        })
    }

    /// Sets the variables of further special tokens, such as `unk_token`.
    #[must_use]
    pub(crate) fn with_special_tokens(mut self, tokens: Map<String, serde_json::Value>) -> Self {
        self.special_tokens = tokens;
        self
    }

    /// The source of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The token at the beginning of texts (BOS), if the model has one.
    pub fn bos_token(&self) -> Option<&str> {
        (!self.bos_token.is_empty()).then_some(self.bos_token.as_str())
    }

    /// Renders a conversation up to the beginning of the assistant's next message, which is left out if the
    /// variable `add_generation_prompt` is false. `extra` are additional template variables, such as `tools`;
    /// they cannot replace the other standard ones.
    pub fn render(
        &self,
        messages: &[ConversationMessage],
        extra: &Map<String, serde_json::Value>,
    ) -> Result<String, TextError> {
        self.render_messages(large_integers::with_objects(messages), extra)
    }

    /// Renders a conversation whose messages are template values.
    fn render_messages(
        &self,
        messages: Value,
        extra: &Map<String, serde_json::Value>,
    ) -> Result<String, TextError> {
        let standard = context! {
            messages => messages,
            add_generation_prompt => extra.get(ADD_GENERATION_PROMPT) != Some(&serde_json::Value::Bool(false)),
            bos_token => self.bos_token.as_str(),
            eos_token => self.eos_token.as_str(),
            tools => extra.get("tools").map(Serde),
            documents => None::<()>,
        };
        let template = self.environment.get_template(NAME).expect("compile added it");
        let mut output = LimitedOutput::default();
        let special_tokens = Value::from(Serde(&self.special_tokens));
        template
            .render_captured_to(
                context! { ..standard, ..special_tokens, ..Value::from(Serde(extra)) },
                &mut output,
            )
            .map_err(|error| client_error(&error))?;
        String::from_utf8(output.bytes)
            .map_err(|_| TextError::Internal("the chat template wrote invalid UTF-8".into()))
    }
}

/// The error for the client if the template fails on its conversation.
fn client_error(error: &Error) -> TextError {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        if let Some(Raised(message)) = cause.downcast_ref() {
            return TextError::Refused(format!(
                "the model's chat template refuses these messages: {message}"
            ));
        }
        source = cause.source();
    }
    if error.kind() == ErrorKind::OutOfFuel {
        let message =
            format!("messages are too many: the model's chat template ran for more than {FUEL} steps");
        return TextError::TooLong(message);
    }
    TextError::Conversation(format!(
        "the model's chat template failed on these messages: {}",
        describe(error)
    ))
}

/// An error of the template engine in one line.
fn describe(error: &Error) -> String {
    error.to_string().replace('\n', " ")
}

/// An error that a template raised deliberately.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raised by the template").with_source(Raised(message)))
}

/// As in Jinja, where a text and an object are sequences, too.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Undefined | ValueKind::Seq | ValueKind::String | ValueKind::Map)
}

/// As in Jinja, where what is undefined has no items: templates write `message.tool_calls | length`.
fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() { Ok(0) } else { minijinja::filters::length(value) }
}

fn strftime_now(format: &str) -> Result<String, Error> {
    strftime(format, &jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC))
}

/// As in Python: names of the POSIX locale, and directives that do not exist are text.
fn strftime(format: &str, time: &jiff::Zoned) -> Result<String, Error> {
    let config = Config::new().custom(PosixCustom::new()).lenient(true);
    BrokenDownTime::from(time).to_string_with_config(&config, format).map_err(|error| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {error}"))
    })
}

/// Collects output up to the limit.
#[derive(Default)]
struct LimitedOutput {
    bytes: Vec<u8>,
}

impl io::Write for LimitedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > RENDERED_BYTES_MAX {
            return Err(io::Error::other(format!(
                "the rendered prompt is larger than {RENDERED_BYTES_MAX} bytes"
            )));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
