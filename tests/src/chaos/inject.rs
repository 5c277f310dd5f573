//! Injects one fault: causes it, waits, undoes it, and waits until the affected streams have resumed and
//! every process is back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use nix::sys::signal::Signal;
use service::discovery::{self, DRAFT, DiscoveryUri, Member, Registration, TARGET};
use service::shutdown::Lifetime;
use speculation::Role;
use tokio::time::{Instant, sleep};

use super::fault::FaultKind;
use super::fleet::{Fleet, Worker};
use super::impact::FaultRecord;
use super::plan::PlannedFault;
use super::streams::Load;
use crate::checkpoint_copy::CheckpointCopy;
use crate::fake_worker;
use crate::hostile::{DraftMisbehaviour, HostileDraft};
use crate::hostile_target::{HostileTarget, TargetMisbehaviour};
use crate::pair::{self, PairText};
use crate::tcp_proxy::Direction;
use crate::wait::{holds_within, until};

/// Time within which all processes must reconnect after a fault is undone; then missing ones are restarted.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(25);

/// Time within which a joined worker should receive a step; a router may have reasons not to send one.
const FIRST_STEP_TIMEOUT: Duration = Duration::from_secs(10);

/// A slowed process is stopped for the first of these times and runs for the second, repeatedly.
const SLOWDOWN_CYCLE: (Duration, Duration) = (Duration::from_millis(45), Duration::from_millis(5));

/// Injects the fault and returns its record.
pub async fn inject(
    fleet: &mut Fleet,
    load: &Load,
    (number, fault): (usize, &PlannedFault),
) -> anyhow::Result<FaultRecord> {
    let active = load.active();
    let start = Instant::now();
    let description =
        cause(fleet, load, fault).await.with_context(|| format!("fault {number}, {}", fault.kind))?;
    let healed = Instant::now();
    let interventions = fleet.restore(RECONNECT_TIMEOUT, load).await?;
    // A stream that stays silent is lost when the client's timeout expires, which also ends this wait.
    until("every stream resumes after the fault", async || Ok(load.silent_since(healed, &active).is_empty()))
        .await
        .ok();
    Ok(FaultRecord { number, kind: fault.kind, description, start, recovered: Instant::now(), interventions })
}

/// Causes the fault, waits and undoes it; describes the affected process.
async fn cause(fleet: &mut Fleet, load: &Load, fault: &PlannedFault) -> anyhow::Result<String> {
    use FaultKind as F;
    match fault.kind {
        F::KillTarget | F::BounceTarget | F::KillDraft | F::BounceDraft => kill(fleet, fault).await,
        F::StopTarget | F::StopDraft | F::SlowTarget => stop_or_slow_down(fleet, fault).await,
        F::CutTarget | F::CutDraft => Ok(break_wire(fleet, fault).await),
        F::HalfOpenTarget | F::HalfOpenDraft => Ok(break_wire(fleet, fault).await),
        F::DeafTarget | F::MuteTarget | F::DeafDraft | F::MuteDraft => Ok(break_wire(fleet, fault).await),
        F::DeleteKeys => {
            let deleted = fleet.etcd.delete_workers().await?;
            Ok(format!("{deleted} keys"))
        }
        F::RestartEtcd => {
            fleet.etcd.kill()?;
            sleep(fault.hold).await;
            fleet.etcd.start_again().await?;
            Ok(format!("away for {:.1?}", fault.hold))
        }
        F::LoseQuorum => {
            let killed = fleet.etcd.kill_majority(fault.victim)?;
            sleep(fault.hold).await;
            fleet.etcd.start_again().await?;
            Ok(format!("{killed} members away for {:.1?}", fault.hold))
        }
        F::NanTarget => nan_target(fleet, fault.hold).await,
        F::HostileDraft => hostile_draft(fleet, fault).await,
        F::HostileTarget => hostile_target(fleet, fault).await,
        F::RestartRouter => {
            let router = fault.victim % fleet.routers.len();
            restart_router(fleet, load, (router, fault.hold)).await?;
            Ok(format!("{}, away for {:.1?}", fleet.routers[router].server.name(), fault.hold))
        }
        F::RollingRestart => rolling_restart(fleet, load).await,
        F::Churn => churn(fleet, fault).await,
    }
}

/// The role of the affected worker.
fn role_of(kind: FaultKind) -> Role {
    use FaultKind as F;
    match kind {
        F::KillDraft | F::BounceDraft | F::StopDraft | F::CutDraft => Role::Draft,
        F::HalfOpenDraft | F::DeafDraft | F::MuteDraft => Role::Draft,
        _ => Role::Target,
    }
}

/// Index of the affected worker.
fn victim_of(fleet: &Fleet, fault: &PlannedFault) -> usize {
    let all = fleet.of_role(role_of(fault.kind));
    all[fault.victim % all.len()]
}

