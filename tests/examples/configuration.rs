//! Writes docs/configuration.md: `cargo run --package tests --example configuration -- docs/configuration.md`.

use anyhow::Context as _;

fn main() -> anyhow::Result<()> {
    let path = std::env::args_os().nth(1).context("name the page: docs/configuration.md")?;
    std::fs::write(&path, tests::configuration::page()).with_context(|| format!("{}", path.display()))
}
