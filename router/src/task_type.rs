//! Detects the task type of a prompt if neither the request nor its API key names one, by simple rules over
//! the first and last lines of the prompt. A wrong type puts a sequence into a lane with a different
//! acceptance rate; it changes no token. So the rules match common phrasings, not particular prompts;
//! `docs/measurements/` reports the error rate.
//!
//! Rules are tried in the order of [`RULES`], narrow before wide; the first match wins, and without a match
//! the type is [`FALLBACK`].

/// Task type of prompts that match no rule.
const FALLBACK: &str = "chat";

/// Number of characters examined at the beginning and end of a prompt, where instructions usually are.
const HEAD_CHARS: usize = 1_200;
const TAIL_CHARS: usize = 300;

/// A task type and its predicate.
type Rule = (&'static str, fn(&Prompt<'_>) -> bool);

/// All rules, in order.
const RULES: [Rule; 10] = [
    ("translation", is_translation),
    ("summarization", is_summarization),
    ("sql", is_sql),
    ("api_call", is_api_call),
    ("shell", is_shell),
    ("code", is_code),
    ("support", is_support),
    ("creative", is_creative),
    ("math", is_math),
    ("qa", is_qa),
];

/// The parts of a prompt used by the rules, in lower case.
struct Prompt<'a> {
    /// Beginning and end of the prompt.
    text: &'a str,
    first_line: &'a str,
    last_line: &'a str,
    /// The first and the last line, where instructions usually are.
    instructions: &'a str,
}

/// Returns the task type of a prompt.
pub fn classify(text: &str) -> &'static str {
    let text = strip_template_markers(&head_and_tail(text.trim())).to_lowercase();
    let text = text.trim();
    let first_line = text.lines().next().unwrap_or_default();
    let last_line = text.lines().next_back().unwrap_or_default();
    let instructions = format!("{first_line}\n{last_line}");
    let prompt = Prompt { text, first_line, last_line, instructions: &instructions };
    RULES.iter().find(|(_, predicate)| predicate(&prompt)).map_or(FALLBACK, |(task_type, _)| task_type)
}

/// Removes the markers that chat templates write around messages, such as `<|user|>`: if only ids were sent,
/// they are the only framing in the text.
fn strip_template_markers(text: &str) -> String {
    let mut parts = text.split("<|");
    let mut kept = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        kept.push_str(part.split_once("|>").map_or(part, |(_, after)| after));
    }
    kept
}

fn head_and_tail(text: &str) -> String {
    let tail_at = text.char_indices().rev().nth(TAIL_CHARS - 1).map_or(0, |(at, _)| at);
    match text.char_indices().nth(HEAD_CHARS) {
        Some((head_end, _)) if head_end < tail_at => format!("{}\n{}", &text[..head_end], &text[tail_at..]),
        _ => text.to_owned(),
    }
}

fn has_any(text: &str, phrases: &[&str]) -> bool {
    phrases.iter().any(|phrase| text.contains(phrase))
}

/// "translate", with a language or direction; not into SQL.
fn is_translation(prompt: &Prompt<'_>) -> bool {
    if prompt.instructions.contains("sql") {
        return false;
    }
    prompt.instructions.contains("translat")
        && has_any(prompt.instructions, &[" to ", " into ", " from ", " in "])
}

fn is_summarization(prompt: &Prompt<'_>) -> bool {
    let phrases = [
        "summar",
        "tl;dr",
        "tldr",
        "key points",
        "main points",
        "in one sentence",
        "in a nutshell",
        "shorten",
    ];
    has_any(prompt.instructions, &phrases) || has_any(prompt.first_line, &["transcript:", "minutes of"])
}

/// The word "sql", a statement, or a commented table schema.
fn is_sql(prompt: &Prompt<'_>) -> bool {
    let words = prompt.text.split(|c: char| !c.is_alphanumeric());
    let is_statement =
        (prompt.text.contains("select ") && prompt.text.contains(" from ") && prompt.text.contains(';'))
            || has_any(prompt.text, &["create table", "insert into"]);
    let is_commented_schema = prompt.first_line.starts_with("--") && prompt.first_line.contains('(');
    words.into_iter().any(|word| word == "sql") || is_statement || is_commented_schema
}

/// Lists tools, or requests a call.
fn is_api_call(prompt: &Prompt<'_>) -> bool {
    let phrases =
        ["api call", "function call", "tool call", "which api", "what api", "an api ", "call the api"];
    has_any(prompt.instructions, &phrases)
        || has_any(prompt.first_line, &["functions:", "tools:", "available functions"])
}

/// Names a shell, or ends in a shell prompt.
fn is_shell(prompt: &Prompt<'_>) -> bool {
    let phrases = [
        "shell command",
        "bash",
        "command line",
        "command-line",
        "terminal command",
        "cheat sheet",
        "example commands",
        "one-liner",
    ];
    has_any(prompt.instructions, &phrases)
        || prompt.first_line.contains("(a shell")
        || matches!(prompt.last_line.trim(), "$" | "#" | "%")
}

