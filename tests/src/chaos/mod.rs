//! Faults of every kind, drawn from a seed and injected one after the other into a fleet of real processes
//! under load.
//!
//! [`plan`] draws the run, a pure function of its seed. [`fleet`] starts etcd, workers and routers.
//! [`streams`] are the clients, which compare every answer with the text that an undisturbed target generated
//! without drafts. [`inject`] injects a fault ([`fault`]) and undoes it. [`impact`] computes its effect on
//! streams and [`footprint`] what processes hold at the end; [`table`] prints both.
//!
//! Faults are injected one at a time, so that a stall can be attributed to a fault and a healthy target is
//! always running. The next fault follows when processes and streams have recovered and the planned number of
//! tokens has reached clients.

pub mod fault;
pub mod fleet;
pub mod footprint;
pub mod impact;
pub mod inject;
pub mod logs;
pub mod plan;
pub mod streams;
pub mod table;

use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use scheduling::profile::text::SyntheticText;
use service::shutdown::Lifetime;
use speculation::TokenId;

use crate::case::Case;
use crate::cluster::plain_answers;
use crate::pair::{self, PairText};
use crate::wait::{holds_within, until};
use fleet::{Engine, Fleet, FleetSize};
use footprint::{Footprint, footprints};
use impact::{FaultRecord, impacts};
use logs::FileLogs;
use plan::{Plan, PlanSize, PlannedFault};
use streams::{End, ExpectedAnswer, Load, LoadSize, StreamRecord};

/// Concurrent requests while the expected texts are generated.
const PLAIN_WIDTH: usize = 16;

/// Settings of a run.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Seed of the plan.
    pub seed: u64,
    /// Sizes of the plan.
    pub plan: PlanSize,
    /// Sizes of the fleet.
    pub fleet: FleetSize,
    /// Sizes of the load.
    pub load: LoadSize,
    /// Time within which processes must release the resources of the last streams.
    pub idle_within: Duration,
}

/// Results of a run.
#[derive(Debug)]
pub struct ChaosReport {
    /// Every injected fault.
    pub faults: Vec<FaultRecord>,
    /// Every stream.
    pub streams: Vec<StreamRecord>,
    /// Footprint of each process before the first fault and after the last, in the order of the processes.
    pub footprints: Vec<(Footprint, Footprint)>,
    /// Why faults were left out, if any were.
    pub aborted: Option<anyhow::Error>,
}

impl ChaosReport {
    /// Streams that ended in a way that no fault excuses.
    pub fn failures(&self) -> impl Iterator<Item = &StreamRecord> {
        self.streams.iter().filter(|stream| matches!(stream.end, End::Lost(_) | End::Differs(_)))
    }

    /// Number of streams that were equal to the expected text to the end.
    pub fn num_complete(&self) -> usize {
        self.streams.iter().filter(|stream| stream.end == End::Complete).count()
    }

    /// Descriptions of resources that have grown, by process.
    pub fn leaks(&self) -> Vec<String> {
        let leaks = self.footprints.iter().map(|(before, after)| (before, after.excess(before)));
        let leaks = leaks.filter(|(_, excess)| !excess.is_empty());
        leaks.map(|(before, excess)| format!("{}: {}", before.name, excess.join(", "))).collect()
    }

    /// What the run did not measure. Such a run says nothing, even if no stream failed.
    pub fn unmeasured(&self) -> Vec<String> {
        let mut unmeasured = Vec::new();
        if self.num_complete() == 0 {
            unmeasured.push("no stream was compared to its end".to_owned());
        }
        if self.drafted().0 == 0 {
            unmeasured.push("no drafted token was verified".to_owned());
        }
        let impacts = impacts(&self.faults, &self.streams);
        let idle = impacts.iter().filter(|impact| impact.stalls.is_empty() && impact.with_router == 0);
        unmeasured.extend(idle.map(|impact| format!("no stream was in flight during {}", impact.kind)));
        unmeasured
    }

    /// Number of verified drafted tokens, and of the accepted ones.
    pub fn drafted(&self) -> (u64, u64) {
        let of = |count: fn(&StreamRecord) -> u64| self.streams.iter().map(count).sum();
        (of(|stream| stream.drafted), of(|stream| stream.accepted))
    }
}

/// Executes a run; reports progress through `say`.
pub async fn run(
    settings: &Settings,
    logs: &Arc<FileLogs>,
    say: impl Fn(String),
) -> anyhow::Result<ChaosReport> {
    let plan = Plan::draw(settings.seed, &settings.plan);
    let expected_answers = write_texts(&plan, settings.fleet.engine).await?;
    say(format!("{} texts written without drafts and without faults", expected_answers.len()));
    let lifetime = Lifetime::new();
    let mut fleet = Fleet::start(settings.fleet, Arc::clone(logs) as _, &lifetime).await?;
    let before = warm_up(&fleet, &expected_answers, (settings, &lifetime)).await?;
    say("every process has started and warmed up".to_owned());

    let mut clients = Vec::new();
    for router in &fleet.routers {
        clients.push(router.client().await?);
    }
    let load = Load::start(expected_answers, clients, settings.load, &lifetime);
    let mut faults = Vec::new();
    let mut aborted = None;
    for (i, fault) in plan.faults.iter().enumerate() {
        logs.mark(&format!("fault {}: {}", i + 1, fault.kind));
        match play(&mut fleet, &load, (i + 1, fault)).await {
            Ok(record) => {
                say(table::fault_line(&record));
                faults.push(record);
            }
            Err(error) => {
                aborted = Some(error.context(format!("fault {}, {}", i + 1, fault.kind)));
                break;
            }
        }
    }
    logs.mark("no more faults");
    let streams = load.finish().await?;
    // After an abort, processes may not answer.
    let after = match &aborted {
        None => idle_footprints(&fleet, settings.idle_within).await?,
        Some(_) => Vec::new(),
    };
    fleet.stop().await;
    lifetime.shut_down(Duration::from_secs(5)).await;
    Ok(ChaosReport { faults, streams, footprints: before.into_iter().zip(after).collect(), aborted })
}

