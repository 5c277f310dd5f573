//! Measures the cost of the router with workers that only reproduce step times: CPU per event and per
//! additional token ([`cost`]), latency added to a round ([`latency`]), memory and waits at scale
//! ([`scale`]), the cost of traces ([`traces`]). Prints Markdown. `make measure-router`.
//!
//! It measures only the router's process, not the workers; the results apply to the machine on which it ran.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "printing is the job")]

mod cost;
mod echo;
mod helper;
mod latency;
mod load;
mod relay;
mod scale;
mod traces;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use outrider_cli::cluster::{Binaries, ProcessCluster};

/// Measures the cost of the router.
#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    what: What,
    /// The router binary, if not the one next to this program
    #[arg(long, global = true)]
    router: Option<PathBuf>,
}

#[derive(Subcommand)]
enum What {
    /// CPU of the router's process per server-sent event, and per additional token in an event
    Cpu(cost::Args),
    /// Time of a round beyond its steps, compared with two bare round trips of the same frames
    Latency(latency::Args),
    /// One router, many workers: memory over minutes, and the longest waits by priority
    Scale(scale::Args),
    /// CPU per token without traces, with 1% and with all requests traced, in turns
    Traces(traces::Args),
    /// A worker that only answers
    #[command(hide = true)]
    Echo {
        /// Processing time per frame, microseconds
        #[arg(long)]
        delay_us: u64,
    },
    /// The unavoidable work of a router
    #[command(hide = true)]
    Relay(relay::Load),
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let Args { what, router } = Args::parse();
    let mut binaries = Binaries::beside_this_executable()?;
    if let Some(router) = router {
        binaries.router = router;
    }
    match what {
        What::Cpu(args) => cost::run(&args, &binaries).await,
        What::Latency(args) => latency::run(&args, &binaries).await,
        What::Scale(args) => scale::run(&args, &binaries).await,
        What::Traces(args) => traces::run(&args, &binaries).await,
        What::Echo { delay_us } => echo::serve(Duration::from_micros(delay_us)).await,
        What::Relay(load) => relay::serve(load).await,
    }
}

/// Metrics URL of the only worker of a role.
fn worker_url(cluster: &ProcessCluster, role: &str) -> anyhow::Result<String> {
    let names = cluster.names();
    let name = names.iter().find(|name| name.starts_with(role));
    Ok(cluster.admin_url(name.with_context(|| format!("there is no {role} worker"))?)?)
}