/// Names a language and something to write in it, or contains code.
fn is_code(prompt: &Prompt<'_>) -> bool {
    let phrases = [
        "write a function",
        "function to ",
        "function that",
        "this function",
        "implement ",
        "refactor",
        "unit test",
        "debug this",
        "fix this code",
        "write a program",
        "write a class",
        "write a script",
    ];
    let languages =
        ["python", "rust", "javascript", "typescript", "java ", "c++", "golang", "haskell", "kotlin"];
    let nouns = ["function", "class", "method", "code", "program", "script", "module"];
    let is_requested = has_any(prompt.first_line, &languages) && has_any(prompt.first_line, &nouns);
    let code_markers = [
        "```",
        "\ndef ",
        "\nclass ",
        "\nfn ",
        "#include",
        "\nimport ",
        "public static",
        "):\n",
        "() {",
        "\nassert ",
    ];
    has_any(prompt.instructions, &phrases) || is_requested || has_any(prompt.text, &code_markers)
}

/// A customer's message, or a reply to one.
fn is_support(prompt: &Prompt<'_>) -> bool {
    let roles = [
        "customer service",
        "customer support",
        "support agent",
        "reply to the customer",
        "help desk",
        "helpdesk",
    ];
    has_any(prompt.instructions, &roles) || has_any(prompt.text, &["customer:", "\nagent:"])
}

/// Asks for a literary form or style.
fn is_creative(prompt: &Prompt<'_>) -> bool {
    let genres = [
        "story",
        "poem",
        "scene",
        "novel",
        "lyrics",
        "haiku",
        "sonnet",
        "fairy tale",
        "in the style of",
        "same voice",
        "screenplay",
        "dialogue between",
        "a character ",
    ];
    has_any(prompt.instructions, &genres)
}

/// An equation, "step by step", or a question about quantities with numbers.
fn is_math(prompt: &Prompt<'_>) -> bool {
    let numbers =
        prompt.text.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty()).count();
    let phrases = [
        "how many",
        "how much",
        "calculate",
        "compute",
        "solve",
        "what is the total",
        "what is its",
        "percent",
        "how long",
        "how far",
        "how old",
        "what is the area",
        "what is the sum",
        "evaluate",
        "simplify",
    ];
    let asks_for_steps =
        prompt.instructions.contains("step by step") || prompt.instructions.contains("prove that");
    asks_for_steps
        || (numbers >= 2 && has_any(prompt.text, &phrases) && !prompt.first_line.contains("passage"))
}

/// A question about a given text or the world; questions to "you" are chat.
fn is_qa(prompt: &Prompt<'_>) -> bool {
    let framing = ["passage", "context:", "answer the question", "question:", "category:", "trivia"];
    let phrases = ["who ", "what ", "when ", "where ", "which ", "why ", "how ", "in which ", "name the "];
    let is_question = prompt.last_line.ends_with('?') && prompt.text.lines().count() == 1;
    let is_chat = has_any(prompt.text, &["user:", "assistant:"])
        || prompt.last_line.split(|c: char| !c.is_alphanumeric()).any(|word| matches!(word, "you" | "your"));
    !is_chat
        && (has_any(prompt.instructions, &framing) || (is_question && has_any(prompt.last_line, &phrases)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_phrasings_are_classified() {
        for (text, expected) in [
            ("Translate into German: good morning", "translation"),
            ("Please summarise what follows.\n\nLong text.", "summarization"),
            ("A very long report.\n\nTL;DR:", "summarization"),
            ("Translate this question to SQL: how many users are there?", "sql"),
            ("Write an SQL query that counts users by country", "sql"),
            ("-- users(id, name)\n-- how many are there?", "sql"),
            ("Functions:\n- GetWeather(city)\nUser: is it cold in Oslo?\nFunction call:", "api_call"),
            ("Write a bash one-liner that counts files", "shell"),
            ("list files by size\n$", "shell"),
            ("Write a Rust function that reverses a list", "code"),
            ("Fix this:\n```\nlet x = 1\n```", "code"),
            ("Customer: my parcel is late\nAgent:", "support"),
            ("Write a short story about a lighthouse", "creative"),
            ("Tom has 3 apples and buys 4. How many has he?", "math"),
            ("Who wrote Hamlet?", "qa"),
            ("Passage: The wall fell in 1989.\nWhen did it fall?\nAnswer the question.", "qa"),
            ("<|user|>\nTranslate to French: good morning<|end|>\n<|assistant|>\n", "translation"),
            ("How are you?", "chat"),
            ("Tell me about your day", "chat"),
            ("", "chat"),
        ] {
            assert_eq!(classify(text), expected, "{text:?}");
        }
    }

    #[test]
    fn only_the_ends_of_a_long_prompt_are_read() {
        let filler = "ä ".repeat(1_000_000);
        assert_eq!(classify(&format!("{filler}translate this to sql{filler}")), "chat");
        assert_eq!(classify(&format!("{filler}\nTL;DR:")), "summarization");
        assert_eq!(classify(&format!("Translate to French:\n{filler}")), "translation");
    }
}
