//! Load on the workers of a lane, as plain data. It decides nothing.

use super::joint::{JointChoice, JointLoad};

/// The lanes and sequences that share a lane's workers.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Load {
    /// Number of the lane's sequences at one target.
    pub sequences: u32,
    /// Number at all targets; each of them begins one round per lane round.
    pub lane_sequences: u32,
    /// Rows of other lanes in that target's forward.
    pub other_rows: u32,
    /// Number of sequences of other lanes at that target.
    pub other_sequences: u32,
    /// Number of these that do not draft; their steps follow each other without a pause.
    pub other_plain_sequences: u32,
    /// Sequences of this lane, and of others that draft now, at one draft worker.
    pub draft_sequences: u32,
    /// Number of ids that the draft worker lacks of the sequence that begins the lane round.
    pub draft_lag: u32,
    /// Mean number of tokens per sequence.
    pub context: f64,
    /// Whether the draft worker and the target take turns on the same CPU cores.
    pub shares_cores: bool,
    /// Whether drafts may be token trees.
    pub supports_trees: bool,
    /// Mean round time of the other lanes' sequences at that target, to price rows that delay them.
    pub others_round_us: f64,
    /// Choices of the other lanes if all lanes drafted.
    pub joint: JointLoad,
}

/// Speed of rounds.
#[derive(Debug, Clone, Copy, PartialEq, Default, serde::Serialize)]
pub struct Pace {
    /// Committed tokens per second.
    pub tokens_per_second: f64,
    /// Mean round time.
    pub round_us: f64,
}

/// A lane as seen by lanes that share its workers.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LaneView {
    /// Number of its sequences at the target.
    pub sequences: u32,
    /// Its draft length.
    pub k: u32,
    /// Tokens of its drafts beside the chain.
    pub num_leaves: u32,
    /// Mean number of tokens per sequence.
    pub context: f64,
    /// Its mean round time ([`super::DraftLength::pace`]).
    pub round_us: f64,
    /// Its choice if all lanes drafted.
    pub joint: JointChoice,
}

impl Load {
    /// Load of a lane with this number of sequences that has a target and a draft worker to itself.
    pub fn alone(sequences: u32, context: f64) -> Self {
        Self {
            sequences,
            lane_sequences: sequences,
            other_rows: 0,
            other_sequences: 0,
            other_plain_sequences: 0,
            draft_sequences: sequences,
            draft_lag: 0,
            context,
            shares_cores: false,
            supports_trees: false,
            others_round_us: 0.0,
            joint: JointLoad::default(),
        }
    }

    /// Load of lane `own` among the `lanes` at one target. `draft_sequences` is the number of sequences of all
    /// lanes at one draft worker, whether they draft now or not.
    pub fn of(lanes: &[LaneView], own: usize, draft_sequences: u32) -> Self {
        let (mut other_rows, mut sequences, mut plain) = (0, 0, 0);
        // Lanes that have just changed k have no round time yet.
        let (mut timed_sequences, mut others_round_us) = (0, 0.0);
        let mut drafting = lanes[own].sequences;
        let mut joint = JointLoad::default();
        for (_, lane) in lanes.iter().enumerate().filter(|(i, lane)| *i != own && lane.sequences > 0) {
            other_rows += lane.sequences * (1 + lane.k + lane.num_leaves);
            sequences += lane.sequences;
            *(if lane.k > 0 { &mut drafting } else { &mut plain }) += lane.sequences;
            joint.add(lane.sequences, lane.joint);
            timed_sequences += if lane.round_us > 0.0 { lane.sequences } else { 0 };
            others_round_us += f64::from(lane.sequences) * lane.round_us;
        }
        others_round_us /= f64::from(timed_sequences.max(1));
        let all = f64::from((lanes[own].sequences + sequences).max(1));
        let at_draft = f64::from(draft_sequences) * f64::from(drafting) / all;
        Self {
            sequences: lanes[own].sequences.max(1),
            lane_sequences: lanes[own].sequences.max(1),
            other_rows,
            other_sequences: sequences,
            other_plain_sequences: plain,
            draft_sequences: (at_draft.ceil() as u32).max(1),
            draft_lag: 0,
            context: lanes[own].context,
            shares_cores: false,
            supports_trees: false,
            others_round_us,
            joint: JointLoad { draft_sequences: draft_sequences.max(1), ..joint },
        }
    }
}
