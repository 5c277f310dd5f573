//! Pearson's goodness-of-fit test, with its p-value in closed form.

/// Cells with a smaller expected count are pooled into one, so that the statistic is close to chi-square
/// distributed.
const SMALLEST_CELL: f64 = 10.0;

/// Probability that a sample from `law` deviates from it by at least as much as `counts` does.
///
/// Returns 0 if an outcome with probability 0 occurred.
pub(crate) fn p_value(counts: &[u32], law: &[f64]) -> f64 {
    let total: f64 = counts.iter().map(|&count| f64::from(count)).sum();
    assert!((law.iter().sum::<f64>() - 1.0).abs() < 1e-9, "a law sums to 1");
    if counts.iter().zip(law).any(|(&count, &p)| p == 0.0 && count > 0) {
        return 0.0;
    }
    let cells = counts.iter().zip(law).map(|(&count, &p)| (f64::from(count), p * total));
    let (small, mut cells): (Vec<_>, Vec<_>) = cells.partition(|&(_, expected)| expected < SMALLEST_CELL);
    let pooled = small.iter().fold((0.0, 0.0), |sum, cell| (sum.0 + cell.0, sum.1 + cell.1));
    if pooled.1 > 0.0 {
        cells.push(pooled);
    }
    let statistic = cells.iter().map(|(count, expected)| (count - expected).powi(2) / expected).sum();
    upper_tail(statistic, cells.len() - 1)
}

/// P(chi-square with `degrees` of freedom >= x) = exp(-x/2) (1 + x/2 + (x/2)²/2! + ...), `degrees`/2 terms.
/// That is for even degrees; odd ones are rounded up, which errs towards not rejecting.
fn upper_tail(x: f64, degrees: usize) -> f64 {
    let half = x / 2.0;
    let mut term = (-half).exp();
    let mut sum = term;
    for i in 1..degrees.div_ceil(2) {
        term *= half / i as f64;
        sum += term;
    }
    sum
}

#[test]
fn tails_are_those_of_the_printed_tables() {
    for (x, degrees, expected) in
        [(5.991, 2, 0.05), (9.488, 4, 0.05), (23.209, 10, 0.01), (149.449, 100, 0.001)]
    {
        let tail = upper_tail(x, degrees);
        assert!((tail - expected).abs() < 1e-3 * expected, "{x} at {degrees}: {tail}");
    }
}

#[test]
fn fits_and_misfits_are_told_apart() {
    let law = [0.5, 0.25, 0.25, 0.0];
    assert!(p_value(&[5_000, 2_510, 2_490, 0], &law) > 0.5);
    assert!(p_value(&[5_300, 2_350, 2_350, 0], &law) < 1e-6);
    assert_eq!(p_value(&[5_000, 2_500, 2_499, 1], &law), 0.0);
}
