//! The learning rate schedule: linear warm-up, then half a cosine.

/// Maximum warm-up steps; also at most a tenth of all steps.
const WARMUP_STEPS: usize = 100;

/// Final rate as a share of the peak.
const FINAL_SHARE: f64 = 0.05;

/// Share of the peak rate at a step, from 0.
pub fn share(step: usize, steps: usize) -> f64 {
    let warmup_steps = WARMUP_STEPS.min((steps / 10).max(1));
    let warmup = ((step + 1) as f64 / warmup_steps as f64).min(1.0);
    let cosine = 0.5 * (1.0 + (std::f64::consts::PI * step as f64 / steps as f64).cos());
    warmup * (FINAL_SHARE + (1.0 - FINAL_SHARE) * cosine)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_rises_then_falls() {
        let shares: Vec<f64> = (0..1000).map(|step| share(step, 1000)).collect();
        assert!(shares[..99].is_sorted() && shares[100..].iter().rev().is_sorted());
        assert!(shares[0] < 0.02 && shares[99] > 0.9 && shares[999] < 0.06, "{shares:?}");
        assert!(share(0, 1) > 0.9, "one step is a whole one");
    }
}
