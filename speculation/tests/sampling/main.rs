//! Contract part B held to account: known answers, naive twins, exactness of what is committed, and statistics of each
//! mode that also have to reject planted mutants. Everything is seeded; nothing here reads a clock.
#![expect(clippy::unwrap_used, reason = "all of this is tests; clippy only knows those marked #[test]")]

mod exactness;
mod judging;
mod naive;
mod pipeline;
mod statistics;
mod toy;
mod trees;
mod vectors;
