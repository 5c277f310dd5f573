//! Whether each mode draws from the law it promises, and how often it accepts. Every check of a law must also reject the
//! planted mutants of [`mutants`], or its passing would say nothing.

mod acceptance_rates;
mod chi_square;
mod laws;
mod mutants;