async fn kill(fleet: &mut Fleet, fault: &PlannedFault) -> anyhow::Result<String> {
    let (logs, victim) = (fleet.logs(), victim_of(fleet, fault));
    let server = &mut fleet.workers[victim].server;
    server.kill().await;
    let is_bounced = matches!(fault.kind, FaultKind::BounceTarget | FaultKind::BounceDraft);
    if !is_bounced {
        sleep(fault.hold).await;
    }
    server.restart(&logs).await?;
    let away = if is_bounced { Duration::ZERO } else { fault.hold };
    Ok(format!("{}, away for {away:.1?}", server.name()))
}

async fn stop_or_slow_down(fleet: &Fleet, fault: &PlannedFault) -> anyhow::Result<String> {
    let server = &fleet.workers[victim_of(fleet, fault)].server;
    if fault.kind == FaultKind::SlowTarget {
        let end = Instant::now() + fault.hold;
        while Instant::now() < end {
            server.signal(Signal::SIGSTOP);
            sleep(SLOWDOWN_CYCLE.0).await;
            server.signal(Signal::SIGCONT);
            sleep(SLOWDOWN_CYCLE.1).await;
        }
    } else {
        server.signal(Signal::SIGSTOP);
        sleep(fault.hold).await;
        server.signal(Signal::SIGCONT);
    }
    Ok(format!("{} for {:.1?}", server.name(), fault.hold))
}

async fn break_wire(fleet: &Fleet, fault: &PlannedFault) -> String {
    use FaultKind as F;
    let worker = &fleet.workers[victim_of(fleet, fault)];
    let proxy = &worker.proxy;
    match fault.kind {
        F::CutTarget | F::CutDraft => proxy.cut(),
        F::HalfOpenTarget | F::HalfOpenDraft => proxy.silence(),
        F::DeafTarget | F::DeafDraft => proxy.block(Direction::ToWorker),
        _ => proxy.block(Direction::ToRouter),
    }
    if !matches!(fault.kind, F::CutTarget | F::CutDraft) {
        sleep(fault.hold).await;
    }
    proxy.heal();
    format!("{} for {:.1?}", worker.server.name(), fault.hold)
}

async fn nan_target(fleet: &mut Fleet, hold: Duration) -> anyhow::Result<String> {
    let checkpoint = CheckpointCopy::of(&pair::target_dir())?;
    checkpoint.fill_with_nan("model.norm.weight")?;
    let mut extra = fleet.extra_target_with("nan-target", checkpoint.directory().to_owned()).await?;
    let url = extra.proxy.url();
    until("every router is connected to the target with NaN", async || is_connected(fleet, &url).await)
        .await?;
    let steps =
        async |extra: &Worker| anyhow::Ok(extra.server.metrics().await?.sum("outrider_worker_steps_total"));
    holds_within(FIRST_STEP_TIMEOUT, async || Ok(steps(&extra).await? > 0)).await?;
    sleep(hold).await;
    let num_steps = steps(&extra).await?;
    extra.server.stop().await;
    Ok(format!("{num_steps} steps in {hold:.1?}"))
}

async fn hostile_draft(fleet: &mut Fleet, fault: &PlannedFault) -> anyhow::Result<String> {
    let misbehaviour = DraftMisbehaviour::ALL[fault.variant % DraftMisbehaviour::ALL.len()];
    let vocab_size = PairText::load()?.vocab_size() as u32;
    let num_misbehaviours = Arc::new(AtomicU64::new(0));
    let lifetime = fleet.lifetime().child();
    let worker =
        HostileDraft::new(misbehaviour, vocab_size, Arc::clone(&num_misbehaviours), lifetime.clone());
    let url = fake_worker::serve(worker, &lifetime).await?;
    let registration = register(fleet, DRAFT, &url, &lifetime).await?;
    let joined =
        until("a router is connected to the hostile draft", async || is_connected(fleet, &url).await).await;
    wait_for_misbehaviour(&num_misbehaviours).await?;
    sleep(fault.hold).await;
    leave(registration, &lifetime).await;
    joined?;
    Ok(format!(
        "{misbehaviour:?}, {} misbehaviours in {:.1?}",
        num_misbehaviours.load(Ordering::Relaxed),
        fault.hold
    ))
}

async fn hostile_target(fleet: &mut Fleet, fault: &PlannedFault) -> anyhow::Result<String> {
    let all = TargetMisbehaviour::all();
    let misbehaviour = all[fault.variant % all.len()];
    let no_workers = tempfile::NamedTempFile::new()?;
    let discovery = format!("static:{}", no_workers.path().display());
    let mut honest = fleet.extra_target("honest-target", &discovery).await?;
    until("the honest target is ready", async || Ok(honest.server.is_ready().await)).await?;
    let num_misbehaviours = Arc::new(AtomicU64::new(0));
    let lifetime = fleet.lifetime().child();
    let worker =
        HostileTarget::connect(&honest.url(), misbehaviour, Arc::clone(&num_misbehaviours), lifetime.clone())
            .await?;
    let url = fake_worker::serve(worker, &lifetime).await?;
    let registration = register(fleet, TARGET, &url, &lifetime).await?;
    // Some kinds may be refused on connection.
    let joined = holds_within(fault.hold, async || is_connected(fleet, &url).await).await?;
    if joined {
        wait_for_misbehaviour(&num_misbehaviours).await?;
    }
    sleep(fault.hold).await;
    leave(registration, &lifetime).await;
    honest.server.kill().await;
    let outcome = if joined { "joined" } else { "was not admitted" };
    Ok(format!(
        "{misbehaviour:?} {outcome}, {} misbehaviours in {:.1?}",
        num_misbehaviours.load(Ordering::Relaxed),
        fault.hold
    ))
}

