//! Compares every kernel with its naive twin. The same cases run on the emulator in each test run, and on a
//! GPU with `make gpu-check`. A case requires equal bits or has a tolerance, and reports the largest
//! difference. Tolerances of tensor cores are derived (`tensor_cores`).

mod all_reduce;
mod attention;
mod elementwise;
mod kv_layout;
mod linear;
mod panels;
#[cfg(test)]
mod properties;
mod random;
mod sampling;
mod scores;
mod tensor_cores;
mod trees;

use half::bf16;

use super::CudaError;
use super::executor::Executor;

/// Size of a case: for a host that runs threads one after another, or for a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scale {
    /// A few blocks.
    Small,
    /// A layer of an 8B model.
    Large,
}

impl Scale {
    fn pick<T>(self, small: T, large: T) -> T {
        match self {
            Self::Small => small,
            Self::Large => large,
        }
    }
}

/// Result of a comparison.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Parity {
    /// Operation and shape.
    pub(crate) case: String,
    /// Numbers compared.
    pub(crate) numbers: usize,
    /// Largest difference, relative to the largest number of the twin.
    pub(crate) worst: f64,
    /// Largest allowed difference; 0 requires equal bits.
    pub(crate) tolerance: f64,
    /// First number that exceeds the tolerance, with both values.
    pub(crate) out: Option<String>,
}

impl Parity {
    /// Whether the kernel agrees with its twin.
    pub(crate) fn is_good(&self) -> bool {
        self.out.is_none()
    }
}

impl std::fmt::Display for Parity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { case, numbers, worst, tolerance, .. } = self;
        let verdict = if self.is_good() { "ok" } else { "DIFFERS" };
        write!(f, "{verdict:<8}{case:<58}{numbers:>10} numbers  worst {worst:.1e}  allowed {tolerance:.0e}")?;
        self.out.as_ref().map_or(Ok(()), |out| write!(f, "\n        {out}"))
    }
}

/// Compares numbers; a tolerance of 0 requires equal bits.
fn compare(case: impl Into<String>, tolerance: f64, found: &[f32], expected: &[f32]) -> Parity {
    let mut parity = Parity {
        case: case.into(),
        numbers: expected.len(),
        worst: 0.0,
        tolerance,
        out: (found.len() != expected.len())
            .then(|| format!("{} numbers, expected {}", found.len(), expected.len())),
    };
    let largest =
        expected.iter().filter(|x| x.is_finite()).fold(0.0f64, |max, x| max.max(f64::from(x.abs())));
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        if found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()) {
            continue;
        }
        let distance = (f64::from(found) - f64::from(expected)).abs() / largest.max(f64::MIN_POSITIVE);
        let distance = if distance.is_nan() { f64::INFINITY } else { distance };
        parity.worst = parity.worst.max(distance);
        if (tolerance == 0.0 || distance > tolerance) && parity.out.is_none() {
            parity.out = Some(format!("number {i} is {found:e}, expected {expected:e}"));
        }
    }
    parity
}

/// Compares values of any type for equality.
fn compare_equal<T: PartialEq + std::fmt::Debug>(
    case: impl Into<String>,
    found: &[T],
    expected: &[T],
) -> Parity {
    let differs = (0..expected.len().max(found.len())).find(|&i| found.get(i) != expected.get(i));
    Parity {
        case: case.into(),
        numbers: expected.len(),
        worst: f64::from(u8::from(differs.is_some())),
        tolerance: 0.0,
        out: differs.map(|i| format!("number {i} is {:?}, expected {:?}", found.get(i), expected.get(i))),
    }
}

/// Reproducible pseudo-random numbers for cases.
#[derive(Debug)]
struct Numbers(u64);

impl Numbers {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

