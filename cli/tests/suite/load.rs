//! The load generator against a scripted server: every figure must be right within 2%, judged by the server's
//! log of the time range in which it sent each event; and every kind of failure must be counted as that kind.
//!
//! Figures are not compared with the script's delays: a busy machine may stretch them, and the log records by
//! how much. If the server was off the CPU while it sent an event, the two times of the log bound the figure.

use std::time::{Duration, Instant};

use outrider_cli::load::prompts::Content;
use outrider_cli::load::sample::RequestOutcome;
use outrider_cli::load::scripted::{LogEntry, Script, ScriptedServer, SentEvent, Step};
use outrider_cli::load::{
    Client, Endpoint, FigureOptions, Figures, Prompt, Request, Run, Sample, Schedule, Settings, Slo,
};

/// Relative to the log.
const TOLERANCE: f64 = 0.02;

const fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// The shortest wait between two tokens.
const LEAST_WAIT: Duration = ms(50);

/// Waits of at least [`LEAST_WAIT`] that differ from request to request.
fn waits(request: u64) -> Vec<Duration> {
    let first = 60 + request * 37 % 240;
    let tokens = 3 + request % 4;
    (0..tokens)
        .map(|i| if i == 0 { ms(first) } else { LEAST_WAIT + ms((request * 13 + i * 29) % 50) })
        .collect()
}

/// The prompts `0`, `1`, ...
fn requests(endpoint: &Endpoint, count: usize) -> Vec<Request> {
    let prompt = |i: usize| Prompt { task: "chat".to_owned(), content: Content::Prompt(i.to_string()) };
    (0..count).map(|i| Settings::default().request(endpoint, &prompt(i))).collect()
}

async fn client(server: &ScriptedServer) -> Client {
    Client::new(Endpoint::connect(&server.url(), Default::default()).await.expect("the server answers"))
}

/// The log entry of each request, in order. The server writes an entry after its last byte, when the client
/// may already be done.
fn entries(server: &ScriptedServer, count: usize) -> Vec<LogEntry> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let log = server.log();
        let of = |i: usize| log.iter().find(|entry| entry.prompt == i.to_string()).cloned();
        if let Some(entries) = (0..count).map(of).collect() {
            return entries;
        }
        assert!(Instant::now() < deadline, "an entry for each of {count} requests: {}", log.len());
        std::thread::sleep(ms(5));
    }
}

/// Bounds on a number of seconds, from the log.
#[derive(Debug, Clone, Copy)]
struct Between(f64, f64);

impl Between {
    /// Time from one event to a later one.
    fn events(from: &SentEvent, to: &SentEvent) -> Self {
        let seconds = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64();
        Self(seconds(from.after, to.before), seconds(from.before, to.after))
    }

    fn since(moment: Instant, to: &SentEvent) -> Self {
        Self((to.before - moment).as_secs_f64(), (to.after - moment).as_secs_f64())
    }

    /// Computes a figure from the lower bounds, and from the upper bounds.
    fn of(values: &[Self], figure: impl Fn(Vec<f64>) -> f64) -> Self {
        Self(
            figure(values.iter().map(|value| value.0).collect()),
            figure(values.iter().map(|value| value.1).collect()),
        )
    }

    fn over(self, divisor: f64) -> Self {
        Self(self.0 / divisor, self.1 / divisor)
    }

    fn has(self, found: f64) -> bool {
        found >= self.0 * (1.0 - TOLERANCE) && found <= self.1 * (1.0 + TOLERANCE)
    }
}

