//! Headroom of targets: throughput beyond the present one ([`crate::headroom`]), reported when their
//! sequences change.

use speculation::Role;

use super::super::events::Report;
use super::super::lanes::Lanes;
use super::{Worker, Workers};
use crate::headroom::{MeanRound, SequenceSlots, headroom};

/// Minimum assumed length of a sequence at an idle target, in ids.
const TYPICAL_LEN: u32 = 1_024;

impl Workers {
    /// Headroom of each target whose block counts changed since they were last reported.
    pub(in crate::scheduler) fn headrooms(&mut self, lanes: &Lanes) -> Vec<Report> {
        let Self { workers, changed, .. } = self;
        let of = |key| {
            let worker = workers.get_mut(key).filter(|worker| worker.info.role == Role::Target)?;
            Some(Report::Headroom { worker: *key, tokens_per_second: worker.headroom(lanes) })
        };
        changed.iter().filter_map(of).collect()
    }
}

impl Worker {
    /// Headroom in whole tokens per second. An idle target keeps the mean round it had last.
    fn headroom(&mut self, lanes: &Lanes) -> u64 {
        if self.draining.is_active() {
            return 0;
        }
        if self.load > 0 {
            let rounds =
                self.lane_loads.iter().filter_map(|(lane, load)| Some((lanes.mean_round(*lane)?, *load)));
            self.round = mean(rounds).unwrap_or(self.round);
        }
        headroom(&self.cost, self.round, SequenceSlots { used: self.load, max: self.max_sequences() }) as u64
    }

    /// Number of sequences that fit in its KV, at the mean size reserved for its present ones.
    fn max_sequences(&self) -> u32 {
        let each = match self.load {
            0 => self.blocks_of((self.round.context as u32).max(TYPICAL_LEN)),
            load => self.reserved / u64::from(load),
        };
        if self.info.kv_blocks == 0 {
            return u32::MAX;
        }
        u32::try_from(self.credit / each.max(1)).unwrap_or(u32::MAX)
    }
}

/// Weighted mean over sequences; `None` if there are none.
fn mean(rounds: impl Iterator<Item = (MeanRound, u32)>) -> Option<MeanRound> {
    let none = MeanRound { tokens: 0.0, rows: 0.0, micros: 0.0, context: 0.0 };
    let (sum, count) = rounds.fold((none, 0.0), |(sum, count), (round, load)| {
        let load = f64::from(load);
        let sum = MeanRound {
            tokens: sum.tokens + load * round.tokens,
            rows: sum.rows + load * round.rows,
            micros: sum.micros + load * round.micros,
            context: sum.context + load * round.context,
        };
        (sum, count + load)
    });
    (count > 0.0).then(|| MeanRound {
        tokens: sum.tokens / count,
        rows: sum.rows / count,
        micros: sum.micros / count,
        context: sum.context / count,
    })
}
