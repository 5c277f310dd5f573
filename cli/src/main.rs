//! The `outrider` command: parses the arguments, runs the subcommand and returns its exit code.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use outrider_cli::{EXIT_USAGE, bench, check_pair, completions, distill, engine_bench, plan, up};

const AFTER_HELP: &str = "\
First steps:
  outrider up       runs the bundled pair and prints a curl command to paste
  outrider bench    in a second terminal: measures what drafting gains there
  `outrider COMMAND --help` explains a command's output and has examples.

Exit codes:
  0    success, also if a signal stopped `up`
  1    the command failed, a process of `up` ended, or a pair of `check-pair` cannot be served
  3    `bench --fail-unless-ship`: a verdict is not `ship`
  4    `bench`: over 2% of an arm's requests failed at one load; the report is complete
  64   the command line is invalid, or `up` cannot serve what it names
  130  interrupted by Ctrl-C; `bench` reports what it has measured";

/// Speculative decoding with separate draft and target workers.
#[derive(Parser)]
#[command(name = "outrider", version = service::release::version(), after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a router and its workers on this machine until Ctrl-C.
    Up(Box<up::UpArgs>),
    /// Load any OpenAI endpoint, with speculation and without, and judge whether to ship it.
    Bench(Box<bench::BenchArgs>),
    /// Measure the cost of forwards on this machine, relative to its read bandwidth.
    EngineBench(engine_bench::EngineBenchArgs),
    /// Check what a draft is worth to a target on this machine, without serving the pair.
    CheckPair(Box<check_pair::CheckPairArgs>),
    /// Retrain a draft on a router's request log, and compare it with the one in use.
    Distill(Box<distill::DistillArgs>),
    /// Compute what a pair of models needs and yields on given GPUs, from config.json alone.
    Plan(Box<plan::PlanArgs>),
    /// Print a script that completes this tool's subcommands and flags in a shell.
    Completions(completions::CompletionsArgs),
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Ignore a closed stdout or stderr.
            drop(error.print());
            return ExitCode::from(if error.use_stderr() { EXIT_USAGE } else { 0 });
        }
    };
    match cli.command {
        Command::Up(args) => up::main(*args).await,
        Command::Bench(args) => bench::main(*args).await,
        Command::EngineBench(args) => engine_bench::main(&args),
        Command::CheckPair(args) => check_pair::main(*args).await,
        Command::Distill(args) => distill::main(&args),
        Command::Plan(args) => plan::main(&args),
        Command::Completions(args) => completions::main(&args, Cli::command()),
    }
}
