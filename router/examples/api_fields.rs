//! Writes the table of docs/api.md between its markers:
//! `cargo run -p outrider-router --example api_fields -- docs/api.md`.

use std::path::PathBuf;

use anyhow::Context as _;
use router::api::openai::fields::table;

const BEGIN: &str = "<!-- fields begin -->\n";
const END: &str = "<!-- fields end -->";

fn main() -> anyhow::Result<()> {
    let path = std::env::args_os().nth(1).context("usage: api_fields docs/api.md")?;
    let path = PathBuf::from(path);
    let page = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let (before, rest) =
        page.split_once(BEGIN).context("the page has no marker for the start of the table")?;
    let (_, after) = rest.split_once(END).context("the page has no marker for the end of the table")?;
    let page = format!("{before}{BEGIN}{}{END}{after}", table());
    std::fs::write(&path, page).with_context(|| path.display().to_string())
}
