//! Late batch formation: whether a forward that could leave now waits a moment for sequences that are about to come back.
//!
//! A worker takes whatever waits into its next forward. Sequences that once missed one run apart from then on, each part waiting for the
//! other's forward, and where half the rows cost as much as all of them, everybody goes at half the speed. So a worker remembers how
//! long each sequence stays away between two steps, and holds a forward back where the time that all lose together by waiting is
//! less than what they lose by missing each other.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::cost::micros;

/// What the last absence of a sequence counts for in what is expected of the next.
const ABSENCE_WEIGHT: f64 = 0.75;

/// A sequence that is later than expected by more than this part of a forward is not waited for.
const OVERDUE_SHARE: f64 = 0.25;

/// Numbers of sequences to wait for that are compared; between them the answer hardly differs.
const CANDIDATES: usize = 8;

/// Sequences that could go now.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Ready {
    /// How many.
    pub sequences: u32,
    /// Rows that they bring.
    pub rows: u32,
    /// How many more that draft belong to the same forward (`super::groups`).
    pub room: u32,
    /// Without how many of these its group is not complete.
    pub missing: u32,
    /// For how long it pays to wait for those.
    pub patience_us: f64,
}

/// The sequences whose rounds draft, here and away.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Drafting {
    /// How many.
    pub sequences: u32,
    /// Rows that they bring together.
    pub rows: u32,
    /// How long one of them stays away, on average, in microseconds.
    pub away_us: f64,
    /// How long their rounds take as they are now, from one step to the next.
    pub round_us: f64,
}

/// A sequence that is expected back.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Awaited {
    /// Microseconds from now; negative where it is overdue.
    pub in_us: f64,
    /// Rows that it will bring.
    pub rows: u32,
}

/// When a worker's sequences come back. `K` names a sequence.
#[derive(Debug, Clone)]
pub struct Returns<K> {
    sequences: BTreeMap<K, Absence>,
}

#[derive(Debug, Clone, Copy)]
struct Absence {
    /// Microseconds from an answer to the next step, smoothed.
    usual_us: Option<f64>,
    /// When it was answered, while it is away.
    since: Option<Duration>,
    /// When its last step came, and microseconds from the one before to that.
    arrived_at: Duration,
    round_us: f64,
    rows: u32,
}

impl<K> Default for Returns<K> {
    fn default() -> Self {
        Self { sequences: BTreeMap::new() }
    }
}

impl<K: Ord> Returns<K> {
    /// A step of the sequence came, with so many rows.
    pub fn arrived(&mut self, key: K, now: Duration, rows: u32) {
        let first = Absence { usual_us: None, since: None, arrived_at: now, round_us: 0.0, rows };
        let known = self.sequences.entry(key).or_insert(first);
        known.rows = rows;
        known.round_us = micros(now.saturating_sub(known.arrived_at));
        known.arrived_at = now;
        if let Some(since) = known.since.take() {
            let away = micros(now.saturating_sub(since));
            let usual = known.usual_us.unwrap_or(away);
            known.usual_us = Some(usual + ABSENCE_WEIGHT * (away - usual));
        }
    }

    /// The sequence was answered.
    pub fn answered(&mut self, key: &K, now: Duration) {
        if let Some(known) = self.sequences.get_mut(key) {
            known.since = Some(now);
        }
    }

    /// The sequence does not come back.
    pub fn forget(&mut self, key: &K) {
        self.sequences.remove(key);
    }

    /// The sequences whose last step brought a draft.
    pub fn drafting(&self) -> Drafting {
        let mut found = Drafting::default();
        for known in self.sequences.values().filter(|known| known.rows > 1) {
            let Some(usual_us) = known.usual_us else { continue };
            found.sequences += 1;
            found.rows += known.rows;
            found.away_us += usual_us;
            found.round_us += known.round_us;
        }
        found.away_us /= f64::from(found.sequences.max(1));
        found.round_us /= f64::from(found.sequences.max(1));
        found
    }

    /// Those that are away and expected back before `horizon_us` from now, soonest first.
    pub fn awaited(&self, now: Duration, horizon_us: f64) -> Vec<Awaited> {
        let expected = |absence: &Absence| {
            let away = micros(now.saturating_sub(absence.since?));
            Some(Awaited { in_us: absence.usual_us? - away, rows: absence.rows })
        };
        let near =
            |awaited: &Awaited| awaited.in_us < horizon_us && awaited.in_us > -OVERDUE_SHARE * horizon_us;
        let mut list: Vec<Awaited> = self.sequences.values().filter_map(expected).filter(near).collect();
        list.sort_by(|a, b| a.in_us.total_cmp(&b.in_us));
        list
    }

    /// For how long the forward of `ready` should wait for others; `None`: it leaves now. `waited` says how long it has waited already,
    /// `step_us` what a forward of so many rows takes.
    pub fn hold(
        &self,
        now: Duration,
        (ready, waited): (Ready, Duration),
        step_us: impl Fn(u32) -> f64,
    ) -> Option<Duration> {
        if ready.sequences == 0 {
            return None;
        }
        if let Some(wait_us) = self.completing_us(now, (ready, waited)) {
            return Some(Duration::from_secs_f64(wait_us / 1e6));
        }
        // Who comes later than a forward takes loses nothing by it; nor does a forward wait longer than it would take.
        let alone_us = step_us(ready.rows);
        let left_us = alone_us.max(ready.patience_us) - micros(waited);
        if left_us <= 0.0 {
            return None;
        }
        let mut awaited = self.awaited(now, left_us.min(alone_us));
        let mut room = ready.room;
        awaited.retain(|awaited| {
            let fits = awaited.rows <= 1 || room > 0;
            room = if awaited.rows > 1 { room.saturating_sub(1) } else { room };
            fits
        });
        let wait_us = best_wait_us(ready, &awaited, step_us)?;
        // An overdue one is given what is left of its time.
        let wait_us = if wait_us > 0.0 { wait_us } else { OVERDUE_SHARE * left_us };
        Some(Duration::from_secs_f64(wait_us / 1e6))
    }