    /// The same numbers without the first `count`.
    #[cfg(test)]
    fn without(self, count: usize) -> Self {
        Self(self.0.wrapping_add(Self::STEP.wrapping_mul(count as u64)))
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(Self::STEP);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In [-size, size).
    fn f32(&mut self, size: f32) -> f32 {
        ((self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0) * size
    }

    fn vec(&mut self, len: usize, size: f32) -> Vec<f32> {
        (0..len).map(|_| self.f32(size)).collect()
    }

    /// Numbers as [`Numbers::vec`], rounded to bf16.
    fn bf16s(&mut self, len: usize, size: f32) -> Vec<bf16> {
        (0..len).map(|_| bf16::from_f32(self.f32(size))).collect()
    }
}

fn widened(numbers: &[bf16]) -> Vec<f32> {
    numbers.iter().map(|x| x.to_f32()).collect()
}

/// A group of cases.
type Cases<E> = fn(&mut E, Scale) -> Result<Vec<Parity>, CudaError>;

/// Runs every case, and calls `report` for each as soon as its group has run.
pub(crate) fn run_all<E: Executor>(
    executor: &mut E,
    scale: Scale,
    mut report: impl FnMut(Parity),
) -> Result<(), CudaError> {
    let groups: [Cases<E>; 9] = [
        elementwise::cases,
        linear::cases,
        panels::cases,
        attention::cases,
        trees::cases,
        sampling::cases,
        scores::cases,
        random::cases,
        all_reduce::cases,
    ];
    for cases in groups {
        cases(executor, scale)?.into_iter().for_each(&mut report);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::emulator::Emulator;
    use super::*;

    fn check(cases: impl FnOnce(&mut Emulator, Scale) -> Result<Vec<Parity>, CudaError>) {
        check_on(&mut Emulator::build(), cases);
    }

    fn check_on(
        emulator: &mut Emulator,
        cases: impl FnOnce(&mut Emulator, Scale) -> Result<Vec<Parity>, CudaError>,
    ) {
        let parities = cases(emulator, Scale::Small).unwrap();
        assert!(!parities.is_empty());
        for parity in parities {
            println!("{parity}");
            assert!(parity.is_good(), "{parity}");
        }
    }

    /// The same cases on an emulator that reports data races as errors.
    macro_rules! without_races {
        ($($name:ident: $cases:path),+ $(,)?) => {
            $(#[test]
            fn $name() {
                check_on(&mut Emulator::with_race_check(), $cases);
            })+
        };
    }

    without_races!(
        elementwise_kernels_have_no_races: elementwise::cases,
        linear_kernels_have_no_races: linear::cases,
        products_of_panels_have_no_races: panels::cases,
        attention_kernels_have_no_races: attention::cases,
        trees_have_no_races: trees::cases,
        sampling_kernels_have_no_races: sampling::cases,
        scores_have_no_races: scores::cases,
        random_weights_have_no_races: random::cases,
        sums_over_peers_have_no_races: all_reduce::cases,
    );

    #[test]
    fn elementwise_kernels_equal_their_twins() {
        check(elementwise::cases);
    }

    #[test]
    fn linear_kernels_equal_their_twins() {
        check(linear::cases);
    }

    #[test]
    fn products_of_panels_equal_those_of_rows() {
        check(panels::cases);
    }

    #[test]
    fn attention_kernels_equal_their_twins() {
        check(attention::cases);
    }

    #[test]
    fn rows_of_trees_equal_chains() {
        check(trees::cases);
    }

    #[test]
    fn sampling_kernels_equal_their_twins() {
        check(sampling::cases);
    }

    /// There were 37 and 2 passes before rows were split into parts.
    #[test]
    fn a_row_is_read_three_times_to_be_filtered_and_drawn_from() {
        let [filter, draw] = sampling::passes(&mut Emulator::build(), 40_960).unwrap();
        println!("passes over the vocabulary: {filter:.2} by top-p, {draw:.2} by the draw");
        assert!((2.0..3.0).contains(&filter) && (1.0..1.01).contains(&draw), "{filter} and {draw}");
    }

    #[test]
    fn scores_equal_the_hosts() {
        check(scores::cases);
    }

    #[test]
    fn random_weights_equal_the_generators() {
        check(random::cases);
    }

    #[test]
    fn sums_over_peers_are_those_of_the_tree() {
        check(all_reduce::cases);
    }

    #[test]
    fn a_difference_is_seen() {
        assert!(compare("same", 0.0, &[1.0, f32::NAN], &[1.0, f32::NAN]).is_good());
        assert!(!compare("bit", 0.0, &[1.0], &[1.0 + f32::EPSILON]).is_good());
        assert!(compare("near", 1e-6, &[1.0], &[1.0 + f32::EPSILON]).is_good());
        assert!(!compare("far", 1e-6, &[1.0, 0.5], &[1.0, 0.500_01]).is_good());
        assert!(!compare("nan", 1.0, &[f32::NAN], &[1.0]).is_good());
        assert!(!compare("short", 1.0, &[1.0], &[1.0, 1.0]).is_good());
        assert!(!compare_equal("ids", &[1, 2], &[1, 3]).is_good());
    }
}
