//! A short run of the program `chaos`: faults that should be survived lose no stream and change no id, and
//! processes release all resources. The program also covers the other kinds; docs/measurements/chaos.md
//! describes their results.

use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use service::shutdown::Lifetime;
use tests::case::Case;
use tests::chaos::fault::FaultKind;
use tests::chaos::fleet::{Engine, FleetSize};
use tests::chaos::logs::FileLogs;
use tests::chaos::plan::PlanSize;
use tests::chaos::streams::{End, ExpectedAnswer, Load, LoadSize};
use tests::chaos::{Settings, run, table};
use tests::cluster::{Cluster, WorkerKind};
use tests::wait::WAIT_TIMEOUT;

/// Each kind once, in the order given by the seed.
const KINDS: [FaultKind; 11] = [
    FaultKind::KillTarget,
    FaultKind::KillDraft,
    FaultKind::StopDraft,
    FaultKind::CutTarget,
    FaultKind::CutDraft,
    FaultKind::RestartEtcd,
    FaultKind::HostileDraft,
    FaultKind::StopTarget,
    FaultKind::DeleteKeys,
    FaultKind::NanTarget,
    FaultKind::HostileTarget,
];

fn settings() -> Settings {
    Settings {
        seed: 4,
        plan: PlanSize {
            texts: 12,
            tokens: (16, 160),
            faults: KINDS.len(),
            kinds: KINDS.to_vec(),
            hold: (Duration::from_millis(300), Duration::from_millis(900)),
        },
        fleet: FleetSize { engine: Engine::Pair, targets: 2, drafts: 1, routers: 1, etcd_members: 1 },
        load: LoadSize { width: 6, streams: 24, stream_timeout: WAIT_TIMEOUT },
        idle_within: Duration::from_secs(5),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_lose_no_stream_and_change_no_id() -> anyhow::Result<()> {
    let logs = Arc::new(FileLogs::new(None)?);
    let report = run(&settings(), &logs, |line| eprintln!("{line}")).await?;
    let page = table::page(&report);
    eprintln!("{page}");
    ensure!(report.failures().next().is_none(), "streams were lost or differ; see {}", logs.keep().display());
    ensure!(report.aborted.is_none(), "the run was aborted: {:?}", report.aborted);
    ensure!(report.faults.len() == KINDS.len(), "{} faults were injected", report.faults.len());
    let interventions: Vec<_> =
        report.faults.iter().filter(|fault| !fault.interventions.is_empty()).collect();
    ensure!(
        interventions.is_empty(),
        "processes did not reconnect without manual restarts: {interventions:?}"
    );
    ensure!(report.unmeasured().is_empty(), "{:?}", report.unmeasured());
    ensure!(report.footprints.len() == 4, "footprints of {} processes", report.footprints.len());
    ensure!(report.num_complete() >= 24, "only {} streams were compared", report.num_complete());
    let (drafted, accepted) = report.drafted();
    ensure!(accepted > 100 && accepted < drafted, "{accepted} of {drafted} drafted tokens accepted");
    for (_, after) in &report.footprints {
        ensure!(
            after.is_idle(),
            "{} holds {} sequences, {} KV blocks",
            after.name,
            after.sequences,
            after.kv_blocks
        );
    }
    Ok(())
}

/// The run's verdict depends on this: a wrong id must be detected, and also a stream that ends early.
#[tokio::test(flavor = "multi_thread")]
async fn wrong_ids_and_short_texts_are_detected() -> anyhow::Result<()> {
    let cluster = Cluster::start(|_| ()).await?;
    let _target = cluster.add(WorkerKind::SyntheticTarget).await?;
    let (client, lifetime) = (cluster.client().await?, Lifetime::new());
    let case = Case::new("a text", vec![5, 6, 7], 0.0).with_k(0);
    let right = client.ask(&case).await?.token_ids;
    let mut wrong = right.clone();
    wrong[3] += 1;
    let refused = Case { prompt_ids: Vec::new(), ..case.clone() };
    let longer = [right.as_slice(), &[1]].concat();
    let expected_answers = [(&case, &right), (&case, &wrong), (&case, &longer), (&refused, &right)];
    let expected_answers = expected_answers
        .map(|(case, expected)| ExpectedAnswer { case: case.clone(), expected: expected.clone() });
    let size = LoadSize { width: 1, streams: 4, stream_timeout: WAIT_TIMEOUT };
    let records = Load::start(expected_answers.to_vec(), vec![client], size, &lifetime).finish().await?;
    let ends: Vec<&End> = records.iter().map(|record| &record.end).collect();
    let short = End::Differs(right.len());
    ensure!(ends[..3] == [&End::Complete, &End::Differs(3), &short], "{ends:?}");
    ensure!(matches!(ends[3..], [End::Lost(_)]), "{ends:?}");
    cluster.stop().await
}
