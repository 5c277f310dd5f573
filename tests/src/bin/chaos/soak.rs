//! Conversations that grow turn by turn, with drafts, while a draft worker is drained and returned to
//! service: the ids of every turn must equal those without drafts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Parser;
use outrider_cli::cluster::usage::resident_mib;
use outrider_cli::cluster::{ProcessCluster, ROUTER};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use reqwest::Method;
use speculation::TokenId;
use tests::case::Case;
use tests::client::Client;
use tests::http_client::{HttpAnswer, HttpClient};
use tests::pair::PairText;
use tests::processes;
use tokio::time::{Instant, sleep};

/// A longer conversation is restarted: the pair's window is 2,048.
const MAX_CONVERSATION: usize = 1_700;

/// Longest time between two requests to drain a draft worker or to return it to service.
const ORDER_EVERY: Duration = Duration::from_secs(3);

/// Draft lengths of successive turns; `None` leaves the choice to the lane.
const DRAFT_LENGTHS: [Option<u32>; 6] = [Some(4), Some(0), None, Some(8), Some(0), Some(1)];

/// Multi-turn conversations with shared prefixes: each turn is requested with drafts and without, and the ids
/// are compared.
///
/// All conversations begin with the same prompt. A turn's prompt is the whole conversation so far and some
/// more words. A draft worker is drained and returned to service at random, so that streams change from k > 0
/// to 0 and back.
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// Duration, seconds
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Concurrent conversations
    #[arg(long, default_value_t = 6)]
    conversations: u64,
    /// Seed of words, sampling and drain requests
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Target workers
    #[arg(long, default_value_t = 2)]
    targets: usize,
}

/// Counters of all conversations.
#[derive(Debug, Default)]
struct Tally {
    turns: AtomicU64,
    tokens: AtomicU64,
    drafted: AtomicU64,
    accepted: AtomicU64,
    begun: AtomicU64,
    orders: AtomicU64,
    is_over: AtomicBool,
}

/// Runs the soak and prints the results. Fails if ids differ or a request fails.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    let cluster = processes::start(|spec| spec.target_workers = args.targets).await?;
    let client = processes::client(&cluster).await?;
    let prompts = PairText::load()?.bundled("summarization")?;
    let shared = prompts.first().context("no prompts")?.clone();
    let words: Vec<Vec<TokenId>> =
        prompts.iter().skip(1).map(|ids| ids[..ids.len().min(24)].to_vec()).collect();
    let tally = Arc::new(Tally::default());
    let router = cluster.process(ROUTER)?.pid();
    let before = resident_mib(router)?;
    let end = Instant::now() + Duration::from_secs(args.seconds);
    let conversations = (0..args.conversations).map(|number| {
        let rng = StdRng::seed_from_u64(args.seed.wrapping_mul(1_000) + number);
        converse(&client, (&shared, &words), rng, &tally, end)
    });
    let talking = async {
        let talked = futures::future::try_join_all(conversations).await;
        tally.is_over.store(true, Ordering::Relaxed);
        talked
    };
    let (talked, ordered) = tokio::join!(talking, give_orders(&cluster, args.seed, &tally));
    talked?;
    ordered?;
    let after = resident_mib(router)?;
    cluster.stop().await;
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    for (counter, what) in [
        (&tally.turns, "no turn was compared"),
        (&tally.drafted, "no drafted token was verified"),
        (&tally.orders, "no draft worker was drained"),
    ] {
        ensure!(count(counter) > 0, "{what}: raise --seconds or --conversations");
    }
    println!(
        "{} turns in {} conversations for {} s, each requested twice, {} tokens: all ids equal",
        count(&tally.turns),
        count(&tally.begun),
        args.seconds,
        count(&tally.tokens)
    );
    println!(
        "{} of {} drafted tokens accepted; a draft worker was drained or returned to service {} times",
        count(&tally.accepted),
        count(&tally.drafted),
        count(&tally.orders)
    );
    println!("router's memory before and after, MiB: {before:.1}, {after:.1}");
    Ok(())
}

/// Runs one conversation after the other until `end`.
async fn converse(
    client: &Client,
    (shared, words): (&[TokenId], &[Vec<TokenId>]),
    mut rng: StdRng,
    tally: &Tally,
    end: Instant,
) -> anyhow::Result<()> {
    let mut history = Vec::new();
    let mut turn = rng.random_range(0..DRAFT_LENGTHS.len());
    while Instant::now() < end {
        if history.is_empty() || history.len() > MAX_CONVERSATION {
            history = shared.to_vec();
            tally.begun.fetch_add(1, Ordering::Relaxed);
        }
        history.extend(&words[rng.random_range(0..words.len())]);
        let temperature = if rng.random_bool(0.5) { 0.0 } else { 0.8 };
        let mut case = Case::new(format!("turn {turn}"), history.clone(), temperature);
        (case.seed, case.max_tokens, case.ignore_eos) = (rng.random(), rng.random_range(16..96), true);
        let k = DRAFT_LENGTHS[turn % DRAFT_LENGTHS.len()];
        case.is_k_left_to_lane = k.is_none();
        case.num_draft_tokens = k.unwrap_or(4);
        let drafted = client.ask(&case).await.with_context(|| format!("{case:?}"))?;
        case.is_k_left_to_lane = false;
        let plain = client.ask(&case.with_k(0)).await.with_context(|| format!("{case:?}"))?;
        ensure!(
            drafted.token_ids == plain.token_ids,
            "ids differ with k = {k:?}: {:?} instead of {:?} after {case:?}",
            drafted.token_ids,
            plain.token_ids
        );
        let used = drafted.speculation();
        tally.turns.fetch_add(1, Ordering::Relaxed);
        tally.tokens.fetch_add(drafted.token_ids.len() as u64, Ordering::Relaxed);
        tally.drafted.fetch_add(used.draft_tokens, Ordering::Relaxed);
        tally.accepted.fetch_add(used.accepted_tokens, Ordering::Relaxed);
        history.extend(&drafted.token_ids);
        turn += 1;
    }
    Ok(())
}

/// Drains the draft worker and returns it to service, repeatedly, until the conversations have ended.
async fn give_orders(cluster: &ProcessCluster, seed: u64, tally: &Tally) -> anyhow::Result<()> {
    let admin = HttpClient::new(cluster.admin_url(ROUTER)?)?;
    let draft = cluster.worker_url("draft-0")?;
    let path = format!("/admin/workers/{}/drain", draft.trim_start_matches("http://"));
    let mut rng = StdRng::seed_from_u64(seed);
    let mut is_drained = false;
    while !tally.is_over.load(Ordering::Relaxed) || is_drained {
        sleep(ORDER_EVERY.mul_f64(rng.random_range(0.2..1.0))).await;
        let method = if is_drained { Method::DELETE } else { Method::POST };
        let answer = HttpAnswer::of(admin.request(method, &path)).await?;
        ensure!(answer.status == 200, "{path}: {} {}", answer.status, answer.text);
        is_drained = !is_drained;
        tally.orders.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}
