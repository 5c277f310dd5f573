//! All fields of `/v1/chat/completions` and `/v1/completions` and their treatment: the table of docs/api.md.
//! A test compares it with [`super::body::Body`] and with the behavior of each endpoint.

use std::fmt::Write as _;

/// Treatment of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Treatment {
    /// Has its documented effect.
    Honoured,
    /// Accepted without effect on the answer.
    Ignored,
    /// Refused by name, unless its value means "off" or is the default.
    Refused,
}

impl Treatment {
    fn as_str(self) -> &'static str {
        match self {
            Self::Honoured => "honoured",
            Self::Ignored => "ignored",
            Self::Refused => "refused",
        }
    }
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// Name in the request.
    pub name: &'static str,
    /// At `/v1/chat/completions`.
    pub chat: Treatment,
    /// At `/v1/completions`.
    pub completions: Treatment,
    /// A JSON value that requests something.
    pub sample: &'static str,
    /// Further notes.
    pub note: &'static str,
}

use Treatment::{Honoured, Ignored, Refused};

const fn both(treatment: Treatment, name: &'static str, sample: &'static str, note: &'static str) -> Field {
    Field { name, chat: treatment, completions: treatment, sample, note }
}

const fn chat(name: &'static str, sample: &'static str, note: &'static str) -> Field {
    Field { name, chat: Honoured, completions: Refused, sample, note }
}

const fn completions(name: &'static str, sample: &'static str, note: &'static str) -> Field {
    Field { name, chat: Refused, completions: Honoured, sample, note }
}

