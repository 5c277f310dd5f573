//! Conversations of several turns over two targets: the part of a turn's prompt that an earlier turn computed
//! must be found in the prefix cache, with drafts and without. The share is printed: a target slowed down by
//! a busy machine leaves some turns to the other one, and one turn of the forty is then 1.6 percent.

use anyhow::ensure;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use tests::case::Case;
use tests::client::Client;
use tests::cluster::{Cluster, RunningWorker, WorkerKind};

/// Concurrent conversations.
const CONVERSATIONS: u32 = 8;

/// Turns per conversation.
const TURNS: u32 = 6;

/// Number of ids with which all conversations begin, like a common system prompt.
const SHARED: u32 = 96;

/// Number of ids of a conversation's first message, and of every later one.
const OPENING: u32 = 224;
const MESSAGE: u32 = 40;

/// Output tokens per turn.
const ANSWER: u32 = 24;

/// Tokens per KV block of these workers: only whole blocks are shared.
const BLOCK: u64 = 16;

/// The targets' vocabulary without the special tokens at its beginning.
const VOCABULARY: std::ops::Range<u32> = 64..4_000;

/// Prompt tokens that earlier turns of the same conversation computed, and those found in the cache.
#[derive(Debug, Clone, Copy, Default)]
struct Reuse {
    computed: u64,
    cached: u64,
}

impl Reuse {
    fn share(self) -> f64 {
        self.cached as f64 / self.computed as f64
    }
}

/// Ids that differ from those of any other `name`.
fn message(name: u32, len: u32) -> impl Iterator<Item = u32> {
    let span = VOCABULARY.end - VOCABULARY.start;
    (0..len).map(move |i| {
        let hash = (name.wrapping_mul(0x9e37_79b1) ^ i).wrapping_mul(0x85eb_ca6b);
        VOCABULARY.start + (hash >> 7) % span
    })
}

/// Runs one conversation turn by turn, with `k` drafted tokens per round.
async fn converse(client: &Client, name: u32, k: u32) -> anyhow::Result<Reuse> {
    let mut reuse = Reuse::default();
    let mut prompt: Vec<u32> = message(0, SHARED).chain(message(1_000 * name, OPENING)).collect();
    // The last id of an answer is drawn but never run, so it has no KV.
    let mut computed = 0;
    for turn in 1..=TURNS {
        let mut case = Case::new(format!("conversation {name}, turn {turn}"), prompt.clone(), 0.7);
        (case.max_tokens, case.ignore_eos, case.seed) = (ANSWER, true, name.into());
        let answer = client.ask(&case.with_k(k)).await?;
        if turn > 1 {
            let whole_blocks = computed / BLOCK * BLOCK;
            reuse.computed += whole_blocks;
            let cached = u64::from(answer.usage.cached_tokens);
            // If a busy machine caused a step to be sent twice, the second finds what the first computed of
            // the rest; that is not counted.
            ensure!(
                cached <= whole_blocks,
                "conversation {name}, turn {turn}: {cached} of {whole_blocks} were cached"
            );
            reuse.cached += cached;
        }
        computed = (prompt.len() + answer.token_ids.len() - 1) as u64;
        prompt.extend(answer.token_ids);
        prompt.extend(message(1_000 * name + turn, MESSAGE));
    }
    Ok(reuse)
}

/// Runs all conversations concurrently; `first` is the first one's name.
async fn converse_all(client: &Client, first: u32, k: u32) -> anyhow::Result<Reuse> {
    let names = first..first + CONVERSATIONS;
    let all: Vec<Reuse> = stream::iter(names)
        .map(|name| converse(client, name, k))
        .buffer_unordered(CONVERSATIONS as usize)
        .try_collect()
        .await?;
    let sum = |of: fn(&Reuse) -> u64| all.iter().map(of).sum();
    Ok(Reuse { computed: sum(|reuse| reuse.computed), cached: sum(|reuse| reuse.cached) })
}

async fn rows(worker: &RunningWorker) -> anyhow::Result<u64> {
    Ok(worker.metrics().await?.sum("outrider_worker_rows_total"))
}

#[tokio::test(flavor = "multi_thread")]
async fn later_turns_reuse_the_kv_of_earlier_turns_with_and_without_drafts() -> anyhow::Result<()> {
    let (cluster, first, _draft) = Cluster::of_pair(WorkerKind::Draft).await?;
    let second = cluster.add(WorkerKind::Target).await?;
    let client = cluster.client().await?;
    let plain = converse_all(&client, 1, 0).await?;
    let drafted = converse_all(&client, 101, 4).await?;
    for (name, reuse) in [("k = 0", plain), ("k = 4", drafted)] {
        let Reuse { computed, cached } = reuse;
        println!(
            "{name}: {cached} of {computed} tokens that could be cached were: {:.1}%",
            100.0 * reuse.share()
        );
    }
    let (rows_of_first, rows_of_second) = (rows(&first).await?, rows(&second).await?);
    // Not asserted: to reuse prefixes, one target may have more sequences than the other by up to the number
    // of conversations.
    println!("rows: {rows_of_first} at one target, {rows_of_second} at the other");
    // By chance it would be half.
    ensure!(plain.share() > 0.75 && drafted.share() > 0.75, "too little was found: {plain:?}, {drafted:?}");
    cluster.stop().await
}
