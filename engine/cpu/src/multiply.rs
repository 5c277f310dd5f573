//! f32 multiply-adds in registers and nothing else: the kernel of the engine's `multiply_probe`.

use super::dispatch::Kernel;
use super::simd::{F32x16, LANES};

/// Chains of multiply-adds that stay in registers.
pub struct MultiplyAdds {
    /// Steps per chain.
    pub steps: usize,
}

impl Kernel for MultiplyAdds {
    /// Number of multiply-adds done.
    type Output = f64;

    #[inline(always)]
    unsafe fn run<V: F32x16>(self) -> f64 {
        // Enough chains to hide the latency: more if sixteen lanes are one register.
        // SAFETY: this function's contract guarantees V's instructions.
        unsafe { if const { V::TILE_VECTORS == 2 } { self.chains::<V, 12>() } else { self.chains::<V, 6>() } }
    }
}

impl MultiplyAdds {
    /// # Safety
    /// The CPU supports V's instructions.
    #[inline(always)]
    unsafe fn chains<V: F32x16, const N: usize>(self) -> f64 {
        // SAFETY: guaranteed by the caller.
        let sums = unsafe {
            let (a, b) = (V::splat(std::hint::black_box(0.5)), V::splat(std::hint::black_box(2.0)));
            let mut sums = [V::splat(0.0); N];
            for _ in 0..self.steps {
                for sum in &mut sums {
                    *sum = sum.fma(a, b);
                }
            }
            sums.map(|sum| sum.reduce_sum())
        };
        std::hint::black_box(sums);
        (self.steps * N * LANES) as f64
    }
}
