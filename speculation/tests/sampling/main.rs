//! Tests of contract part B: known answers, naive twins, exactness of the committed text, and statistics of
//! each mode that must also reject planted mutants. Everything is seeded; nothing reads a clock.
#![expect(clippy::unwrap_used, reason = "all of this is tests; clippy only knows those marked #[test]")]

mod exactness;
mod judging;
mod naive;
mod pipeline;
mod statistics;
mod toy;
mod trees;
mod vectors;
