//! What may go wrong in a cluster, by name.

use std::fmt;

use clap::ValueEnum;

/// One kind of fault. Each hits one process, one wire or one etcd, lasts for a while and is then undone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, ValueEnum)]
pub enum FaultKind {
    /// A target worker is killed (SIGKILL), and started again when the fault is over
    KillTarget,
    /// A draft worker is killed, and started again when the fault is over
    KillDraft,
    /// A target worker is killed and started again at once, at the same address and within its lease
    BounceTarget,
    /// A draft worker is killed and started again at once, at the same address and within its lease
    BounceDraft,
    /// A target worker is stopped (SIGSTOP), and goes on when the fault is over
    StopTarget,
    /// A draft worker is stopped, and goes on when the fault is over
    StopDraft,
    /// All connections to a target worker end; new ones work
    CutTarget,
    /// All connections to a draft worker end; new ones work
    CutDraft,
    /// All connections to a target worker go silent and neither side hears of it; new ones work
    HalfOpenTarget,
    /// All connections to a draft worker go silent and neither side hears of it; new ones work
    HalfOpenDraft,
    /// Nothing that routers send to a target worker arrives; what it sends does
    DeafTarget,
    /// Nothing that a target worker sends arrives; what it is sent does
    MuteTarget,
    /// Nothing that routers send to a draft worker arrives; what it sends does
    DeafDraft,
    /// Nothing that a draft worker sends arrives; what it is sent does
    MuteDraft,
    /// Every worker's key is deleted from etcd
    DeleteKeys,
    /// etcd is killed, and started again with its data when the fault is over
    RestartEtcd,
    /// Most members of etcd are killed, so that the rest has no leader, and started again with their data when the fault is over
    LoseQuorum,
    /// One more target joins, whose logits are not numbers, and leaves when the fault is over
    NanTarget,
    /// A target worker gets a tenth of the time, by SIGSTOP and SIGCONT in turns
    SlowTarget,
    /// One more draft worker joins, which breaks the contract in one way, and leaves when the fault is over
    HostileDraft,
    /// One more target joins, which breaks the contract in one way, and leaves when the fault is over
    HostileTarget,
    /// A router is killed and started again; streams through it are counted apart
    RestartRouter,
    /// Every worker and every router is told to stop (SIGTERM) and started again, one after the other
    RollingRestart,
    /// A quarter to half of all workers leave or crash at once, in half of the cases with etcd, and join again when the fault is over
    Churn,
}

impl FaultKind {
    /// All of them.
    pub fn all() -> &'static [Self] {
        Self::value_variants()
    }

    /// Whether it needs models that compute: a target of other numbers must not stand beside targets that only keep time.
    pub fn needs_models(self) -> bool {
        matches!(self, Self::NanTarget)
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.to_possible_value() {
            Some(value) => f.write_str(value.get_name()),
            None => write!(f, "{self:?}"),
        }
    }
}
