//! Whether a lane's rows go first, in a forward of their own, or share one with all others.
//!
//! Sharing is the rule: weights are read once for all rows. Where each row costs its own time (past the knee), those that promise many
//! tokens for few rows are answered sooner by going first, and the others lose nothing, for their rows would have been
//! run meanwhile anyway. This is Smith's rule for the order of jobs, with the price of a second forward in it: the time that two take longer
//! than one is lost to everybody, in the rounds after these.

/// A forward of its own must promise this much less weighted waiting.
const SEPARATE_MARGIN: f64 = 0.02;

/// What one lane has ready.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LaneRows {
    /// Which lane.
    pub lane: u32,
    /// Its rows.
    pub rows: u32,
    /// Tokens that it is expected to commit with them.
    pub expected_tokens: f64,
    /// Whether the last forward went without some of them: they go now, so that no lane waits for more than one forward of others.
    pub passed_over: bool,
    /// Whether some of them bring no draft: these are never passed over for another lane's drafts.
    pub is_plain: bool,
}

/// The lane whose rows should go first and alone, if that answers expected tokens sooner on the whole; `step_us` says what a
/// forward of so many rows takes.
pub fn first_alone(lanes: &[LaneRows], step_us: impl Fn(u32) -> f64) -> Option<u32> {
    if lanes.len() < 2 || lanes.iter().any(|lane| lane.passed_over) {
        return None;
    }
    let rows: u32 = lanes.iter().map(|lane| lane.rows).sum();
    let tokens: f64 = lanes.iter().map(|lane| lane.expected_tokens).sum();
    let shared = tokens * step_us(rows);
    let apart = |lane: &LaneRows| {
        let (first, then) = (step_us(lane.rows), step_us(rows - lane.rows));
        let lost = (first + then - step_us(rows)).max(0.0);
        lane.expected_tokens * first + (tokens - lane.expected_tokens) * (first + then) + tokens * lost
    };
    let may_go = |lane: &&LaneRows| lanes.iter().all(|other| other.lane == lane.lane || !other.is_plain);
    let best = lanes
        .iter()
        .filter(may_go)
        .map(|lane| (lane.lane, apart(lane)))
        .min_by(|a, b| a.1.total_cmp(&b.1))?;
    (best.1 < (1.0 - SEPARATE_MARGIN) * shared).then_some(best.0)
}

/// What each lane has ready, of sequences one after the other: lane, rows, expected tokens, whether passed over.
pub fn by_lane(ready: impl Iterator<Item = LaneRows>) -> Vec<LaneRows> {
    let mut lanes: Vec<LaneRows> = Vec::new();
    for one in ready {
        match lanes.iter_mut().find(|lane| lane.lane == one.lane) {
            Some(lane) => {
                lane.rows += one.rows;
                lane.expected_tokens += one.expected_tokens;
                lane.passed_over |= one.passed_over;
                lane.is_plain |= one.is_plain;
            }
            None => lanes.push(one),
        }
    }
    lanes
}

#[cfg(test)]
mod tests {
    use super::*;

    const LANES: [LaneRows; 2] = [
        LaneRows { lane: 1, rows: 32, expected_tokens: 40.0, passed_over: false, is_plain: false },
        LaneRows { lane: 2, rows: 160, expected_tokens: 60.0, passed_over: false, is_plain: false },
    ];

    #[test]
    fn lanes_share_a_flat_forward_and_part_where_each_row_costs_its_own() {
        assert_eq!(first_alone(&LANES, |_| 10_000.0), None);
        assert_eq!(first_alone(&LANES, |rows| 100.0 * f64::from(rows)), Some(1));
        assert_eq!(first_alone(&LANES, |rows| 20_000.0 + 100.0 * f64::from(rows)), None);
        let passed_over = LANES.map(|lane| LaneRows { passed_over: lane.lane == 2, ..lane });
        assert_eq!(first_alone(&passed_over, |rows| 100.0 * f64::from(rows)), None, "it waited once already");
        let plain = LANES.map(|lane| LaneRows { is_plain: lane.lane == 2, ..lane });
        assert_eq!(
            first_alone(&plain, |rows| 100.0 * f64::from(rows)),
            Some(2),
            "plain rounds wait for no draft"
        );
        assert_eq!(first_alone(&LANES[..1], |rows| 100.0 * f64::from(rows)), None);
    }
}
