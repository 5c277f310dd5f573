//! Limits on the content of one request. The message that refuses a request names the limit.

use proto::sampling::{MAX_ALLOWED_TOKEN_IDS, MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS};

/// Maximum size of a request body, over HTTP and gRPC.
pub const BODY_BYTES_MAX: usize = 2 << 20;
/// Number of bytes of an oversized body that are read and discarded, so that the client can read the
/// response.
pub const BODY_DISCARD_BYTES_MAX: usize = 64 << 20;
/// Maximum number of prompts in a completions request.
pub const PROMPTS_MAX: usize = 128;
/// Maximum `n`.
pub const CHOICES_MAX: i64 = 128;
/// Maximum number of prompts times `n`.
pub const SEQUENCES_MAX: usize = 128;
/// Maximum number of messages in a conversation.
pub const MESSAGES_MAX: usize = 2_048;
/// Maximum number of stop strings.
pub const STOPS_MAX: usize = 64;
/// Maximum size of a stop string, in bytes.
pub const STOP_BYTES_MAX: usize = 512;
/// Maximum size of all stop strings together, in bytes: each is compared with the text of every token.
pub const STOPS_BYTES_MAX: usize = 8_192;
/// Maximum number of stop token ids.
pub const STOP_TOKEN_IDS_MAX: usize = 128;
/// Maximum number of tokens with a logit bias.
pub const LOGIT_BIAS_MAX: usize = 1_024;
/// Maximum number of allowed token ids.
pub const ALLOWED_TOKEN_IDS_MAX: usize = MAX_ALLOWED_TOKEN_IDS;
/// Maximum number of bad words.
pub const BAD_WORDS_MAX: usize = 256;
/// Maximum size of all bad words together, in bytes.
pub const BAD_WORDS_BYTES_MAX: usize = 8_192;
/// Maximum number of top log probabilities per position.
pub const TOP_LOGPROBS_MAX: i64 = 20;
/// Maximum size of `cache_salt`, in bytes.
pub const CACHE_SALT_BYTES_MAX: usize = 1_024;
/// Maximum length of a task type or of a participant's name, in characters.
pub const NAME_LEN_MAX: usize = 64;
/// Maximum length of an id that a client or a gateway gives, in characters.
pub const ID_LEN_MAX: usize = 256;
/// Default of `max_tokens` for completions requests.
pub const COMPLETION_TOKENS_DEFAULT: u32 = 16;
/// Maximum length of a tool's name, in characters, as in Anthropic's API.
pub const TOOL_NAME_LEN_MAX: usize = 128;
/// Maximum number of tools in a request.
pub const TOOLS_MAX: usize = 128;
/// Maximum number of calls in an answer that must consist of calls.
pub const TOOL_CALLS_MAX: usize = 16;

/// Maximum number of JSON values in the fields of a request that may hold any JSON. Each takes 72 bytes, more
/// in an object.
pub const JSON_VALUES_MAX: usize = 65_536;

// A worker refuses a sequence that exceeds the wire's limits. The model's own stop ids are added to the
// request's.
const _: () = assert!(STOP_TOKEN_IDS_MAX < MAX_STOP_TOKEN_IDS);
const _: () = assert!(LOGIT_BIAS_MAX <= MAX_LOGIT_BIAS && TOP_LOGPROBS_MAX <= MAX_LOGPROBS as i64);
