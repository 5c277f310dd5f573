//! Writes docs/metrics.md: `cargo run --package tests --example metrics_reference -- docs/metrics.md`.

use anyhow::Context as _;

fn main() -> anyhow::Result<()> {
    let path = std::env::args_os().nth(1).context("name the page: docs/metrics.md")?;
    std::fs::write(&path, tests::metrics_reference::page()).with_context(|| format!("{}", path.display()))
}
