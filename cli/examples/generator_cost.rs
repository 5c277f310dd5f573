//! Measures the cost of the load generator: CPU time per server-sent event with many concurrent streams.
//!
//! `cargo run -p outrider --example generator_cost -- [STREAMS] [EVENTS] [GAP_MS]` starts a scripted server
//! as a separate process, reads STREAMS (256) concurrent responses of EVENTS (100) events at GAP_MS (50), and
//! prints the CPU time that this took. With a fourth argument `serve` it runs only the server: it prints its
//! URL and exits when its standard input closes.

#![forbid(unsafe_code)]

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use outrider_cli::load::cpu::{CpuMeter, GeneratorCost};
use outrider_cli::load::prompts::Content;
use outrider_cli::load::scripted::{Script, ScriptedServer};
use outrider_cli::load::{Client, Endpoint, Prompt, Request, Sample, Schedule, Settings};

/// The server process, which must not outlive this one.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

#[tokio::main(flavor = "current_thread")]
#[expect(clippy::print_stdout, reason = "the figures are the program's output")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let numbers: Vec<u64> = std::env::args().skip(1).filter_map(|word| word.parse().ok()).collect();
    let number = |i: usize, default| numbers.get(i).copied().unwrap_or(default);
    let (streams, events, gap) = (number(0, 256), number(1, 100), Duration::from_millis(number(2, 50)));
    if streams == 0 || events == 0 {
        return Err("STREAMS and EVENTS are 1 or more".into());
    }
    if std::env::args().any(|word| word == "serve") {
        // A setting that is a known 10% slower, for `outrider bench --arm a:prompt=slow --arm b`.
        let gap_of = move |prompt: &str| if prompt == "slow" { gap * 11 / 10 } else { gap };
        let script = move |prompt: &str| Script::tokens(&vec![gap_of(prompt); events as usize]);
        let server = ScriptedServer::start(script)?;
        println!("{}", server.url());
        std::io::stdin().lines().for_each(drop);
        return Ok(());
    }
    let arguments =
        [streams.to_string(), events.to_string(), gap.as_millis().to_string(), "serve".to_owned()];
    let program = std::env::current_exe()?;
    let mut child =
        Command::new(program).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let output = child.stdout.take().ok_or("the server has no output")?;
    let _server = Server(child);
    let mut url = String::new();
    BufReader::new(output).read_line(&mut url)?;

    let endpoint = Endpoint::connect(url.trim(), Default::default()).await?;
    let prompt = Prompt { task: "any".to_owned(), content: Content::Prompt("any".to_owned()) };
    let requests: Vec<Request> =
        (0..streams).map(|_| Settings::default().request(&endpoint, &prompt)).collect();
    let client = Client::new(endpoint);
    let meter = CpuMeter::start();
    let run = client.drive(&requests, &Schedule::Closed { concurrency: streams as usize }, |_| ()).await;
    let spent = meter.read();
    let completed = run.samples(&requests).iter().filter(|sample| Sample::is_completed(sample)).count();
    let mut cost = GeneratorCost::default();
    cost.add(&run, spent);
    let report = cost.report();
    println!(
        "{streams} streams at once, {completed} completed, {} events in {:.2} s ({:.0} events/s), {} reads",
        report.events,
        run.duration().as_secs_f64(),
        report.events as f64 / run.duration().as_secs_f64(),
        report.reads
    );
    println!(
        "generator: {:.1} us of CPU per event, {:.1}% of this machine's {} cores; bytes were read {:.2} ms after arrival at P50, {:.2} ms at P99",
        report.cpu_us_per_event,
        report.share_of_machine * 100.0,
        report.cores,
        report.read_late_ms_p50,
        report.read_late_ms_p99
    );
    Ok(())
}
