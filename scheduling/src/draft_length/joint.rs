//! Joint choice of lanes that share a target. Where every row costs time, as on CPUs, the first lane that
//! drafts would delay the others, which is not allowed ([`super::DraftLength`]). All may still be faster if
//! all draft. So each lane computes its draft length and speed for that case, and the lanes begin to draft if
//! none becomes slower. They go on until one is clearly slower: a prediction near that limit would let them
//! stop and begin again all the time, and while only some of them draft, all are slow.
//!
//! With many lanes one usually becomes slower, because the others' drafts are too long for it. Then all draft
//! one token each if that makes every lane faster.

use super::{DraftLength, Load, Outlook};
use crate::cost::WorkerCost;

/// A lane's choice if all lanes that share its target drafted.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct JointChoice {
    /// Its draft length; 0: drafting is not worth enough.
    pub k: u32,
    /// Tokens that its drafts would have beside the chain.
    pub num_leaves: u32,
    /// Its speed then, divided by its best speed alone.
    pub gain: f64,
    /// Its speed if each lane drafted one token, divided by its best speed alone.
    pub one_token_gain: f64,
}

impl Default for JointChoice {
    /// Value of a lane before its first round.
    fn default() -> Self {
        Self { k: 0, num_leaves: 0, gain: 1.0, one_token_gain: 1.0 }
    }
}

impl JointChoice {
    /// Choice of a lane that other lanes must not delay.
    pub(crate) const NO_JOINT_DRAFTING: Self = Self { k: 0, num_leaves: 0, gain: 0.0, one_token_gain: 0.0 };
}

/// How the lanes of a target draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Drafting {
    /// Each lane as far as it delays no other.
    #[default]
    Separate,
    /// Each lane one token.
    OneToken,
    /// Each lane its joint choice.
    Joint,
}

/// Choices of the other lanes at a target if all lanes drafted.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct JointLoad {
    /// Their rows in the target's forward.
    pub rows: u32,
    /// Number of their sequences that would not draft.
    pub plain_sequences: u32,
    /// Sequences at one draft worker, including the lane's own.
    pub draft_sequences: u32,
    /// Smallest gain of the other lanes, at most 1.
    pub least_gain: f64,
    /// Smallest gain of the other lanes if each lane drafted one token; `None` without other lanes.
    pub least_one_token_gain: Option<f64>,
}

impl Default for JointLoad {
    fn default() -> Self {
        Self { rows: 0, plain_sequences: 0, draft_sequences: 1, least_gain: 1.0, least_one_token_gain: None }
    }
}

impl JointLoad {
    /// Adds another lane with this number of sequences.
    pub(super) fn add(&mut self, sequences: u32, joint: JointChoice) {
        self.rows += sequences * (1 + joint.k + joint.num_leaves);
        self.plain_sequences += if joint.k == 0 { sequences } else { 0 };
        self.least_gain = self.least_gain.min(joint.gain);
        let least = self.least_one_token_gain.unwrap_or(f64::INFINITY);
        self.least_one_token_gain = Some(least.min(joint.one_token_gain));
    }
}

impl Load {
    /// The same load if the other lanes drafted in this way; [`Drafting::Separate`]: as they do now.
    pub(super) fn where_others_draft(&self, drafting: Drafting) -> Self {
        let JointLoad { rows, plain_sequences, draft_sequences, .. } = self.joint;
        let (other_rows, other_plain_sequences) = match drafting {
            Drafting::Separate => return *self,
            Drafting::OneToken => (2 * self.other_sequences, 0),
            Drafting::Joint => (rows, plain_sequences),
        };
        // One token each has no leaves: every lane would fill the rows that it takes for free.
        let supports_trees = self.supports_trees && drafting != Drafting::OneToken;
        Self { other_rows, other_plain_sequences, draft_sequences, supports_trees, ..*self }
    }

    /// The same load if they made their joint choices, with one drafted token for lanes that would not draft.
    fn all_drafting(&self) -> Self {
        let JointLoad { rows, plain_sequences, .. } = self.joint;
        let joint = self.where_others_draft(Drafting::Joint);
        Self { other_rows: rows + plain_sequences, other_plain_sequences: 0, ..joint }
    }

