//! Who holds how much KV, who may reserve how much more, and who gives way when there is none left.

use std::collections::HashMap;

use proto::v1;
use speculation::ReplyBody;

use crate::Task;
use crate::credits::Pool;
use crate::device::Device;
use crate::method::Method;
use crate::metrics::StepOutcome;
use crate::table::RouterId;

impl<M: Method> Device<M> {
    /// The pool as it is now; nothing where the method has no KV.
    fn pool(&self) -> Option<Pool> {
        let stats = self.method.stats();
        let (total, used) = (stats.kv_blocks_total, stats.kv_blocks_used);
        let free = total.saturating_sub(used);
        (total > 0).then_some(Pool { total, free, routers: self.routers.len().max(1) as u64 })
    }

    /// KV blocks of each router's sequences, shared ones counted for each.
    fn held_by_router(&self) -> HashMap<RouterId, u64> {
        let mut held = HashMap::new();
        for (key, slot) in self.table.slots() {
            *held.entry(key.router).or_default() += self.method.blocks_held(slot);
        }
        held
    }

    /// Puts changed grants into the outboxes.
    pub(super) fn grant_credits(&mut self) {
        let Some(pool) = self.pool() else { return };
        let held = self.held_by_router();
        for (id, router) in &mut self.routers {
            let grant = pool.grant(held.get(id).copied().unwrap_or(0));
            if pool.is_worth_telling(router.told, grant) {
                router.told = Some(grant);
                router.outbox.credits = Some(v1::Credits { blocks: grant });
            }
        }
    }

    /// No task can go on for want of KV blocks. Idle sequences are forgotten first, the longest idle before
    /// others (their router rebuilds them); then the least urgent task is preempted, the youngest among
    /// equals; one that does not fit alone is refused. Routers above their share come before others in both.
    pub(super) fn make_room(&mut self) {
        let Some(pool) = self.pool() else { return };
        let held = self.held_by_router();
        let is_above = |router: RouterId| held.get(&router).is_some_and(|held| *held > pool.share());
        if let Some(idle) = self.table.least_recently_used_idle(is_above) {
            let slot = idle.slot;
            if let Some(cached) = &mut idle.cached {
                cached.cut(0);
            }
            self.metrics.count(StepOutcome::Evicted);
            return self.method.truncate(slot, 0);
        }
        let order = |(age, task): &(usize, &Task)| (is_above(task.key.router), task.spec().priority, *age);
        let victim = self.running.iter().enumerate().max_by_key(order).map(|(age, _)| age);
        if let Some(mut task) = victim.and_then(|age| self.running.remove(age)) {
            task.cached.cut(0);
            self.method.truncate(task.slot, 0);
            if self.running.is_empty() {
                return self.refuse_for_good(task);
            }
            self.preempt(task);
        }
    }

    fn refuse_for_good(&mut self, task: Task) {
        let reason =
            "the sequence alone needs more KV blocks than this worker has: raise --kv-memory".to_owned();
        self.metrics.count(StepOutcome::Refused);
        self.finish(task, ReplyBody::Refused { reason });
    }

    /// Lets go of a sequence and says so: nothing of its epoch is accepted from here on.
    fn preempt(&mut self, task: Task) {
        let (key, epoch) = (task.key, task.step.epoch);
        self.metrics.count(StepOutcome::Preempted);
        self.give_back(task);
        self.close(key, epoch);
        self.table.remember_over(key, epoch);
        if let Some(router) = self.routers.get_mut(&key.router) {
            router.outbox.preempted.push(v1::Preempted { sequence_id: key.sequence.0, epoch });
        }
    }
}
