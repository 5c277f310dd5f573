//! What one core can multiply and add in f32, for whoever compares products of many rows with it: with f32 and bf16 weights
//! each number of each row is one such multiply-add, by the contract.

use std::time::Instant;

use cpu_kernels::{Cpu, MultiplyAdds};

use crate::EngineError;

/// Steps of a run: about a millisecond.
const STEPS: usize = 1 << 19;
/// Runs, the fastest of which counts.
const RUNS: usize = 40;

/// f32 multiply-adds a second of one thread that does nothing else, with this process's instruction set.
pub fn multiply_adds_per_second() -> Result<f64, EngineError> {
    let cpu = Cpu::new(1)?;
    let rate = |_| {
        let begin = Instant::now();
        cpu.multiply(MultiplyAdds { steps: STEPS }) / begin.elapsed().as_secs_f64()
    };
    Ok((0..RUNS).map(rate).fold(0.0, f64::max))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_core_does_some() {
        assert!(multiply_adds_per_second().unwrap() > 1e6);
    }
}
