//! Reads memory and nothing else: the kernel of the engine's `read_probe`.

use super::dispatch::Kernel;
use super::lines::{Line, Lines};
use super::simd::F32x16;
use crate::KernelError;

/// Numbers that are read from one stream before the next one: four cache lines.
pub const READ_CHUNK: usize = 32;

/// Memory to read, allocated like weights.
pub struct ReadBuffer(Lines);

impl ReadBuffer {
    /// Allocates `bytes` bytes, rounded up to whole cache lines.
    pub fn new(bytes: usize) -> Result<Self, KernelError> {
        let mut lines =
            Lines::zeroed(bytes.div_ceil(size_of::<Line>()), "the read probe, use a smaller buffer")?;
        // Not zeros: the system may keep zeros on one shared page.
        lines.iter_mut().enumerate().for_each(|(i, line)| *line = Line([i as u8 | 1; 64]));
        Ok(Self(lines))
    }

    /// The whole buffer, as numbers.
    pub fn numbers(&self) -> &[u64] {
        // SAFETY: a line is eight numbers, aligned for them; any bytes make a number.
        unsafe { self.0.align_to::<u64>() }.1
    }
}

/// Sums numbers with `streams` streams in parallel, each through its share of `part`.
pub struct ReadSum<'a> {
    /// Numbers to read.
    pub part: &'a [u64],
    /// Number of streams: 1, 2 or 4.
    pub streams: usize,
}

impl Kernel for ReadSum<'_> {
    type Output = u64;

    #[inline(always)]
    unsafe fn run<V: F32x16>(self) -> u64 {
        match self.streams {
            1 => sum::<1>(self.part),
            2 => sum::<2>(self.part),
            _ => sum::<4>(self.part),
        }
    }
}

#[inline(always)]
fn sum<const S: usize>(part: &[u64]) -> u64 {
    let share = part.len() / S / READ_CHUNK * READ_CHUNK;
    let mut sums = [0u64; READ_CHUNK];
    let mut start = 0;
    while start < share {
        for stream in 0..S {
            let at = stream * share + start;
            for (sum, number) in sums.iter_mut().zip(&part[at..at + READ_CHUNK]) {
                *sum = sum.wrapping_add(*number);
            }
        }
        start += READ_CHUNK;
    }
    sums.iter().fold(0, |all, sum| all.wrapping_add(*sum))
}
