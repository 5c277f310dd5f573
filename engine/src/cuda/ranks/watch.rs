//! Waits for a device whose kernels wait for other devices. A lost or hanging rank must end the wait.

use std::time::{Duration, Instant};

use crate::cuda::CudaError;

/// Polls before the wait sleeps between polls: most waits are for work that is nearly done.
const SPIN_POLLS: u32 = 2_000;
/// Sleep between two polls after that.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Observes the other ranks.
pub(crate) trait Watch: Send + Sync {
    /// Describes the fault of another rank, if there is one.
    fn fault(&self) -> Option<String>;

    /// Permanently aborts what this rank's device waits for.
    fn abort(&self);

    /// Describes what a kernel of any rank gave up waiting for, if one did: this rank's device is done, but its
    /// results may be wrong.
    fn gave_up(&self) -> Option<String> {
        None
    }
}

/// Waits until the device is done, at most for `patience`. A fault, a timeout, or a kernel that gave up
/// aborts the communicator and is returned as the error.
pub(crate) fn wait_watched(
    mut is_done: impl FnMut() -> Result<bool, CudaError>,
    watch: &dyn Watch,
    patience: Duration,
) -> Result<(), CudaError> {
    let began = Instant::now();
    for poll in 0u32.. {
        if is_done()? {
            let Some(reason) = watch.gave_up() else { return Ok(()) };
            watch.abort();
            return Err(CudaError::RankFailure { reason });
        }
        if poll < SPIN_POLLS {
            std::thread::yield_now();
            continue;
        }
        let late = || format!("the device was not done within {patience:?}: another rank hangs, or this one");
        let fault = watch.fault().or_else(|| (began.elapsed() > patience).then(late));
        if let Some(reason) = fault {
            watch.abort();
            return Err(CudaError::RankFailure { reason });
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    unreachable!("a wait ends by its patience before its looks are counted out")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[derive(Default)]
    struct Fake {
        fault_at: Option<u32>,
        looks: AtomicU32,
        aborts: AtomicU32,
        gave_up: Option<&'static str>,
    }

    impl Watch for Fake {
        fn fault(&self) -> Option<String> {
            let poll = self.looks.fetch_add(1, Ordering::Relaxed);
            (Some(poll) == self.fault_at).then(|| "rank 1 is gone".to_owned())
        }

        fn abort(&self) {
            self.aborts.fetch_add(1, Ordering::Relaxed);
        }

        fn gave_up(&self) -> Option<String> {
            self.gave_up.map(str::to_owned)
        }
    }

    fn wait(fake: &Fake, done_after: Option<u32>, patience: Duration) -> (Result<(), CudaError>, u32) {
        let mut asked = 0;
        let is_done = || {
            asked += 1;
            Ok(done_after.is_some_and(|after| asked > after))
        };
        (wait_watched(is_done, fake, patience), fake.aborts.load(Ordering::Relaxed))
    }

    #[test]
    fn a_wait_ends_by_the_device_a_fault_or_its_patience() {
        let long = Duration::from_secs(100);
        assert_eq!(wait(&Fake::default(), Some(0), long), (Ok(()), 0));
        assert_eq!(wait(&Fake::default(), Some(SPIN_POLLS + 9), long), (Ok(()), 0));

        let reason = "rank 1 is gone".to_owned();
        let fake = Fake { fault_at: Some(3), ..Fake::default() };
        assert_eq!(wait(&fake, None, long), (Err(CudaError::RankFailure { reason }), 1), "aborted once");

        let (result, aborts) = wait(&Fake::default(), None, Duration::from_millis(5));
        assert!(result.unwrap_err().to_string().contains("not done within 5ms"));
        assert_eq!(aborts, 1);
    }

    #[test]
    fn a_device_whose_kernel_gave_up_is_done_with_an_error() {
        let fake = Fake { gave_up: Some("it waited in vain"), ..Fake::default() };
        let (result, aborts) = wait(&fake, Some(0), Duration::from_secs(100));
        assert_eq!(result, Err(CudaError::RankFailure { reason: "it waited in vain".to_owned() }));
        assert_eq!(aborts, 1);
    }

    #[test]
    fn what_the_device_says_is_passed_on() {
        let error = CudaError::Driver { action: "finish", reason: "an illegal address".to_owned() };
        let said = wait_watched(|| Err(error.clone()), &Fake::default(), Duration::from_secs(1));
        assert_eq!(said, Err(error));
    }
}
