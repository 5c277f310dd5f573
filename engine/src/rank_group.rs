//! Several ranks, one thread each, driven as one [`Runner`]. Every rank receives every command in the same
//! order. All ranks of another node take one thread, which sends them the commands ([`crate::Nodes`]). If a
//! rank panics or hangs, the whole group fails: callers get an error with the rank's number, and every later
//! call fails too.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use cpu_kernels::TokenCopy;

use crate::EngineError;
use crate::collective::RankBarrier;
use crate::draws::{DrawPlan, RankOutput};
use crate::forward_batch::{OwnedRows, ReservedRows};
use crate::rank::{Runner, panic_message};

/// Interval between checks for a lost rank.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Command to a rank thread, or to the ranks of another node.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Command {
    GrowKv(u32),
    CopyBlock(u32, u32),
    CopyTokens(Arc<[TokenCopy]>),
    Forward(Arc<(Vec<OwnedRows>, Arc<DrawPlan>)>),
    /// Cores of each rank's threads, by rank. Stays in this process.
    Pin(Arc<[(usize, Vec<usize>)]>),
}

/// A rank's thread. It ends when this is dropped and its current command is done.
struct RankThread {
    /// Number of the rank, or of the first one of another node.
    rank: usize,
    /// Number of compute threads of the rank, this one included.
    num_threads: usize,
    commands: SyncSender<Command>,
    replies: Receiver<Result<RankOutput, EngineError>>,
}

/// A group of ranks, see the module's docs.
pub(crate) struct RankGroup {
    ranks: Vec<RankThread>,
    barrier: Arc<RankBarrier>,
    /// Number of KV blocks that every rank has allocated.
    num_blocks: u32,
}

impl RankGroup {
    /// Starts a thread for each rank, given with its number. `barrier` is the barrier of their collective.
    pub(crate) fn start(
        ranks: Vec<(usize, Box<dyn Runner>)>,
        barrier: Arc<RankBarrier>,
    ) -> Result<Self, EngineError> {
        let start = |(rank, runner): (usize, Box<dyn Runner>)| {
            let (commands, inbox) = sync_channel(1);
            let (outbox, replies) = sync_channel(1);
            let num_threads = runner.num_threads();
            let barrier = Arc::clone(&barrier);
            std::thread::Builder::new()
                .name(format!("rank-{rank}"))
                .spawn(move || run_rank(rank, runner, &barrier, (&inbox, &outbox)))
                .map_err(|error| {
                    let reason = format!("its thread failed to start: {error}");
                    EngineError::RankLost { rank, reason }
                })?;
            Ok(RankThread { rank, num_threads, commands, replies })
        };
        let ranks = ranks.into_iter().map(start).collect::<Result<_, EngineError>>()?;
        Ok(Self { ranks, barrier, num_blocks: 0 })
    }

    /// Sends the command to every rank and returns the first rank's reply.
    fn run(&self, command: &Command) -> Result<RankOutput, EngineError> {
        self.barrier.check()?;
        for thread in &self.ranks {
            if thread.commands.send(command.clone()).is_err() {
                self.barrier.mark_lost(thread.rank, "its thread exited".to_owned());
            }
        }
        let mut replies = Vec::with_capacity(self.ranks.len());
        for thread in &self.ranks {
            replies.push(self.receive_reply(thread)?);
        }
        let mut replies = replies.into_iter();
        let first = replies.next().unwrap_or_else(|| Ok(RankOutput::default()))?;
        replies.try_for_each(|reply| reply.map(drop))?;
        Ok(first)
    }

    /// Waits for a rank's reply. Times out when no rank makes progress for the watchdog timeout.
    fn receive_reply(&self, thread: &RankThread) -> Result<Result<RankOutput, EngineError>, EngineError> {
        let rank = thread.rank;
        let (mut progress, mut since) = (self.barrier.progress(), Instant::now());
        loop {
            match thread.replies.recv_timeout(POLL_INTERVAL) {
                Ok(reply) => return Ok(reply),
                Err(RecvTimeoutError::Disconnected) => {
                    self.barrier.mark_lost(rank, "its thread exited".to_owned());
                }
                Err(RecvTimeoutError::Timeout) => {
                    let now = self.barrier.progress();
                    if now != progress {
                        (progress, since) = (now, Instant::now());
                    } else if since.elapsed() > self.barrier.watchdog() {
                        let reason = format!("it made no progress for {:?}", self.barrier.watchdog());
                        self.barrier.mark_lost(rank, reason);
                    }
                }
            }
            self.barrier.check()?;
        }
    }
}

