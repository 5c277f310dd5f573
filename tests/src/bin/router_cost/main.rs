//! What the router costs, with workers that only keep time: CPU for each event and each further token ([`cost`]), latency that it adds to a round
//! ([`latency`]), memory and waits at scale ([`scale`]), what traces add ([`traces`]). Prints Markdown. `make measure-router`.
//!
//! It measures the router's process and nothing of the workers'; what it prints is of the machine that it ran on.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "printing is the job")]

mod cost;
mod echo;
mod helper;
mod latency;
mod relay;
mod scale;
mod traces;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use outrider_cli::cluster::{Binaries, Cluster};

/// Measures what the router costs.
#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    what: What,
    /// The router's program, where it is not the one beside this program
    #[arg(long, global = true)]
    router: Option<PathBuf>,
}

#[derive(Subcommand)]
enum What {
    /// CPU in the router's process for each server-sent event, and for each further token in it
    Cpu(cost::Args),
    /// What a round takes beyond its steps, beside two bare round trips of the same frames
    Latency(latency::Args),
    /// One router, many workers: memory over minutes, and the longest waits by priority
    Scale(scale::Args),
    /// CPU for each token with no traces, with 1% and with all requests traced, in turns
    Traces(traces::Args),
    /// A worker that answers, and does nothing else
    #[command(hide = true)]
    Echo {
        /// How long it takes for a frame
        #[arg(long)]
        delay_us: u64,
    },
    /// What cannot be left out of a router
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

/// Where the only worker of a role shows its metrics.
fn worker_url(cluster: &Cluster, role: &str) -> anyhow::Result<String> {
    let names = cluster.names();
    let name = names.iter().find(|name| name.starts_with(role));
    Ok(cluster.admin_url(name.with_context(|| format!("there is no {role} worker"))?)?)
}
