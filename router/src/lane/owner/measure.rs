//! What rounds and steps took, told to whoever predicts the next ones: the draft workers' health, the workers' costs, the lane's
//! controller. It changes no sequence.

use proto::v1;
use speculation::cost::Forward;
use speculation::draft_length::RoundTimes;
use speculation::sequence::Commit;
use speculation::{Reply, ReplyBody};

use super::*;
use crate::lane::running::Asked;

impl Surroundings {
    /// A worker's forward, as the frame of its replies tells.
    pub(super) fn measure_step(&mut self, key: WorkerKey, timing: &v1::StepTiming, num_replies: usize) {
        // What prompts take says nothing of forwards without.
        let is_telling = timing.rows > 0 && timing.prefill_rows == 0 && num_replies > 0;
        let Some(pooled) = self.pool.get_mut(key).filter(|_| is_telling) else { return };
        let sequences = num_replies as f64;
        let context = timing.kv_tokens as f64 / sequences;
        let forward = Forward { rows: f64::from(timing.rows), sequences, context };
        pooled.cost.observe_forward(forward, Duration::from_micros(timing.compute_us));
    }

    /// A reply came: how long it took, and what of that was the wire.
    pub(super) fn measure_reply(
        &mut self,
        running: &mut Running,
        (role, key): (Role, WorkerKey),
        reply: &Reply,
        timing: &v1::StepTiming,
    ) {
        let now = self.now();
        let Some(pooled) = self.pool.get_mut(key).filter(|_| running.sequence.awaits(role, reply)) else {
            return;
        };
        let clock = running.clock;
        let (asked_at, forwards) = match role {
            Role::Draft => {
                if pooled.health.is_out() {
                    tracing::info!(address = pooled.worker.address, "a draft worker answers again");
                }
                pooled.health.answered(now);
                let Some(asked) = running.asked.take_if(|asked| is_proposal_of(reply, asked)) else { return };
                pooled.health.observe(now.saturating_sub(asked.at), asked.predicted);
                if !running.sequence.is_drafting() {
                    return;
                }
                (asked.at, asked.num_draft_tokens)
            }
            Role::Target if !clock.has_prompt => (clock.verify_at.unwrap_or(now), 1),
            Role::Target => return,
        };
        let worked = Duration::from_micros(timing.queue_us + timing.compute_us * u64::from(forwards));
        pooled.cost.observe_wire(now.saturating_sub(asked_at), worked);
    }

    /// A draft worker says which of the committed tokens that it was sent it would have drawn.
    pub(super) fn hear_agreement(&mut self, running: &mut Running, role: Role, reply: &Reply) {
        if role == Role::Draft && running.sequence.awaits(role, reply) {
            for (positions, accepted) in running.agreement.told(&reply.agreed) {
                self.controllers.observe_agreement(&running.lane, positions, accepted);
            }
        }
    }

    /// A round is over.
    pub(super) fn measure_round(&mut self, running: &mut Running, commit: &Commit) {
        let now = self.now();
        let (lane, clock) = (&running.lane, running.clock);
        let verdict = (commit.num_draft_tokens, commit.num_accepted);
        self.controllers.observe_verdict(lane, verdict, running.len());
        running.agreement.judged(commit.num_draft_tokens, commit.num_accepted);
        let Some(verify_at) = clock.verify_at else { return };
        // Where another number was asked for than chosen, the round was not what it was chosen to be.
        if clock.has_prompt || clock.asked != clock.chosen {
            return;
        }
        let (target, draft) = (running.worker(Role::Target), running.worker(Role::Draft));
        let Some(workers) = self.pool.costs(&lane.key.model, target, draft) else { return };
        let round = RoundTimes {
            num_draft_tokens: clock.asked,
            draft_wait: verify_at.saturating_sub(clock.begun_at),
            verify: now.saturating_sub(verify_at),
            committed: commit.token_ids.len() as u32,
        };
        self.controllers.observe_round(lane, &round, &workers);
    }
}

fn is_proposal_of(reply: &Reply, asked: &Asked) -> bool {
    reply.round == asked.round && matches!(reply.body, ReplyBody::Proposal(_))
}
