//! The page docs/configuration.md, generated from the flags and defaults of the three servers.

use service::config::reference;

/// Text before the tables.
const BEGINNING: &str = "# Configuration

Every setting of the three servers, with its default. It comes from the TOML file that `--config` names, then from the environment, then from a flag; later ones win. A key of the file is
the flag's name with underscores. Its variable is the key in capitals behind `OUTRIDER_`: `--max-draft-tokens 4` is `max_draft_tokens = 4` in the file and `OUTRIDER_MAX_DRAFT_TOKENS=4`
in the environment. `[models.NAME]` of a router's file, and what stands in a file of API keys, are explained by `outrider-router --help`. All faults are printed together, with exit code 64,
before a port is bound. Traces are set up by the standard `OTEL_*` variables ([which](../service/src/telemetry/otlp.rs)).

This page is written by `cargo run --package tests --example configuration -- docs/configuration.md`; a test compares it with the code.

";

/// The page.
pub fn page() -> String {
    let servers = [
        reference::<router::config::RawRouter, router::config::Flags>(),
        reference::<target_worker::config::RawTarget, target_worker::config::Flags>(),
        reference::<draft_worker::config::RawDraft, draft_worker::config::Flags>(),
    ];
    format!("{BEGINNING}{}", servers.join("\n"))
}
