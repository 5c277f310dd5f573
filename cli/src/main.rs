//! The `outrider` command: parses the arguments, runs the subcommand, turns its end into an exit code.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use outrider_cli::{bench, engine_bench, up};

/// Speculative decoding with draft and target workers apart.
#[derive(Parser)]
#[command(name = "outrider", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a router and its workers on this machine until Ctrl-C.
    Up(up::UpArgs),
    /// Put any OpenAI endpoint under load, with speculation and without, and say whether to ship it.
    Bench(Box<bench::BenchArgs>),
    /// Measure what forwards cost here, beside the machine's read bandwidth.
    EngineBench(engine_bench::BenchArgs),
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Up(args) => up::main(args).await,
        Command::Bench(args) => bench::main(*args).await,
        Command::EngineBench(args) => engine_bench::main(&args),
    }
}
