//! Measures the f32 multiply-adds of one core, as a reference for GEMMs of many rows: with f32 and bf16
//! weights the contract requires one such multiply-add per weight and row.

use std::time::Instant;

use cpu_kernels::{Cpu, MultiplyAdds};

use crate::EngineError;

/// Steps of a run, which takes about a millisecond.
const STEPS: usize = 1 << 19;
/// Number of runs; the result is the fastest.
const RUNS: usize = 40;

/// Returns f32 multiply-adds per second of one otherwise idle thread, with this process's instruction set.
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
    fn reports_a_positive_rate() {
        assert!(multiply_adds_per_second().unwrap() > 1e6);
    }
}