    /// How long until the group of `ready` is complete, if that pays.
    fn completing_us(&self, now: Duration, (ready, waited): (Ready, Duration)) -> Option<f64> {
        let left_us = ready.patience_us - micros(waited);
        if ready.missing == 0 || left_us <= 0.0 {
            return None;
        }
        let drafting = self.awaited(now, left_us).into_iter().filter(|awaited| awaited.rows > 1);
        let last = drafting.map(|awaited| awaited.in_us).nth(ready.missing as usize - 1)?;
        Some(if last > 0.0 { last } else { OVERDUE_SHARE * left_us })
    }
}

/// How long to wait for how many of `awaited` (soonest first) so that all sequences together are answered soonest; `None`: not at all.
fn best_wait_us(ready: Ready, awaited: &[Awaited], step_us: impl Fn(u32) -> f64) -> Option<f64> {
    let total = awaited.len();
    if total == 0 {
        return None;
    }
    let rows_of = |part: &[Awaited]| part.iter().map(|awaited| awaited.rows).sum::<u32>();
    // Time lost by all together where the first `joined` are waited for.
    let lost_us = |joined: usize| {
        let (with, without) = awaited.split_at(joined);
        let starts = with.last().map_or(0.0, |last| last.in_us.max(0.0));
        let ends = starts + step_us(ready.rows + rows_of(with));
        let next = if without.is_empty() { 0.0 } else { step_us(rows_of(without)) };
        let of_with: f64 = with.iter().map(|awaited| ends - awaited.in_us.max(0.0)).sum();
        let of_without: f64 =
            without.iter().map(|awaited| (ends - awaited.in_us.max(0.0)).max(0.0) + next).sum();
        f64::from(ready.sequences) * ends + of_with + of_without
    };
    let candidates = (1..=CANDIDATES).map(|part| (total * part).div_ceil(CANDIDATES));
    let (best, lost) = candidates
        .map(|joined| (joined, lost_us(joined)))
        .min_by(|a, b| a.1.total_cmp(&b.1))
        .expect("there is at least one candidate");
    (lost < lost_us(0)).then(|| awaited[best - 1].in_us.max(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn flat(_: u32) -> f64 {
        10_000.0
    }

    fn steep(rows: u32) -> f64 {
        1_000.0 * f64::from(rows)
    }

    /// Eight sequences that stay away for 5 ms and were answered at `answered`; the last two, one millisecond later.
    fn returns(answered: Duration) -> Returns<u32> {
        let mut returns = Returns::default();
        for key in 0..8 {
            let late = if key < 6 { Duration::ZERO } else { MS };
            returns.arrived(key, Duration::ZERO, 1);
            returns.answered(&key, MS);
            returns.arrived(key, 6 * MS, 1);
            returns.answered(&key, answered + late);
        }
        returns
    }

    fn ready(sequences: u32) -> (Ready, Duration) {
        (Ready { sequences, rows: sequences, room: u32::MAX, ..Ready::default() }, Duration::ZERO)
    }

    #[test]
    fn a_flat_forward_waits_for_those_that_are_about_to_come() {
        let returns = returns(10 * MS);
        let hold = |now, ready| returns.hold(now, ready, flat).map(|wait| wait.as_micros());
        assert_eq!(hold(15 * MS, ready(6)), Some(1_000), "the other two come a millisecond later");
        assert_eq!(hold(11 * MS, ready(1)), Some(5_000));
        assert_eq!(hold(11 * MS, ready(0)), None, "nobody is there");
        assert_eq!(hold(11 * MS, ready(40)), None, "forty would wait for eight");
        assert_eq!(hold(30 * MS, ready(6)), None, "whoever is that late does not come");
        let waited = (Ready { sequences: 6, rows: 6, room: u32::MAX, ..Ready::default() }, 10 * MS);
        assert_eq!(hold(15 * MS, waited), None, "it has waited as long as it would have run");
    }

    #[test]
    fn a_group_waits_until_it_is_complete_where_that_pays() {
        let mut returns = returns(10 * MS);
        (0..8).for_each(|key| returns.arrived(key, 15 * MS, 3));
        (0..4).for_each(|key| returns.answered(&key, 20 * MS));
        let hold = |missing, patience_us| {
            let ready = Ready { sequences: 4, rows: 12, room: u32::MAX, missing, patience_us };
            returns.hold(21 * MS, (ready, Duration::ZERO), steep).map(|wait| wait.as_millis())
        };
        assert_eq!(hold(0, 0.0), None, "by itself none of these is worth waiting for");
        assert_eq!(hold(3, 10_000.0), Some(4));
        assert_eq!(hold(3, 2_000.0), None, "it would take longer than it pays");
        assert_eq!(hold(5, 10_000.0), None, "so many are not away");
    }

    #[test]
    fn where_each_row_costs_alike_nobody_waits() {
        assert_eq!(returns(10 * MS).hold(13 * MS, ready(8), steep), None);
    }

    #[test]
    fn a_closed_sequence_is_not_waited_for() {
        let mut returns = returns(10 * MS);
        (0..8).for_each(|key| returns.forget(&key));
        assert_eq!(returns.hold(14 * MS, ready(1), flat), None);
    }
}