    /// The same load if no other lane drafted.
    fn without_drafts(&self) -> Self {
        Self { other_rows: self.other_sequences, other_plain_sequences: self.other_sequences, ..*self }
    }
}

impl DraftLength {
    /// The lane's choice if all lanes of its target drafted, from its latest lane round.
    pub fn joint(&self) -> JointChoice {
        self.joint
    }

    /// Computes the joint choice, and applies it, or one token each, if no lane is slower by it.
    pub(super) fn apply_joint_choice(&mut self, load: &Load, workers: (&WorkerCost, &WorkerCost)) {
        if load.other_sequences == 0 {
            self.joint = JointChoice::default();
            self.drafting = Drafting::Separate;
            return;
        }
        let plain = self.plain_speed(&load.without_drafts(), workers);
        let alone = self.outlook.iter().filter(|at| !at.delays_others());
        let alone = alone.map(|at| at.tokens_per_second).fold(plain, f64::max);
        // Whether other lanes would draft depends on this lane, so it reports its choice for the case that
        // they do.
        let all_drafting = self.compute_outlook(&load.all_drafting(), workers);
        let k = self.best_for_all(&all_drafting, load, plain);
        let jointly = match load.joint.plain_sequences {
            0 => all_drafting,
            _ => self.compute_outlook(&load.where_others_draft(Drafting::Joint), workers),
        };
        let one_token = self.compute_outlook(&load.where_others_draft(Drafting::OneToken), workers);
        let gain = |at: &Outlook| at.tokens_per_second / alone;
        let at = &jointly[k as usize];
        self.joint = JointChoice {
            k,
            num_leaves: at.num_leaves,
            gain: gain(at),
            one_token_gain: one_token.get(1).map_or(0.0, gain),
        };
        self.drafting = self.next_drafting(&load.joint);
        let (mut outlook, longest) = match self.drafting {
            Drafting::Separate => return,
            Drafting::OneToken => (one_token, 1),
            Drafting::Joint => (jointly, k as usize),
        };
        // The other lanes accept a delay up to that k.
        outlook[..=longest].iter_mut().for_each(|at| at.others_delay = 0.0);
        self.outlook = outlook;
    }

    /// How lanes draft: the joint choice if no lane is slower by it than alone, else one token each if all
    /// are faster by it, else separately. They go on with either of the first two until a lane is clearly
    /// slower.
    fn next_drafting(&self, others: &JointLoad) -> Drafting {
        let loss_max = match self.drafting {
            Drafting::Joint => self.rules.unconfirmed_hysteresis,
            _ => 0.0,
        };
        if self.joint.k > 0 && self.joint.gain.min(others.least_gain) >= 1.0 - loss_max {
            return Drafting::Joint;
        }
        let margin = match self.drafting {
            Drafting::OneToken => -self.rules.hysteresis,
            _ => self.rules.hysteresis,
        };
        let least_gain = others.least_one_token_gain.unwrap_or(f64::INFINITY).min(self.joint.one_token_gain);
        if least_gain >= 1.0 + margin { Drafting::OneToken } else { Drafting::Separate }
    }

    /// The k that maximises the sum of the logarithms of all sequences' speeds: drafts make the lane's own
    /// sequences faster, and their rows delay the others. 0 if the lane's own speed does not exceed `plain`
    /// clearly or, once it did, is clearly below it.
    fn best_for_all(&self, outlook: &[Outlook], load: &Load, plain: f64) -> u32 {
        let others_each = f64::from(load.other_sequences) / f64::from(load.sequences.max(1));
        let worth = |at: &Outlook| at.tokens_per_second.ln() - others_each * at.others_delay.ln_1p();
        let best =
            outlook.iter().max_by(|a, b| worth(a).total_cmp(&worth(b))).expect("the outlook contains k = 0");
        let margin = self.rules.unconfirmed_hysteresis * if self.joint.k > 0 { -1.0 } else { 1.0 };
        if best.tokens_per_second > (1.0 + margin) * plain { best.k } else { 0 }
    }

    /// Speed at k = 0.
    fn plain_speed(&self, load: &Load, (target, draft): (&WorkerCost, &WorkerCost)) -> f64 {
        let round_us = self.prices(load, target, draft).round(0, 1.0).round_us() * self.residuals.factor(0);
        f64::from(load.sequences.max(1)) * 1e6 / round_us.max(1.0)
    }
}
