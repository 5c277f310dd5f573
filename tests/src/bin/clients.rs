//! `make clients`: runs popular client programs against a running cluster, each installed from its registry
//! in a separate environment, and prints a table. Arguments select clients by name.

use std::io::Write as _;
use std::time::Instant;

use clap::Parser;
use clap::builder::PossibleValuesParser;
use tests::clients::{CLIENTS, LARGE_CLIENTS, count_passed, run};
use tests::processes;

/// Runs client programs against a cluster of the bundled pair, each installed in a separate environment
#[derive(Debug, Parser)]
#[command(name = "clients")]
struct Args {
    /// Clients to run [default: all but guidellm and vllm, whose environments take 6 GB and more]
    #[arg(value_name = "CLIENT", value_parser = names())]
    selected: Vec<String>,
}

fn names() -> PossibleValuesParser {
    PossibleValuesParser::new(CLIENTS.into_iter().chain(LARGE_CLIENTS))
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let Args { selected } = Args::parse();
    let is_selected = |name: &str| match selected.as_slice() {
        [] => CLIENTS.contains(&name),
        selected => selected.iter().any(|selected| selected == name),
    };
    let cluster = processes::start(|_| ()).await?;
    let mut failures = 0;
    let mut out = std::io::stdout();
    writeln!(out, "| client | checks | seconds, installation included | |\n|---|---|---|---|")?;
    for name in CLIENTS.into_iter().chain(LARGE_CLIENTS).filter(|name| is_selected(name)) {
        let (url, start) = (cluster.http_url(), Instant::now());
        let output = tokio::task::spawn_blocking(move || run(name, &url)).await?;
        let seconds = start.elapsed().as_secs();
        let passed = output.and_then(|output| {
            let summary =
                String::from_utf8_lossy(&output.stdout).lines().last().unwrap_or_default().to_owned();
            Ok((count_passed(&output, 1)?, summary))
        });
        match passed {
            Ok((passed, summary)) => writeln!(out, "| {name} | {passed} | {seconds} | {summary} |")?,
            Err(error) => {
                failures += 1;
                writeln!(out, "| {name} | failed | {seconds} | |\n\n{error:#}\n")?;
            }
        }
    }
    cluster.stop().await;
    anyhow::ensure!(failures == 0, "{failures} of the clients do not work");
    Ok(())
}
