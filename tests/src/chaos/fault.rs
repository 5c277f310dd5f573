//! The kinds of faults that are injected into a cluster, by name.

use std::fmt;

use clap::ValueEnum;

/// A kind of fault. Each affects one process, one connection or one etcd, lasts for a while and is then
/// undone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, ValueEnum)]
pub enum FaultKind {
    /// A target worker is killed (SIGKILL), and restarted when the fault is over
    KillTarget,
    /// A draft worker is killed, and restarted when the fault is over
    KillDraft,
    /// A target worker is killed and restarted at once, at the same address and within its lease
    BounceTarget,
    /// A draft worker is killed and restarted at once, at the same address and within its lease
    BounceDraft,
    /// A target worker is stopped (SIGSTOP), and continues when the fault is over
    StopTarget,
    /// A draft worker is stopped, and continues when the fault is over
    StopDraft,
    /// All connections to a target worker are closed; new ones work
    CutTarget,
    /// All connections to a draft worker are closed; new ones work
    CutDraft,
    /// All connections to a target worker go silent without either side noticing; new ones work
    HalfOpenTarget,
    /// All connections to a draft worker go silent without either side noticing; new ones work
    HalfOpenDraft,
    /// Data from routers to a target worker is lost; data from it arrives
    DeafTarget,
    /// Data from a target worker is lost; data to it arrives
    MuteTarget,
    /// Data from routers to a draft worker is lost; data from it arrives
    DeafDraft,
    /// Data from a draft worker is lost; data to it arrives
    MuteDraft,
    /// Every worker's key is deleted from etcd
    DeleteKeys,
    /// etcd is killed, and restarted with its data when the fault is over
    RestartEtcd,
    /// A majority of etcd members is killed, so that the rest has no leader, and restarted with their data
    /// when the fault is over
    LoseQuorum,
    /// An additional target joins whose logits are NaN, and leaves when the fault is over
    NanTarget,
    /// A target worker gets a tenth of the time, by alternating SIGSTOP and SIGCONT
    SlowTarget,
    /// An additional draft worker joins that breaks the contract in one way, and leaves when the fault is
    /// over
    HostileDraft,
    /// An additional target joins that breaks the contract in one way, and leaves when the fault is over
    HostileTarget,
    /// A router is killed and restarted; streams through it are counted separately
    RestartRouter,
    /// Every worker and every router is stopped (SIGTERM) and restarted, one after the other
    RollingRestart,
    /// A quarter to half of all workers leave or crash at once, in half of the cases together with etcd, and
    /// join again when the fault is over
    Churn,
}

impl FaultKind {
    /// All kinds.
    pub fn all() -> &'static [Self] {
        Self::value_variants()
    }

    /// Whether it needs models that compute: a target with real numerics must not run beside synthetic
    /// targets.
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
