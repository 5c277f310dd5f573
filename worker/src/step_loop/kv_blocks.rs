//! KV block accounting: grants per router, and eviction and preemption when blocks run out.

use std::collections::HashMap;

use proto::v1;
use speculation::{Refusal, RefusalCause, ReplyBody};

use crate::Task;
use crate::credits::KvPool;
use crate::executor::StepExecutor;
use crate::metrics::StepOutcome;
use crate::step_loop::StepLoop;
use crate::table::RouterId;

impl<M: StepExecutor> StepLoop<M> {
    /// Current state of the pool; `None` if the executor has no KV.
    fn pool(&self) -> Option<KvPool> {
        let stats = self.executor.stats();
        let (total, used) = (stats.kv_blocks_total, stats.kv_blocks_used);
        let free = total.saturating_sub(used);
        (total > 0).then_some(KvPool { total, free, routers: self.routers.len().max(1) as u64 })
    }

    /// KV blocks held by each router's sequences; a shared block counts once per sequence.
    fn blocks_by_router(&self) -> HashMap<RouterId, u64> {
        let mut held = HashMap::new();
        for (key, slot) in self.table.slots() {
            *held.entry(key.router).or_default() += self.executor.blocks_held(slot);
        }
        held
    }

    /// Puts changed grants into the outboxes.
    pub(super) fn grant_credits(&mut self) {
        let Some(pool) = self.pool() else { return };
        let held = self.blocks_by_router();
        for (id, router) in &mut self.routers {
            let grant = pool.grant(held.get(id).copied().unwrap_or(0));
            if pool.should_send(router.last_credits, grant) {
                router.last_credits = Some(grant);
                router.outbox.credits = Some(v1::Credits { blocks: grant });
            }
        }
    }

    /// Frees KV blocks when no task can continue. Evicts idle sequences first, least recently used first
    /// (their routers rebuild them). Then preempts the least urgent running task, the youngest among equals;
    /// if it is the only one, it is refused, since it does not fit alone. In both cases sequences of routers
    /// above their share go first.
    pub(super) fn free_kv_blocks(&mut self) {
        let Some(pool) = self.pool() else { return };
        let held = self.blocks_by_router();
        let is_above = |router: RouterId| held.get(&router).is_some_and(|held| *held > pool.share());
        if let Some(idle) = self.table.least_recently_used_idle(is_above) {
            let slot = idle.slot;
            if let Some(cached) = &mut idle.cached {
                cached.truncate(0);
            }
            self.metrics.count(StepOutcome::Evicted);
            return self.executor.truncate(slot, 0);
        }
        let order = |(age, task): &(usize, &Task)| (is_above(task.key.router), task.spec().priority, *age);
        let victim = self.running.iter().enumerate().max_by_key(order).map(|(age, _)| age);
        if let Some(mut task) = victim.and_then(|age| self.running.remove(age)) {
            task.cached.truncate(0);
            self.executor.truncate(task.slot, 0);
            if self.running.is_empty() {
                return self.refuse_too_large(task);
            }
            self.preempt(task);
        }
    }

    fn refuse_too_large(&mut self, task: Task) {
        let reason =
            "the sequence alone needs more KV blocks than this worker has: raise --kv-memory".to_owned();
        self.metrics.count(StepOutcome::Refused);
        self.end(task, ReplyBody::Refused(Refusal { cause: RefusalCause::Capacity, reason }));
    }

    /// Drops a sequence and reports it as preempted; later steps of its epoch are rejected.
    fn preempt(&mut self, task: Task) {
        let (key, epoch) = (task.key, task.step.epoch);
        self.metrics.count(StepOutcome::Preempted);
        self.return_to_table(task);
        self.close(key, epoch);
        self.table.record_preempted(key, epoch);
        if let Some(router) = self.routers.get_mut(&key.router) {
            router.outbox.preempted.push(v1::Preempted { sequence_id: key.sequence.0, epoch });
        }
    }
}
