//! The effect of faults on streams: the longest stall of each stream, the number of lost streams, and of
//! those with other ids. Pure.

use std::time::Duration;

use tokio::time::Instant;

use super::fault::FaultKind;
use super::streams::{End, StreamRecord};

/// Record of one injected fault.
#[derive(Debug, Clone)]
pub struct FaultRecord {
    /// Counted from 1.
    pub number: usize,
    /// The kind of fault.
    pub kind: FaultKind,
    /// Description of the fault for people; begins with the name of the affected process, if it is one.
    pub description: String,
    /// When the fault began.
    pub start: Instant,
    /// When streams had resumed and all processes were back.
    pub recovered: Instant,
    /// Manual interventions that were needed, as an operator would have had to do.
    pub interventions: Vec<String>,
}

/// Effect of all faults of one kind.
#[derive(Debug, Clone, PartialEq)]
pub struct Impact {
    /// The kind of fault.
    pub kind: FaultKind,
    /// Number of faults.
    pub count: usize,
    /// Number of faults that needed a manual intervention.
    pub interventions: usize,
    /// The longest stall of each stream that was active when a fault began, ascending.
    pub stalls: Vec<Duration>,
    /// Number of streams that ended early.
    pub lost: usize,
    /// Number of streams with other ids.
    pub differ: usize,
    /// Number of streams that ended with their router, or were refused by a stopping router.
    pub with_router: usize,
    /// Number of these that had received tokens.
    pub begun_with_router: usize,
}

/// The impact of each kind of fault, in the order of the kinds. A stream that ended badly is attributed to
/// the last fault that began before its end.
pub fn impacts(faults: &[FaultRecord], streams: &[StreamRecord]) -> Vec<Impact> {
    let mut kinds: Vec<FaultKind> = faults.iter().map(|fault| fault.kind).collect();
    kinds.sort();
    kinds.dedup();
    let impact_of = |kind| {
        let of_kind = |fault: &&FaultRecord| fault.kind == kind;
        let ends = |is_counted: fn(&StreamRecord) -> bool| {
            let bad = streams.iter().filter(|stream| is_counted(stream));
            bad.filter(|stream| last_before(faults, stream.ended).is_some_and(|fault| fault.kind == kind))
                .count()
        };
        let mut stalls: Vec<Duration> =
            faults.iter().filter(of_kind).flat_map(|fault| stalls_of(fault, streams)).collect();
        stalls.sort();
        Impact {
            kind,
            count: faults.iter().filter(of_kind).count(),
            interventions: faults
                .iter()
                .filter(of_kind)
                .filter(|fault| !fault.interventions.is_empty())
                .count(),
            stalls,
            lost: ends(|stream| matches!(stream.end, End::Lost(_))),
            differ: ends(|stream| matches!(stream.end, End::Differs(_))),
            with_router: ends(|stream| stream.end == End::RouterDown),
            begun_with_router: ends(|stream| stream.end == End::RouterDown && stream.tokens > 0),
        }
    };
    kinds.into_iter().map(impact_of).collect()
}

/// The last fault that began before this time.
pub fn last_before(faults: &[FaultRecord], then: Instant) -> Option<&FaultRecord> {
    faults.iter().rev().find(|fault| fault.start <= then)
}

/// For each stream that was active when the fault began, its longest stall during the fault. Streams that
/// ended with their router are left out.
fn stalls_of(fault: &FaultRecord, streams: &[StreamRecord]) -> Vec<Duration> {
    let affected = streams.iter().filter(|stream| stream.opened <= fault.start && fault.start < stream.ended);
    let affected = affected.filter(|stream| stream.end != End::RouterDown);
    affected
        .map(|stream| {
            let during = |(from, to): &(Instant, Instant)| *to > fault.start && *from < fault.recovered;
            gaps(stream).filter(during).map(|(from, to)| to - from).max().unwrap_or_default()
        })
        .collect()
}

