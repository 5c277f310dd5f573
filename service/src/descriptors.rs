//! Limit on open files and sockets. Client connections get only what the process itself does not need:
//! without a reserve they could use up the descriptors of health checks, workers, discovery and files.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Maximum number of connections of an admin address, in addition to all others.
pub const ADMIN_CONNECTIONS: usize = 64;

/// Reserve for workers, discovery, traces, files and the admin address, if the limit is large enough.
const RESERVE: usize = 512;

/// Raises the soft limit to the hard limit and returns it. The low soft limit exists for programs that use
/// `select`.
pub fn raise_limit() -> usize {
    match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((soft, hard)) if soft < hard => {
            if let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
                tracing::warn!(%error, soft, hard, "cannot raise the limit on open files: fewer connections are possible");
            }
        }
        Ok(_) => {}
        Err(error) => tracing::warn!(%error, "cannot read the limit on open files"),
    }
    limit()
}

/// The limit after [`raise_limit`].
pub fn limit() -> usize {
    // If the limit is unknown, assume POSIX's minimum.
    getrlimit(Resource::RLIMIT_NOFILE).map_or(20, |(_, hard)| usize::try_from(hard).unwrap_or(usize::MAX))
}

/// Number of descriptors, out of `limit`, not available to client connections.
pub fn reserved(limit: usize) -> usize {
    RESERVE.min(limit / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_get_half_of_few_and_nearly_all_of_many() {
        assert_eq!(reserved(256), 128);
        assert_eq!(reserved(1 << 20), RESERVE);
    }

    #[test]
    fn the_limit_is_raised_as_far_as_it_goes() {
        assert_eq!(raise_limit(), limit());
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert_eq!(soft, hard);
    }
}
