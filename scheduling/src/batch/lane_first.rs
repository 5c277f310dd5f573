//! Whether one lane's rows go first, in a forward of their own, or all lanes share one forward.
//!
//! Sharing is the rule: weights are read once for all rows. Where each row costs its own time (beyond the
//! knee of the step curve), a lane that expects many tokens of few rows is answered sooner by going first,
//! and the others lose little, because their rows would have run in that time anyway. This is Smith's rule
//! for the order of jobs with the price of a second forward added: the time that two forwards take longer
//! than one delays every sequence's next round.

/// A forward of its own must reduce the weighted waiting time by this share.
const SEPARATE_MARGIN: f64 = 0.02;

/// Which lanes share a target's forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LaneSharing {
    /// All, except where the cost model says that one should go first: what workers do.
    #[default]
    ByCost,
    /// All, always. For comparison.
    Shared,
    /// None: each lane has forwards of its own, in turns. For comparison.
    Apart,
}

/// The ready rows of one lane.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LaneRows {
    /// Which lane.
    pub lane: u32,
    /// Its rows.
    pub rows: u32,
    /// Tokens that these rows are expected to commit.
    pub expected_tokens: f64,
    /// Whether an earlier forward went without some of them: a lane is passed over at most once.
    pub passed_over: bool,
    /// Whether some of them are decode steps: these are never passed over for another lane's drafts.
    pub has_decode: bool,
}

/// The lane that should go first and alone because that answers expected tokens sooner on the whole;
/// `step_us` predicts a forward of so many rows.
pub fn lane_first(lanes: &[LaneRows], step_us: impl Fn(u32) -> f64) -> Option<u32> {
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
    let may_go = |lane: &&LaneRows| lanes.iter().all(|other| other.lane == lane.lane || !other.has_decode);
    let best = lanes
        .iter()
        .filter(may_go)
        .map(|lane| (lane.lane, apart(lane)))
        .min_by(|a, b| a.1.total_cmp(&b.1))?;
    (best.1 < (1.0 - SEPARATE_MARGIN) * shared).then_some(best.0)
}

/// Sums the rows of single steps by lane, in order of first appearance.
pub fn by_lane(steps: impl Iterator<Item = LaneRows>) -> Vec<LaneRows> {
    let mut lanes: Vec<LaneRows> = Vec::new();
    for step in steps {
        match lanes.iter_mut().find(|lane| lane.lane == step.lane) {
            Some(lane) => {
                lane.rows += step.rows;
                lane.expected_tokens += step.expected_tokens;
                lane.passed_over |= step.passed_over;
                lane.has_decode |= step.has_decode;
            }
            None => lanes.push(step),
        }
    }
    lanes
}

#[cfg(test)]
mod tests {
    use super::*;

    const LANES: [LaneRows; 2] = [
        LaneRows { lane: 1, rows: 32, expected_tokens: 40.0, passed_over: false, has_decode: false },
        LaneRows { lane: 2, rows: 160, expected_tokens: 60.0, passed_over: false, has_decode: false },
    ];

    #[test]
    fn lanes_share_a_flat_forward_and_separate_where_each_row_costs_its_own() {
        assert_eq!(lane_first(&LANES, |_| 10_000.0), None);
        assert_eq!(lane_first(&LANES, |rows| 100.0 * f64::from(rows)), Some(1));
        assert_eq!(lane_first(&LANES, |rows| 20_000.0 + 100.0 * f64::from(rows)), None);
        let passed_over = LANES.map(|lane| LaneRows { passed_over: lane.lane == 2, ..lane });
        assert_eq!(lane_first(&passed_over, |rows| 100.0 * f64::from(rows)), None, "it waited once already");
        let decode = LANES.map(|lane| LaneRows { has_decode: lane.lane == 2, ..lane });
        assert_eq!(
            lane_first(&decode, |rows| 100.0 * f64::from(rows)),
            Some(2),
            "decode steps wait for no draft"
        );
        assert_eq!(lane_first(&LANES[..1], |rows| 100.0 * f64::from(rows)), None);
    }
}