/// All fields, in the order of the page.
pub const FIELDS: &[Field] = &[
    both(Honoured, "model", "\"org/demo\"", "required"),
    chat(
        "messages",
        "[{\"role\": \"user\", \"content\": \"hi\"}]",
        "up to 2,048; roles system, developer, user, assistant, tool, function (the older form of tool); text parts only",
    ),
    completions(
        "prompt",
        "\"hi\"",
        "a text, up to 128 texts, token ids, or up to 128 lists of token ids; prompts times `n` up to 128",
    ),
    both(Honoured, "stream", "true", ""),
    both(
        Honoured,
        "stream_options",
        "{\"include_usage\": true}",
        "`include_usage`; `continuous_usage_stats` (vLLM's): every chunk reports the usage so far; `include_speculation` (ours): each chunk reports how many of its tokens were drafted; `include_obfuscation` has no effect; only with `stream`",
    ),
    both(Honoured, "temperature", "0.5", "0 to 2; default 1"),
    both(Honoured, "top_p", "0.5", ""),
    both(Honoured, "top_k", "5", "0 or -1: all"),
    both(Honoured, "min_p", "0.1", ""),
    both(Honoured, "repetition_penalty", "1.1", "over prompt and output"),
    both(Honoured, "frequency_penalty", "0.5", ""),
    both(Honoured, "presence_penalty", "0.5", ""),
    both(Honoured, "logit_bias", "{\"5\": 1}", "by token id, up to 1,024"),
    both(
        Honoured,
        "allowed_token_ids",
        "[5]",
        "vLLM's: 1 to 8,192 ids; only these are generated, of the stop tokens, too; not with a grammar",
    ),
    both(
        Honoured,
        "bad_words",
        "[\"x\"]",
        "vLLM's: up to 256 words, together 8,192 bytes; the tokens of a word, as they are with and without a space before it, are not generated in a row; not with a grammar",
    ),
    both(
        Honoured,
        "max_tokens",
        "5",
        "completions: 16 by default; chat: the rest of the context window, as -1 everywhere",
    ),
    both(Honoured, "max_completion_tokens", "5", "the newer name of `max_tokens`"),
    both(Honoured, "min_tokens", "1", "vLLM's"),
    both(Honoured, "n", "2", "up to 128"),
    both(Honoured, "best_of", "1", "must equal `n`"),
    both(Honoured, "seed", "7", "the response contains the seed that was used; -1: drawn by the router"),
    both(Honoured, "stop", "[\"x\"]", "up to 64 strings of up to 512 bytes, together 8,192"),
    both(Honoured, "stop_token_ids", "[5]", "vLLM's: up to 128"),
    both(
        Honoured,
        "include_stop_str_in_output",
        "true",
        "vLLM's: the text keeps what ended it: the stop string, or a stop token, unless it is a special one",
    ),
    both(
        Honoured,
        "skip_special_tokens",
        "false",
        "vLLM's: false: the text of the output has special tokens, as the vocabulary spells them, and stop strings may match them; a stop token only with `include_stop_str_in_output`",
    ),
    both(Honoured, "ignore_eos", "true", "vLLM's"),
    Field {
        name: "logprobs",
        chat: Honoured,
        completions: Honoured,
        sample: "null",
        note: "chat: true or false; completions: number of top tokens, up to 20",
    },
    chat("top_logprobs", "0", "with `logprobs`, up to 20"),
    both(
        Honoured,
        "prompt_logprobs",
        "1",
        "vLLM's: number of top tokens, up to 20, per token of the prompt: beside `choices` in chat, in every choice in completions; `rank` is null for a token that is not among them; not with `stream`",
    ),
    completions("echo", "true", "with `logprobs`, also reports the prompt's log probabilities"),
    chat(
        "chat_template_kwargs",
        "{\"x\": 1}",
        "vLLM's; the router's own variables are refused by name: `messages`, `tools`, `documents`, \
         `add_generation_prompt`, `continue_final_message`, `bos_token`, `eos_token`",
    ),
    chat(
        "add_generation_prompt",
        "false",
        "vLLM's: false: the prompt does not begin the assistant's next message",
    ),
    chat(
        "continue_final_message",
        "true",
        "vLLM's: the answer continues the last message; not with `add_generation_prompt: true`",
    ),
    completions(
        "add_special_tokens",
        "true",
        "vLLM's: false: the tokenizer adds no special tokens (BOS) to texts, because they contain them",
    ),
    both(
        Honoured,
        "truncate_prompt_tokens",
        "5",
        "vLLM's: only this many tokens at the end of a prompt are kept; -1: as many as fit",
    ),
    both(
        Honoured,
        "cache_salt",
        "\"x\"",
        "vLLM's: requests with different salts share no cached prefix; up to 1,024 bytes",
    ),
    both(
        Honoured,
        "store",
        "false",
        "false: keeps the request out of the request log (`--request-log`), if enabled",
    ),
    both(Honoured, "priority", "1", "vLLM's: 0 (most urgent) to 255"),
    both(
        Honoured,
        "task_type",
        "\"code\"",
        "ours: the task type of the request, up to 64 characters; also the header `x-task-type`",
    ),
    both(
        Honoured,
        "speculation",
        "{\"enabled\": false}",
        "ours: `enabled`, `num_draft_tokens`, `num_tree_tokens` (tokens of a draft that is a tree), `acceptance` (coupled, rejection, typical)",
    ),
    both(Honoured, "disable_spec_decode", "true", "same as `speculation.enabled: false`"),
    both(Honoured, "disable_speculative_decoding", "true", "the same"),
    both(
        Honoured,
        "timings_per_token",
        "true",
        "llama.cpp's: `timings` beside the usage, in streams in the last chunk",
    ),
    both(
        Honoured,
        "return_token_ids",
        "true",
        "vLLM's: `token_ids` in every choice, and `prompt_token_ids`: in chat beside `choices`, in completions in every choice, in streams with a choice's first chunk",
    ),
    chat(
        "tools",
        "[{\"type\": \"function\", \"function\": {\"name\": \"f\"}}]",
        "up to 128, functions only; the chat template determines the call format: Hermes, Llama 3 or Mistral",
    ),
    both(
        Honoured,
        "tool_choice",
        "\"none\"",
        "`none`, `auto`, `required`, a tool or `allowed_tools` (only these may be called, the prompt describes all); a required call constrains the output with a grammar, to at most 16 calls",
    ),
    both(Honoured, "parallel_tool_calls", "true", "false: at most one call"),
    chat(
        "functions",
        "[{\"name\": \"f\"}]",
        "the older form of `tools`; the answer has `function_call` and the finish reason `function_call`",
    ),
    chat("function_call", "{\"name\": \"f\"}", "`none`, `auto` or a function, with `functions`"),
    both(
        Honoured,
        "response_format",
        "{\"type\": \"json_object\"}",
        "`text`, `json_object`, `json_schema`; llama.cpp's `schema` beside either JSON type; excludes `ignore_eos` and `min_tokens`, as the next five do",
    ),
    both(
        Honoured,
        "structured_outputs",
        "{\"choice\": [\"a\"]}",
        "vLLM's: one of `json`, `json_object`, `regex`, `choice`, `grammar` (Lark)",
    ),
    both(Honoured, "guided_json", "{\"type\": \"object\"}", "vLLM's older name"),
    both(Honoured, "guided_regex", "\"a\"", "the same"),
    both(Honoured, "guided_choice", "[\"a\"]", "the same"),
    both(Honoured, "guided_grammar", "\"start: \\\"a\\\"\"", "the same"),
    both(Refused, "suffix", "\"x\"", ""),
    both(Refused, "modalities", "[\"audio\"]", "`[\"text\"]` is accepted"),
    both(Refused, "audio", "{\"voice\": \"x\"}", ""),
    chat(
        "prediction",
        "{\"type\": \"content\", \"content\": \"x\"}",
        "text that the output is expected to repeat in part; used as a draft; not with `n` above 1, `tools` or `logprobs`",
    ),
    chat(
        "reasoning_effort",
        "\"high\"",
        "passed to the chat template as its variable of this name, as by vLLM",
    ),
    both(Refused, "verbosity", "\"high\"", "`medium`, the default, is accepted"),
    both(Refused, "web_search_options", "{\"x\": 1}", ""),
    both(Refused, "moderation", "{\"model\": \"x\"}", ""),
    both(Refused, "include_reasoning", "false", "vLLM's"),
    both(Refused, "chat_template", "\"x\"", "vLLM's"),
    both(Refused, "documents", "[{\"text\": \"x\"}]", "vLLM's"),
    both(Refused, "use_beam_search", "true", "vLLM's"),
    both(Refused, "length_penalty", "2", "vLLM's, of beam search"),
    both(Refused, "logits_processors", "[\"x\"]", "vLLM's"),
    both(Refused, "return_tokens_as_token_ids", "true", "vLLM's"),
    both(Refused, "mm_processor_kwargs", "{\"x\": 1}", "vLLM's"),
    both(Refused, "kv_transfer_params", "{\"x\": 1}", "vLLM's"),
    both(Ignored, "user", "\"x\"", ""),
    both(Ignored, "metadata", "{\"x\": \"y\"}", ""),
    both(Ignored, "service_tier", "\"auto\"", ""),
    both(Ignored, "safety_identifier", "\"x\"", ""),
    both(Ignored, "prompt_cache_key", "\"x\"", "prefixes are matched by content"),
    both(Ignored, "prompt_cache_retention", "\"24h\"", ""),
    both(Ignored, "prompt_cache_options", "{\"mode\": \"explicit\"}", ""),
    both(
        Ignored,
        "spaces_between_special_tokens",
        "true",
        "vLLM's: byte-level and SentencePiece tokenizers put no spaces there",
    ),
    both(Ignored, "request_id", "\"x\"", "vLLM's: send the header `x-request-id`"),
];

/// The table of docs/api.md.
pub fn table() -> String {
    let mut table = String::from("| field | chat | completions | |\n|---|---|---|---|\n");
    for Field { name, chat, completions, note, .. } in FIELDS {
        let (chat, completions) = (chat.as_str(), completions.as_str());
        writeln!(table, "| `{name}` | {chat} | {completions} | {note} |")
            .expect("writing to a string cannot fail");
    }
    table
}
