//! Fields that other servers and endpoints have by another name. They are refused like all unknown fields,
//! with the name to send: their values may mean something else here.

/// A field of another server or endpoint, and the fields here that stand for it. The first one that the
/// endpoint has is named.
const FOREIGN_FIELDS: &[(&str, &[&str])] = &[
    // A variable of chat templates, which some servers take at the top level.
    ("enable_thinking", &["chat_template_kwargs.enable_thinking (chat only)"]),
    // TGI's.
    ("max_new_tokens", &["max_tokens", "max_output_tokens"]),
    ("top_n_tokens", &["logprobs"]),
    // llama.cpp's.
    ("n_predict", &["max_tokens", "max_output_tokens"]),
    ("n_probs", &["logprobs"]),
    // llama.cpp's and Ollama's.
    ("repeat_penalty", &["repetition_penalty"]),
    // Ollama's.
    ("num_predict", &["max_tokens", "max_output_tokens"]),
    // Mistral's.
    ("random_seed", &["seed"]),
    // Those of the other endpoints of this server.
    ("max_tokens", &["max_output_tokens"]),
    ("max_completion_tokens", &["max_output_tokens", "max_tokens"]),
    ("max_output_tokens", &["max_tokens"]),
    ("stop", &["stop_sequences"]),
    ("stop_sequences", &["stop"]),
    ("reasoning", &["reasoning_effort"]),
    ("reasoning_effort", &["reasoning.effort"]),
    ("response_format", &["text.format", "output_config.format"]),
];

/// Returns the field to send in place of an unknown one. `is_known` tells which fields the endpoint has.
pub(super) fn own_name(unknown: &str, is_known: impl Fn(&str) -> bool) -> Option<&'static str> {
    let (_, names) = FOREIGN_FIELDS.iter().find(|(name, _)| *name == unknown)?;
    names.iter().copied().find(|path| path.split('.').next().is_some_and(&is_known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_fields_of_the_endpoint_are_named() {
        let chat = |field: &str| matches!(field, "max_tokens" | "chat_template_kwargs");
        let responses = |field: &str| field == "max_output_tokens";
        for (unknown, in_chat, in_responses) in [
            ("n_predict", Some("max_tokens"), Some("max_output_tokens")),
            ("max_completion_tokens", Some("max_tokens"), Some("max_output_tokens")),
            ("enable_thinking", Some("chat_template_kwargs.enable_thinking (chat only)"), None),
            ("random_seed", None, None),
            ("max_token", None, None),
        ] {
            assert_eq!(own_name(unknown, chat), in_chat, "{unknown}");
            assert_eq!(own_name(unknown, responses), in_responses, "{unknown}");
        }
    }
}
