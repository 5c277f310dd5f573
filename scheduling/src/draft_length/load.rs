//! What shares the workers with a lane, as plain data. It decides nothing.

use super::joint::{Joint, OthersJointly};

/// What shares the workers with a lane now.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Load {
    /// The lane's sequences at one target.
    pub sequences: u32,
    /// At all targets: in a lane round each of these has its turn.
    pub lane_sequences: u32,
    /// Rows that other lanes bring to that target's forward, and sequences.
    pub other_rows: u32,
    /// See `other_rows`.
    pub other_sequences: u32,
    /// Those of them that do not draft: their steps follow each other without a pause.
    pub other_plain_sequences: u32,
    /// Sequences of this lane, and of others that draft now, at one draft worker.
    pub draft_sequences: u32,
    /// Tokens that a sequence holds, on average.
    pub context: f64,
    /// Whether drafts may be token trees.
    pub takes_trees: bool,
    /// What the other lanes commit at that target, and how long their rounds take: rows that slow them down are not free.
    pub others: Pace,
    /// What they would do if all lanes drafted.
    pub joint: OthersJointly,
}

/// How fast rounds are.
#[derive(Debug, Clone, Copy, PartialEq, Default, serde::Serialize)]
pub struct Pace {
    /// Committed tokens.
    pub tokens_per_second: f64,
    /// Mean time of a round.
    pub round_us: f64,
}

/// A lane as those that share its workers see it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LaneView {
    /// Its sequences at all targets; not those that wait for one.
    pub sequences: u32,
    /// How far its rounds draft.
    pub k: u32,
    /// Siblings that its drafts have as leaves.
    pub num_leaves: u32,
    /// Tokens that one of them holds, on average.
    pub context: f64,
    /// How fast its rounds are ([`super::DraftLength::pace`]).
    pub pace: Pace,
    /// What it would do if all lanes drafted.
    pub joint: Joint,
}

impl Load {
    /// The load of a lane of so many sequences that has a target and a draft worker to itself.
    pub fn alone(sequences: u32, context: f64) -> Self {
        Self {
            sequences,
            lane_sequences: sequences,
            other_rows: 0,
            other_sequences: 0,
            other_plain_sequences: 0,
            draft_sequences: sequences,
            context,
            takes_trees: false,
            others: Pace::default(),
            joint: OthersJointly::default(),
        }
    }

    /// The load of lane `own` among all `lanes` of one model, which `targets` share evenly; `draft_sequences` are those of all lanes at one
    /// draft worker, whether they draft now or not.
    pub fn of(lanes: &[LaneView], own: usize, (targets, draft_sequences): (u32, u32)) -> Self {
        let (mut other_rows, mut sequences, mut plain, mut others) = (0, 0, 0, Pace::default());
        let mut drafting = lanes[own].sequences;
        let mut joint = OthersJointly::default();
        for (_, lane) in lanes.iter().enumerate().filter(|(i, lane)| *i != own && lane.sequences > 0) {
            other_rows += lane.sequences * (1 + lane.k + lane.num_leaves);
            sequences += lane.sequences;
            *(if lane.k > 0 { &mut drafting } else { &mut plain }) += lane.sequences;
            joint.add(lane.sequences, lane.joint);
            others.tokens_per_second += lane.pace.tokens_per_second / f64::from(targets);
            others.round_us += f64::from(lane.sequences) * lane.pace.round_us;
        }
        others.round_us /= f64::from(sequences.max(1));
        let all = f64::from((lanes[own].sequences + sequences).max(1));
        let at_draft = f64::from(draft_sequences) * f64::from(drafting) / all;
        Self {
            sequences: lanes[own].sequences.div_ceil(targets).max(1),
            lane_sequences: lanes[own].sequences.max(1),
            other_rows: other_rows / targets,
            other_sequences: sequences / targets,
            other_plain_sequences: plain / targets,
            draft_sequences: (at_draft.ceil() as u32).max(1),
            context: lanes[own].context,
            takes_trees: false,
            others,
            joint: joint.at_one_of(targets, draft_sequences),
        }
    }
}