impl Runner for RankGroup {
    /// Called before every forward, but it seldom needs more blocks than before: a command would wait for all
    /// threads.
    fn grow_kv(&mut self, num_blocks: u32) -> Result<(), EngineError> {
        if num_blocks <= self.num_blocks {
            return self.barrier.check();
        }
        self.run(&Command::GrowKv(num_blocks))?;
        self.num_blocks = num_blocks;
        Ok(())
    }

    fn copy_block(&mut self, from: u32, to: u32) -> Result<(), EngineError> {
        self.run(&Command::CopyBlock(from, to)).map(drop)
    }

    fn copy_tokens(&mut self, copies: &[TokenCopy]) -> Result<(), EngineError> {
        self.run(&Command::CopyTokens(copies.into())).map(drop)
    }

    fn forward(
        &mut self,
        batch: &[ReservedRows<'_>],
        draws: &Arc<DrawPlan>,
    ) -> Result<RankOutput, EngineError> {
        let batch = batch.iter().map(OwnedRows::of).collect();
        self.run(&Command::Forward(Arc::new((batch, Arc::clone(draws)))))
    }

    fn num_threads(&self) -> usize {
        self.ranks.iter().map(|rank| rank.num_threads).sum()
    }

    fn pin(&mut self, mut cores: &[usize]) -> Result<(), EngineError> {
        let mut cores_by_rank = Vec::with_capacity(self.ranks.len());
        for rank in &self.ranks {
            let (own, others) = cores.split_at(rank.num_threads.min(cores.len()));
            cores_by_rank.push((rank.rank, own.to_vec()));
            cores = others;
        }
        self.run(&Command::Pin(cores_by_rank.into())).map(drop)
    }
}

/// Loop of a rank's thread.
fn run_rank(
    rank: usize,
    mut runner: Box<dyn Runner>,
    barrier: &RankBarrier,
    (inbox, outbox): (&Receiver<Command>, &SyncSender<Result<RankOutput, EngineError>>),
) {
    while let Ok(command) = inbox.recv() {
        let reply = catch_unwind(AssertUnwindSafe(|| execute(rank, runner.as_mut(), &command)))
            .unwrap_or_else(|panic| {
                barrier.mark_lost(rank, panic_message(panic.as_ref()));
                barrier.check().map(|()| RankOutput::default())
            });
        if let (Command::Forward(_), Err(error)) = (&command, &reply) {
            // Other ranks may be waiting for this one in a collective. The first reason recorded is kept.
            barrier.mark_lost(rank, format!("its forward failed: {error}"));
        }
        if outbox.send(reply).is_err() || barrier.check().is_err() {
            return;
        }
    }
}

/// Executes a command on the runner of `rank`.
pub(crate) fn execute(
    rank: usize,
    runner: &mut dyn Runner,
    command: &Command,
) -> Result<RankOutput, EngineError> {
    match command {
        Command::GrowKv(num_blocks) => runner.grow_kv(*num_blocks).map(|()| RankOutput::default()),
        Command::CopyBlock(from, to) => runner.copy_block(*from, *to).map(|()| RankOutput::default()),
        Command::CopyTokens(copies) => runner.copy_tokens(copies).map(|()| RankOutput::default()),
        Command::Pin(cores) => {
            let own = cores.iter().find(|(of, _)| *of == rank).map(|(_, cores)| cores.as_slice());
            runner.pin(own.unwrap_or_default()).map(|()| RankOutput::default())
        }
        Command::Forward(batch) => {
            let (rows, draws) = batch.as_ref();
            let rows: Vec<ReservedRows<'_>> = rows.iter().map(OwnedRows::borrowed).collect();
            runner.forward(&rows, draws)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::collective::{Collective, shared_memory};
    use crate::forward_batch::TreePart;
    use crate::host::HostRows;

    /// A rank that does one all-reduce per row of its batch, and panics or hangs at a given one.
    struct Fake {
        end: Box<dyn Collective<HostRows>>,
        rank: usize,
        fault: Option<(usize, bool)>,
        /// Number of calls to grow KV, of all ranks.
        num_grown: Arc<AtomicU32>,
    }

    impl Runner for Fake {
        fn grow_kv(&mut self, _num_blocks: u32) -> Result<(), EngineError> {
            self.num_grown.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }

        fn copy_block(&mut self, _from: u32, _to: u32) -> Result<(), EngineError> {
            Ok(())
        }

        fn copy_tokens(&mut self, _copies: &[TokenCopy]) -> Result<(), EngineError> {
            Ok(())
        }

        fn forward(
            &mut self,
            batch: &[ReservedRows<'_>],
            _: &Arc<DrawPlan>,
        ) -> Result<RankOutput, EngineError> {
            let mut sum = HostRows::default();
            for i in 0..batch.len() {
                match self.fault {
                    Some((at, true)) if at == i => panic!("rank {} fell over", self.rank),
                    Some((at, false)) if at == i => std::thread::park(),
                    _ => {}
                }
                sum = vec![self.rank as f32; 5].into();
                self.end.all_reduce(&mut sum)?;
            }
            Ok(RankOutput { logits: sum.take(), ..RankOutput::default() })
        }
    }

    fn group(ranks: usize, fault: Option<(usize, usize, bool)>) -> RankGroup {
        counted_group(ranks, fault, &Arc::default())
    }

    fn counted_group(
        ranks: usize,
        fault: Option<(usize, usize, bool)>,
        num_grown: &Arc<AtomicU32>,
    ) -> RankGroup {
        // Only hang tests rely on the watchdog; elsewhere allow for slow ranks on a busy machine.
        let watchdog = if matches!(fault, Some((_, _, false))) { 2 } else { 100 };
        let barrier = Arc::new(RankBarrier::new(ranks, Duration::from_secs(watchdog)));
        let runner = |(rank, end)| {
            let fault = fault.and_then(|(at_rank, at, panics)| (at_rank == rank).then_some((at, panics)));
            (rank, Box::new(Fake { end, rank, fault, num_grown: Arc::clone(num_grown) }) as Box<dyn Runner>)
        };
        let runners = shared_memory(ranks, &barrier).into_iter().enumerate().map(runner).collect();
        RankGroup::start(runners, barrier).unwrap()
    }

    fn forward(group: &mut RankGroup, times: usize) -> Result<Vec<f32>, EngineError> {
        let rows = ReservedRows {
            token_ids: &[1],
            start: 0,
            block_table: &[0],
            num_logits: 0,
            tree: TreePart::default(),
        };
        Ok(group.forward(&vec![rows; times], &Arc::default())?.logits)
    }

    #[test]
    fn all_ranks_run_and_the_first_replies() {
        let mut group = group(4, None);
        for times in [1, 3, 50] {
            assert_eq!(forward(&mut group, times).unwrap(), vec![6.0; 5]);
        }
        group.grow_kv(3).unwrap();
        group.copy_block(0, 1).unwrap();
    }

    #[test]
    fn ranks_are_only_asked_for_more_kv_than_before() {
        let num_grown = Arc::default();
        let mut group = counted_group(2, None, &num_grown);
        [3, 3, 0, 2, 4, 1, 4].into_iter().for_each(|num_blocks| group.grow_kv(num_blocks).unwrap());
        assert_eq!(num_grown.load(Ordering::Relaxed), 2 * 2, "for 3 and for 4 blocks");
    }

    #[test]
    fn a_rank_that_panics_or_hangs_fails_the_group_by_name() {
        for (panics, words) in [(true, "rank 1 fell over"), (false, " 2s")] {
            for rank in [0, 1] {
                let mut group = group(2, Some((rank, 2, panics)));
                forward(&mut group, 2).unwrap();
                let error = forward(&mut group, 5).unwrap_err().to_string();
                let words = words.replace("rank 1", &format!("rank {rank}"));
                assert!(error.contains(&format!("rank {rank} is lost")) && error.contains(&words), "{error}");
                let again = forward(&mut group, 1).unwrap_err().to_string();
                assert_eq!(again, error, "lost for good");
                assert_eq!(group.grow_kv(1).unwrap_err().to_string(), error);
            }
        }
    }
}
