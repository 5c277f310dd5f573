//! The limits on what one request may hold. Each is named in the message that refuses what is over it.

use std::time::Duration;

/// A request's body, over HTTP and gRPC alike.
pub const BODY_BYTES_MAX: usize = 2 << 20;
/// How much of a body that is too large is read and thrown away, so that the client gets to read the answer.
pub const BODY_DISCARD_BYTES_MAX: usize = 64 << 20;
/// How long a body may take to arrive.
pub const BODY_WAIT_MAX: Duration = Duration::from_secs(30);
/// Prompts in one completions request.
pub const PROMPTS_MAX: usize = 128;
/// `n`.
pub const CHOICES_MAX: i64 = 128;
/// Prompts times `n`.
pub const SEQUENCES_MAX: usize = 128;
/// Messages in one conversation.
pub const MESSAGES_MAX: usize = 2_048;
/// Stop strings.
pub const STOPS_MAX: usize = 16;
/// Bytes in one stop string.
pub const STOP_BYTES_MAX: usize = 512;
/// Stop token ids.
pub const STOP_TOKEN_IDS_MAX: usize = 128;
/// Tokens with a bias.
pub const LOGIT_BIAS_MAX: usize = 1_024;
/// Likeliest tokens reported at each position.
pub const TOP_LOGPROBS_MAX: i64 = 20;
/// Bytes of `cache_salt`.
pub const CACHE_SALT_BYTES_MAX: usize = 1_024;
/// Characters of a task type or a participant's name.
pub const NAME_LEN_MAX: usize = 64;
/// `max_tokens` of a completions request that does not say.
pub const COMPLETION_TOKENS_DEFAULT: u32 = 16;
/// Tools in one request.
pub const TOOLS_MAX: usize = 128;
/// Calls in one answer that has to be calls.
pub const TOOL_CALLS_MAX: usize = 16;
