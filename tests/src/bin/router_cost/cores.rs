//! The machine's cores while something is measured. A virtual machine leaves to its host whenever a core has nothing to do, and comes back by an
//! interrupt that somebody has to send: tens of microseconds, for which the one that wakes pays as well as the one that is woken. A router that wakes
//! clients and workers all the time is charged with that, though it is the machine's. `--awake` has threads that yield to everybody (`SCHED_IDLE`) take what
//! is left of every core, as operators of machines for low latency forbid cores to sleep deeply.

use outrider_cli::cluster::usage::Look;

use crate::helper::{self, Helper};

/// See the module's page.
pub(crate) struct Cores {
    spinner: Option<Helper>,
}

impl Cores {
    /// Cores as they are, or kept awake until this is dropped.
    pub(crate) async fn start(is_awake: bool) -> anyhow::Result<Self> {
        let by = ["nice", "-n", "19", "chrt", "--idle", "0"];
        let spinner = if is_awake { Some(Helper::start(&by, &["spin".to_owned()]).await?) } else { None };
        Ok(Self { spinner })
    }

    /// A look at a process and at the machine, in which the threads that keep it awake count as idle.
    pub(crate) fn look(&self, pid: u32) -> anyhow::Result<Look> {
        let look = Look::at(pid)?;
        Ok(match &self.spinner {
            Some(spinner) => look.without(spinner.pid()?)?,
            None => look,
        })
    }
}

/// Spins until whoever started this process has ended.
pub(crate) async fn spin() {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for _ in 0..cores {
        std::thread::spawn(|| {
            loop {
                std::hint::spin_loop();
            }
        });
    }
    println!("spinning");
    helper::orphaned().await;
}
