//! The `outrider` command: parses the arguments, runs the subcommand, turns its end into an exit code.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use outrider_cli::{bench, check_pair, distill, engine_bench, plan, up};

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
    /// Check what a draft is worth to a target, on this machine, without serving them.
    CheckPair(Box<check_pair::CheckPairArgs>),
    /// Retrain a draft on a router's log of requests, and compare it with the one that serves.
    Distill(Box<distill::DistillArgs>),
    /// Work out what a pair of models needs and gives on some GPUs, from config.json alone.
    Plan(Box<plan::PlanArgs>),
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Up(args) => up::main(args).await,
        Command::Bench(args) => bench::main(*args).await,
        Command::EngineBench(args) => engine_bench::main(&args),
        Command::CheckPair(args) => check_pair::main(&args),
        Command::Distill(args) => distill::main(&args),
        Command::Plan(args) => plan::main(&args),
    }
}
