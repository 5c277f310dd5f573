//! Checks that each mode draws from the promised distribution, and how often it accepts. Every check of a
//! distribution must also reject the planted mutants of [`mutants`]; otherwise passing would mean nothing.

mod acceptance_rates;
mod chi_square;
mod laws;
mod mutants;