fn mean(values: Vec<f64>) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn percentile(mut values: Vec<f64>, p: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = p / 100.0 * (values.len() - 1) as f64;
    let (low, high) = (values[at.floor() as usize], values[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

/// Compares all figures of `run` with those computed from the log. Requests whose script was to fail must not
/// contribute.
fn judge(run: &Run, requests: &[Request], log: &[LogEntry], fails: impl Fn(usize) -> bool) {
    let slo = Slo { ttft: Some(ms(200)), tpot: Some(ms(90)), e2el: None };
    let samples = run.samples(requests);
    let figures = Figures::of(&samples, run.duration(), &FigureOptions { slo, seed: 1 });
    let completed = (0..requests.len()).filter(|i| !fails(*i)).count();
    assert_eq!(figures.completed, completed, "{:?}", figures.failures);

    let judged =
        || log.iter().zip(&run.exchanges).enumerate().filter(|(i, _)| !fails(*i)).map(|(_, both)| both);
    let tokens = |entry: &'_ LogEntry| -> Vec<SentEvent> { entry.tokens().cloned().collect() };
    let last = |tokens: &[SentEvent]| tokens.last().expect("every script has tokens").clone();
    let (mut ttft, mut tpot, mut itl, mut e2el) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (entry, exchange) in judged() {
        let tokens = tokens(entry);
        ttft.push(Between::since(exchange.intended, &tokens[0]));
        e2el.push(Between::since(exchange.intended, &last(&tokens)));
        tpot.push(Between::events(&tokens[0], &last(&tokens)).over((tokens.len() - 1) as f64));
        itl.extend(tokens.windows(2).map(|pair| Between::events(&pair[0], &pair[1])));
    }
    let ended = log.iter().filter_map(|entry| entry.events.last()).max_by_key(|event| event.after);
    let duration = Between::since(run.began, ended.expect("events were sent"));
    let a_second = |count: usize| Between(count as f64 / duration.1, count as f64 / duration.0);
    let num_tokens: usize = judged().map(|(entry, _)| entry.tokens().count()).sum();
    // A request within 2% of a limit may count either way.
    let kept = |end: fn(&Between) -> f64, slack: f64| {
        let kept =
            |(ttft, tpot): &(&Between, &Between)| end(ttft) <= 0.2 * slack && end(tpot) <= 0.09 * slack;
        ttft.iter().zip(&tpot).filter(kept).count()
    };
    let (fewest, most) = (kept(|at| at.1, 1.0 - TOLERANCE), kept(|at| at.0, 1.0 + TOLERANCE));

    let json = serde_json::Value::Object(figures.to_json());
    let check = |field: &str, expected: Between| {
        let found = json[field].as_f64().unwrap_or(f64::NAN);
        assert!(expected.has(found), "{field}: {found}, by the log {expected:?}");
    };
    for (name, values) in [("ttft", &ttft), ("tpot", &tpot), ("itl", &itl), ("e2el", &e2el)] {
        let in_ms = |figure: &dyn Fn(Vec<f64>) -> f64| Between::of(values, figure).over(1e-3);
        check(&format!("mean_{name}_ms"), in_ms(&mean));
        check(&format!("median_{name}_ms"), in_ms(&|values| percentile(values, 50.0)));
        check(&format!("p90_{name}_ms"), in_ms(&|values| percentile(values, 90.0)));
        check(&format!("p99_{name}_ms"), in_ms(&|values| percentile(values, 99.0)));
    }
    check("duration", duration);
    check("request_throughput", a_second(completed));
    check("output_throughput", a_second(num_tokens));
    let goodput = figures.request_goodput.expect("an objective was given");
    let expected = Between(a_second(fewest).0, a_second(most).1);
    assert!(expected.has(goodput), "goodput {goodput}, by the log {expected:?}");
    assert!(fewest > 0 && most < completed, "the objective must part the requests");
}

#[tokio::test]
async fn closed_loop_figures_are_the_servers() {
    let server = ScriptedServer::start(|prompt| Script::tokens(&waits(prompt.parse().unwrap_or(0)))).unwrap();
    let client = client(&server).await;
    let requests = requests(client.endpoint(), 24);
    let run = client.drive(&requests, &Schedule::Closed { concurrency: 4 }, |_| ()).await;
    let log = entries(&server, 24);
    judge(&run, &requests, &log, |_| false);
    // Never more than four at a time, by the server's log.
    for entry in &log {
        let open = |other: &&LogEntry| {
            let end = other.events.last().map_or(other.received, |event| event.before);
            other.received <= entry.received && entry.received < end
        };
        assert!(log.iter().filter(open).count() <= 4);
    }
}

/// Requests are sent at the drawn times regardless of responses, and latencies are measured from those times.
#[tokio::test]
async fn open_loop_figures_are_the_servers() {
    let server = ScriptedServer::start(|prompt| Script::tokens(&waits(prompt.parse().unwrap_or(0)))).unwrap();
    let client = client(&server).await;
    let requests = requests(client.endpoint(), 24);
    let schedule = Schedule::poisson(12.0, 24, 5);
    let run = client.drive(&requests, &schedule, |_| ()).await;
    let Schedule::Open { send_after } = schedule else { unreachable!() };
    for (exchange, after) in run.exchanges.iter().zip(send_after) {
        assert_eq!(exchange.intended, run.began + after);
    }
    judge(&run, &requests, &entries(&server, 24), |_| false);
}

/// A generator that is blocked for 25 ms whenever a response ends reads late; its figures must be based on
/// the arrival.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_generator_that_reads_late_flatters_nobody() {
    let script = |prompt: &str| Script::tokens(&waits(prompt.parse().unwrap_or(0)));
    let schedule = Schedule::poisson(12.0, 24, 5);
    for attempt in 1.. {
        let server = ScriptedServer::start(script).unwrap();
        let client = client(&server).await;
        let requests = requests(client.endpoint(), 24);
        let run = client.drive(&requests, &schedule, |_| std::thread::sleep(ms(25))).await;
        let late = run.exchanges.iter().flat_map(|exchange| &exchange.reads);
        let latest = late.map(|read| read.read_delay).max();
        assert!(latest > Some(ms(15)), "no read was late: {latest:?}");
        // Later than the next token: one timestamp covers both, and the machine was too busy for this test.
        if latest >= Some(LEAST_WAIT) && attempt < 40 {
            continue;
        }
        return judge(&run, &requests, &entries(&server, 24), |_| false);
    }
}

/// Errors, cut streams, and streams that stall for half a second and resume: completed requests must be right
/// within 2%, and only they count.
#[tokio::test]
async fn figures_among_stalls_errors_and_cut_streams_are_the_servers() {
    let script = |i: u64| {
        let mut script = Script::tokens(&waits(i));
        match i % 8 {
            1 => script = Script::refusal(500),
            4 => {
                script.steps.truncate(4);
                script.steps.push(Step::Cut);
            }
            // Before the second token, in the middle of the response.
            6 => script.steps.insert(2, Step::Wait(ms(500))),
            _ => (),
        }
        script
    };
    let server = ScriptedServer::start(move |prompt| script(prompt.parse().unwrap_or(0))).unwrap();
    let client = client(&server).await;
    let requests = requests(client.endpoint(), 32);
    let run = client.drive(&requests, &Schedule::Closed { concurrency: 4 }, |_| ()).await;
    judge(&run, &requests, &entries(&server, 32), |i| [1, 4].contains(&(i % 8)));
    let words = run.samples(&requests).iter().map(|sample| sample.outcome.label()).collect::<Vec<_>>();
    let count = |word| words.iter().filter(|found| **found == word).count();
    assert_eq!((count("completed"), count("refused"), count("cut")), (24, 4, 4), "{words:?}");
}

/// A server that handles one request at a time, under an open loop: the queue must count as latency.
#[tokio::test]
async fn a_stalled_server_does_not_hide_its_queue() {
    let gate = std::sync::Mutex::new(());
    let server = ScriptedServer::start(move |_| {
        let _one_at_a_time = gate.lock();
        std::thread::sleep(ms(100));
        Script::tokens(&[ms(50)])
    })
    .unwrap();
    let client = client(&server).await;
    let requests = requests(client.endpoint(), 10);
    let send_after = (0..10).map(|i| ms(10 * i)).collect();
    let run = client.drive(&requests, &Schedule::Open { send_after }, |_| ()).await;
    let e2el: Vec<Duration> = run.samples(&requests).iter().map(|sample| sample.e2el).collect();
    // The last request is served after at least one second and was due after 90 ms.
    assert!(e2el.iter().max() >= Some(&ms(950)), "{e2el:?}");
    let log = entries(&server, 10);
    for ((entry, exchange), found) in log.iter().zip(&run.exchanges).zip(&e2el) {
        let expected = Between::since(exchange.intended, entry.tokens().next().expect("it has a token"));
        assert!(expected.has(found.as_secs_f64()), "{found:?}, by the log {expected:?}");
    }
}

#[tokio::test]
async fn what_goes_wrong_is_counted_as_what_it_is() {
    let error = r#"{"error":{"message":"out of memory"}}"#.to_owned();
    let server = ScriptedServer::start(move |prompt| match prompt {
        "0" => Script::refusal(429),
        "1" => Script { status: 200, steps: vec![Step::token(), Step::Wait(ms(50)), Step::Cut] },
        "2" => Script { status: 200, steps: vec![Step::token(), Step::Stall] },
        "3" => Script { status: 200, steps: vec![Step::token(), Step::Event(error.clone())] },
        "4" => Script { status: 200, steps: vec![Step::Event("{".to_owned()), Step::token()] },
        "5" => Script { status: 200, steps: vec![Step::token(), Step::token()] },
        _ => Script::tokens(&[ms(50), ms(50)]),
    })
    .unwrap();
    let client = client(&server).await.with_timeout(ms(1500));
    let requests = requests(client.endpoint(), 8);
    let run = client.drive(&requests, &Schedule::Closed { concurrency: 8 }, |_| ()).await;
    let samples = run.samples(&requests);
    let words: Vec<&str> = samples.iter().map(|sample: &Sample| sample.outcome.label()).collect();
    let expected =
        ["refused", "cut", "timed out", "failed in stream", "malformed", "cut", "completed", "completed"];
    assert_eq!(words, expected);
    assert!(matches!(samples[0].outcome, RequestOutcome::Refused { status: 429, .. }));
    let figures = Figures::of(&samples, run.duration(), &FigureOptions::default());
    assert_eq!((figures.num_prompts, figures.completed, figures.total_output_tokens), (8, 2, 4));

    drop(server);
    let without_connections = Client::new(client.endpoint().clone()).with_timeout(ms(1500));
    let nobody =
        without_connections.drive(&requests[..1], &Schedule::Closed { concurrency: 1 }, |_| ()).await;
    let word = nobody.samples(&requests)[0].outcome.label();
    assert!(["not connected", "cut"].contains(&word), "{word}");
}

/// Connections that a server closed while idle are detected, and the request uses a new one.
#[tokio::test]
async fn a_server_that_closes_idle_connections_costs_no_request() {
    let server = ScriptedServer::start(|_| {
        let mut script = Script::tokens(&[ms(5)]);
        script.steps.push(Step::EndAndClose);
        script
    })
    .unwrap();
    let client = client(&server).await.with_timeout(ms(5000));
    let requests = requests(client.endpoint(), 12);
    let run = client.drive(&requests, &Schedule::Closed { concurrency: 2 }, |_| ()).await;
    assert!(run.samples(&requests).iter().all(Sample::is_completed), "{:?}", run.exchanges);
}