/// Waits until a hostile worker has received a step, up to [`FIRST_STEP_TIMEOUT`], because a router may have
/// reasons not to send one.
async fn wait_for_misbehaviour(num_misbehaviours: &AtomicU64) -> anyhow::Result<bool> {
    holds_within(FIRST_STEP_TIMEOUT, async || Ok(num_misbehaviours.load(Ordering::Relaxed) > 0)).await
}

/// Whether every router is connected to the worker at this address.
async fn is_connected(fleet: &Fleet, url: &str) -> anyhow::Result<bool> {
    for router in &fleet.routers {
        let connected = router.connected().await.unwrap_or_default();
        if !connected.iter().any(|address| address == url) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Registers a worker that runs in this program.
async fn register(fleet: &Fleet, role: &str, url: &str, lifetime: &Lifetime) -> anyhow::Result<Registration> {
    let uri: DiscoveryUri = fleet.etcd.uri().parse()?;
    let discovery = discovery::open(&uri.into(), lifetime).await?;
    let (id, address) = (format!("chaos {url}"), url.to_owned());
    let member = Member { id, role: role.to_owned(), address, facts: serde_json::Value::Null };
    Ok(discovery.register(member).await?)
}

/// Removes the registration, and stops everything under the lifetime.
async fn leave(registration: Registration, lifetime: &Lifetime) {
    registration.leave().await;
    lifetime.shut_down(Duration::from_secs(5)).await;
}

async fn restart_router(
    fleet: &mut Fleet,
    load: &Load,
    (router, away): (usize, Duration),
) -> anyhow::Result<()> {
    let logs = fleet.logs();
    load.on_router_down(router);
    let server = &mut fleet.routers[router].server;
    server.kill().await;
    sleep(away).await;
    server.restart(&logs).await?;
    until("the router serves again", async || Ok(fleet.routers[router].server.is_ready().await)).await?;
    load.on_router_up(router);
    Ok(())
}

async fn rolling_restart(fleet: &mut Fleet, load: &Load) -> anyhow::Result<String> {
    let logs = fleet.logs();
    for worker in 0..fleet.workers.len() {
        let server = &mut fleet.workers[worker].server;
        server.stop().await;
        server.restart(&logs).await?;
        let name = fleet.workers[worker].server.name().to_owned();
        let is_restored = holds_within(RECONNECT_TIMEOUT, async || fleet.is_fully_connected().await).await?;
        anyhow::ensure!(is_restored, "{name} is not back: {:?}", fleet.missing().await);
    }
    for router in 0..fleet.routers.len() {
        load.on_router_down(router);
        let server = &mut fleet.routers[router].server;
        server.stop().await;
        server.restart(&logs).await?;
        until("the router serves again", async || fleet.is_fully_connected().await).await?;
        load.on_router_up(router);
    }
    Ok(format!("{} workers and {} routers", fleet.workers.len(), fleet.routers.len()))
}

/// Some of the targets and draft workers leave or crash at once, in half of the cases etcd is down at the
/// same time, and all join again.
async fn churn(fleet: &mut Fleet, fault: &PlannedFault) -> anyhow::Result<String> {
    let logs = fleet.logs();
    let mut restarted = Vec::new();
    for role in [Role::Target, Role::Draft] {
        let all = fleet.of_role(role);
        // At most half of them, so that a target remains.
        let count = 1.max(all.len() / 4 + fault.variant % (all.len() / 4 + 1)).min(all.len() - 1);
        restarted.extend((0..count).map(|i| all[(fault.victim + i) % all.len()]));
    }
    for (i, &worker) in restarted.iter().enumerate() {
        // A process takes time to leave; the next ones are signalled meanwhile.
        let signal = if (fault.variant + i).is_multiple_of(2) { Signal::SIGTERM } else { Signal::SIGKILL };
        fleet.workers[worker].server.signal(signal);
    }
    let is_etcd_restarted = fault.variant.is_multiple_of(2);
    if is_etcd_restarted {
        fleet.etcd.kill()?;
    }
    sleep(fault.hold).await;
    if is_etcd_restarted {
        fleet.etcd.start_again().await?;
    }
    for &worker in &restarted {
        fleet.workers[worker].server.restart(&logs).await?;
    }
    let etcd = if is_etcd_restarted { "with etcd" } else { "without etcd" };
    Ok(format!("{} of {} workers and {etcd} for {:.1?}", restarted.len(), fleet.workers.len(), fault.hold))
}