/// Injects a fault once enough tokens have arrived since the last one.
async fn play(
    fleet: &mut Fleet,
    load: &Load,
    (number, fault): (usize, &PlannedFault),
) -> anyhow::Result<FaultRecord> {
    wait_for_tokens(load, fault.after_tokens).await?;
    inject::inject(fleet, load, (number, fault)).await
}

/// The expected texts of the plan: the output of a target without drafts, or the text that synthetic targets
/// define.
async fn write_texts(plan: &Plan, engine: Engine) -> anyhow::Result<Vec<ExpectedAnswer>> {
    let text = PairText::load()?;
    let planned = plan.texts.iter().enumerate();
    let cases: Vec<Case> =
        planned.map(|(number, planned)| planned.case(number, &text)).collect::<anyhow::Result<_>>()?;
    ensure!(!cases.is_empty(), "a run without texts has no streams");
    let expected: Vec<Vec<TokenId>> = match engine {
        Engine::Pair => {
            let plain = |case: &Case| Case { is_k_left_to_lane: false, ..case.clone() };
            let plain: Vec<Case> = cases.iter().map(plain).collect();
            let answers = plain_answers(&plain, PLAIN_WIDTH).await?;
            answers.into_iter().map(|answer| answer.token_ids).collect()
        }
        Engine::Synthetic(_) => {
            let vocab_size = pair::profile()?.vocab_size;
            cases.iter().map(|case| synthetic_text(case, vocab_size)).collect()
        }
    };
    Ok(cases.into_iter().zip(expected).map(|(case, expected)| ExpectedAnswer { case, expected }).collect())
}

fn synthetic_text(case: &Case, vocab_size: u32) -> Vec<TokenId> {
    let text = SyntheticText { seed: case.seed, choice: 0, vocab_size };
    let start = case.prompt_ids.len() as u32;
    (start..start + case.max_tokens).map(|position| text.token(position)).collect()
}

/// Serves some streams, waits until all processes are idle, and returns their footprints.
async fn warm_up(
    fleet: &Fleet,
    expected_answers: &[ExpectedAnswer],
    (settings, lifetime): (&Settings, &Lifetime),
) -> anyhow::Result<Vec<Footprint>> {
    let mut clients = Vec::new();
    for router in &fleet.routers {
        clients.push(router.client().await?);
    }
    let size = LoadSize { streams: 2 * settings.load.width as u64, ..settings.load };
    let streams = Load::start(expected_answers.to_vec(), clients, size, lifetime).finish().await?;
    for stream in streams {
        ensure!(stream.end == End::Complete, "{} failed without any fault: {:?}", stream.name, stream.end);
    }
    idle_footprints(fleet, settings.idle_within).await
}

/// Waits until no resources are held for sequences, up to `timeout`, and returns the footprints.
async fn idle_footprints(fleet: &Fleet, timeout: Duration) -> anyhow::Result<Vec<Footprint>> {
    holds_within(timeout, async || Ok(footprints(fleet).await?.iter().all(Footprint::is_idle))).await?;
    footprints(fleet).await
}

/// Waits until this many more tokens have reached clients.
async fn wait_for_tokens(load: &Load, tokens: u64) -> anyhow::Result<()> {
    let enough = load.tokens() + tokens;
    until(&format!("{tokens} more tokens reach clients"), async || Ok(load.tokens() >= enough)).await
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::fault::FaultKind;
    use super::*;

    #[test]
    fn a_run_without_data_is_no_success() {
        let start = Instant::now();
        let after = |ms: u64| start + Duration::from_millis(ms);
        let stream = |end: End, drafted: u64| StreamRecord {
            number: 0,
            name: String::new(),
            router: 0,
            opened: start,
            arrivals: Vec::new(),
            ended: after(100),
            end,
            tokens: 0,
            drafted,
            accepted: 0,
        };
        let fault = |at: u64| FaultRecord {
            number: 1,
            kind: FaultKind::KillTarget,
            description: String::new(),
            start: after(at),
            recovered: after(at + 10),
            interventions: Vec::new(),
        };
        let unmeasured = |faults: Vec<FaultRecord>, streams: Vec<StreamRecord>| {
            ChaosReport { faults, streams, footprints: Vec::new(), aborted: None }.unmeasured()
        };
        let (nothing, undrafted) = ("no stream was compared to its end", "no drafted token was verified");
        let idle = "no stream was in flight during kill-target";
        let complete = || stream(End::Complete, 4);
        assert_eq!(unmeasured(Vec::new(), Vec::new()), [nothing, undrafted]);
        assert_eq!(unmeasured(vec![fault(50)], vec![complete()]), [""; 0]);
        assert_eq!(unmeasured(vec![fault(50)], vec![stream(End::Complete, 0)]), [undrafted]);
        assert_eq!(unmeasured(vec![fault(200)], vec![complete()]), [idle]);
        // A stream that ended with its router has no stall, but was in flight.
        assert_eq!(unmeasured(vec![fault(50)], vec![stream(End::RouterDown, 4)]), [nothing]);
    }
}