/// The intervals between successive messages with tokens of a stream, without the wait for the first. A lost
/// stream has a final one, until its end.
fn gaps(stream: &StreamRecord) -> impl Iterator<Item = (Instant, Instant)> {
    let last = matches!(stream.end, End::Lost(_)).then_some(stream.ended);
    let times: Vec<Instant> = stream.arrivals.iter().copied().chain(last).collect();
    let next: Vec<Instant> = times.iter().skip(1).copied().collect();
    times.into_iter().zip(next)
}

/// The median time between two messages of a stream while no fault was active: the length of a step for
/// clients.
pub fn median_step(faults: &[FaultRecord], streams: &[StreamRecord]) -> Option<Duration> {
    let is_undisturbed = |(from, to): &(Instant, Instant)| {
        faults.iter().all(|fault| *to <= fault.start || *from >= fault.recovered)
    };
    let mut undisturbed: Vec<Duration> =
        streams.iter().flat_map(gaps).filter(is_undisturbed).map(|(from, to)| to - from).collect();
    undisturbed.sort();
    quantile(&undisturbed, 0.5)
}

/// The quantile of ascending values by nearest rank: the smallest value such that at least this share of all
/// values is not larger.
pub fn quantile(sorted: &[Duration], share: f64) -> Option<Duration> {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn stream(zero: Instant, opened: u64, arrivals: &[u64], (ended, end): (u64, End)) -> StreamRecord {
        StreamRecord {
            number: 0,
            name: String::new(),
            router: 0,
            opened: zero + ms(opened),
            arrivals: arrivals.iter().map(|&at| zero + ms(at)).collect(),
            ended: zero + ms(ended),
            end,
            tokens: arrivals.len() as u64,
            drafted: 0,
            accepted: 0,
        }
    }

    fn fault(zero: Instant, kind: FaultKind, (start, recovered): (u64, u64)) -> FaultRecord {
        FaultRecord {
            number: 1,
            kind,
            description: String::new(),
            start: zero + ms(start),
            recovered: zero + ms(recovered),
            interventions: Vec::new(),
        }
    }

    #[test]
    fn a_stall_is_the_longest_gap_that_overlaps_the_fault() {
        let zero = Instant::now();
        let faults = [fault(zero, FaultKind::KillTarget, (100, 300))];
        let streams = [
            // 60 ms before, 150 across the beginning, 40 after it was over.
            stream(zero, 0, &[10, 70, 220, 310, 350], (350, End::Complete)),
            // One ended before the fault, the other began after it.
            stream(zero, 0, &[10, 90], (95, End::Complete)),
            stream(zero, 120, &[130, 900], (900, End::Complete)),
            // Nothing arrived after the fault, and the stream was given up.
            stream(zero, 0, &[90], (1_090, End::Lost("silent".to_owned()))),
            stream(zero, 0, &[90], (140, End::RouterDown)),
        ];
        let impacts = impacts(&faults, &streams);
        assert_eq!(impacts.len(), 1);
        assert_eq!(impacts[0].stalls, [ms(150), ms(1_000)]);
        assert_eq!((impacts[0].lost, impacts[0].differ, impacts[0].with_router), (1, 0, 1));
        assert_eq!(median_step(&faults, &streams), Some(ms(60)));
    }

    #[test]
    fn a_failed_stream_is_attributed_to_the_last_fault_before_it() {
        let zero = Instant::now();
        let faults =
            [fault(zero, FaultKind::CutDraft, (100, 110)), fault(zero, FaultKind::KillTarget, (200, 210))];
        let streams = [
            stream(zero, 0, &[], (150, End::Differs(3))),
            stream(zero, 0, &[], (250, End::Differs(3))),
            stream(zero, 0, &[], (50, End::Differs(3))),
        ];
        let impacts = impacts(&faults, &streams);
        assert_eq!(impacts.iter().map(|impact| impact.differ).collect::<Vec<_>>(), [1, 1]);
    }

    #[test]
    fn quantiles_are_of_the_values() {
        let values: Vec<Duration> = (1..=100).map(ms).collect();
        assert_eq!(quantile(&values, 0.5), Some(ms(50)));
        assert_eq!(quantile(&values, 0.99), Some(ms(99)));
        assert_eq!(quantile(&values[..1], 0.99), Some(ms(1)));
        assert_eq!(quantile(&[], 0.5), None);
    }
}
