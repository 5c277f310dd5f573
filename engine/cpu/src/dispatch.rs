//! Chooses once at run time which instructions the kernels use. Every choice gives the same bits (see
//! [`super::simd`]); it affects only speed.

#[cfg(target_arch = "x86_64")]
use super::instruction_set::amd_family;
use super::packed::{DotKernel, Dots, PortableDots};
use super::simd::{F32x16, Portable};

/// A kernel, compiled once for each instruction set. `run` and everything that it calls must be
/// `#[inline(always)]`, or it is compiled without the instructions.
pub(crate) trait Kernel {
    type Output;

    /// # Safety
    /// The CPU supports the instructions of `V`.
    unsafe fn run<V: F32x16>(self) -> Self::Output;
}

/// An instruction set that this machine supports: only [`Isa::best`] and [`Isa::all`] create one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Isa(Choice);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Choice {
    /// AVX-512 with its dot products of integers and of bf16.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// AVX-512 with its dot products of integers.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    /// AVX-512 for floats, AVX2 for integers.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX2 for floats, AVX-VNNI for integers: its 256-bit dot products.
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    /// Like `AvxVnni` in the AVX-512 encoding. Not the fastest choice of any CPU; it tests that code on CPUs
    /// without AVX-VNNI.
    #[cfg(target_arch = "x86_64")]
    Vnni256,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// NEON with its dot products of integers and its int8 matrix products.
    #[cfg(target_arch = "aarch64")]
    NeonI8mm,
    /// NEON with its dot products of integers.
    #[cfg(target_arch = "aarch64")]
    NeonDots,
    /// NEON for floats, which every 64-bit ARM CPU has.
    #[cfg(target_arch = "aarch64")]
    Neon,
    Portable,
}

impl Isa {
    /// The fastest instruction set of this machine.
    pub(crate) fn best() -> Self {
        Self::all().into_iter().next().expect("the portable instruction set is always available")
    }

    /// All instruction sets of this machine, the fastest first.
    pub(crate) fn all() -> Vec<Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            let dots = avx2 && avx512 && is_x86_feature_detected!("avx512vnni");
            let avx512_bf16 = dots && is_x86_feature_detected!("avx512bf16");
            // AMD CPUs multiply bf16 by pairs at twice the speed of f32, Intel CPUs at half of it.
            let fast_bf16_dot = amd_family().is_some();
            if avx512_bf16 && fast_bf16_dot {
                all.push(Self(Choice::Avx512Bf16));
            }
            if dots {
                all.push(Self(Choice::Avx512Vnni));
            }
            if avx512_bf16 && !fast_bf16_dot {
                all.push(Self(Choice::Avx512Bf16));
            }
            if avx2 && avx512 {
                all.push(Self(Choice::Avx512));
            }
            if avx2 && is_x86_feature_detected!("avxvnni") {
                all.push(Self(Choice::AvxVnni));
            }
            if dots {
                all.push(Self(Choice::Vnni256));
            }
            if avx2 {
                all.push(Self(Choice::Avx2));
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            let dots = std::arch::is_aarch64_feature_detected!("dotprod");
            if dots && std::arch::is_aarch64_feature_detected!("i8mm") {
                all.push(Self(Choice::NeonI8mm));
            }
            if dots {
                all.push(Self(Choice::NeonDots));
            }
            all.push(Self(Choice::Neon));
        }
        all.push(Self(Choice::Portable));
        all
    }

    /// The user-facing name.
    pub(crate) fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Choice::Avx512Bf16 => "avx512-bf16",
            #[cfg(target_arch = "x86_64")]
            Choice::Avx512Vnni => "avx512-vnni",
            #[cfg(target_arch = "x86_64")]
            Choice::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Choice::AvxVnni => "avx-vnni",
            #[cfg(target_arch = "x86_64")]
            Choice::Vnni256 => "avx512-vnni-256",
            #[cfg(target_arch = "x86_64")]
            Choice::Avx2 => "avx2",
            #[cfg(target_arch = "aarch64")]
            Choice::NeonI8mm => "neon-i8mm",
            #[cfg(target_arch = "aarch64")]
            Choice::NeonDots => "neon-dotprod",
            #[cfg(target_arch = "aarch64")]
            Choice::Neon => "neon",
            Choice::Portable => "portable",
        }
    }

    /// Maximum rows of a float tile.
    pub(super) fn tile_rows(self) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Choice::Avx512Bf16 => super::x86::Avx512::<true>::TILE_ROWS,
            #[cfg(target_arch = "x86_64")]
            Choice::Avx512Vnni | Choice::Avx512 => super::x86::Avx512::<false>::TILE_ROWS,
            #[cfg(target_arch = "x86_64")]
            Choice::AvxVnni | Choice::Vnni256 | Choice::Avx2 => super::x86::Avx2::TILE_ROWS,
            #[cfg(target_arch = "aarch64")]
            Choice::NeonI8mm | Choice::NeonDots | Choice::Neon => super::neon::Neon::TILE_ROWS,
            Choice::Portable => Portable::TILE_ROWS,
        }
    }

    /// Whether products with bf16 weights take activations in pairs.
    pub(super) fn has_bf16_dot(self) -> bool {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Choice::Avx512Bf16 => true,
            _ => false,
        }
    }

    /// Maximum rows of an integer tile.
    pub(super) fn dot_tile_rows(self) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Choice::Avx512Bf16 | Choice::Avx512Vnni => super::packed::VnniDots::TILE_ROWS,
            #[cfg(target_arch = "x86_64")]
            Choice::AvxVnni => super::packed::Vnni256Dots::<false>::TILE_ROWS,
            #[cfg(target_arch = "x86_64")]
            Choice::Vnni256 => super::packed::Vnni256Dots::<true>::TILE_ROWS,
            #[cfg(target_arch = "x86_64")]
            Choice::Avx512 | Choice::Avx2 => super::packed::Avx2Dots::TILE_ROWS,
            #[cfg(target_arch = "aarch64")]
            Choice::NeonI8mm => super::packed::NeonDots::<true>::TILE_ROWS,
            #[cfg(target_arch = "aarch64")]
            Choice::NeonDots => super::packed::NeonDots::<false>::TILE_ROWS,
            #[cfg(target_arch = "aarch64")]
            Choice::Neon => PortableDots::TILE_ROWS,
            Choice::Portable => PortableDots::TILE_ROWS,
        }
    }

    /// Number of words that hold four activations of an int8 product.
    pub(super) fn dot_words(self) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Choice::Avx512 | Choice::Avx2 => super::packed::Avx2Dots::WORDS,
            _ => 1,
        }
    }

    /// Runs a kernel with this instruction set.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            // SAFETY: an `Isa` of this choice exists only where `all` has detected the features.
            #[cfg(target_arch = "x86_64")]
            Choice::Avx512Bf16 | Choice::Avx512Vnni | Choice::Avx512 => unsafe { run_avx512(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Choice::AvxVnni | Choice::Vnni256 | Choice::Avx2 => unsafe { run_avx2(kernel) },
            // SAFETY: every 64-bit ARM CPU has NEON.
            #[cfg(target_arch = "aarch64")]
            Choice::NeonI8mm | Choice::NeonDots | Choice::Neon => unsafe {
                kernel.run::<super::neon::Neon>()
            },
            // SAFETY: plain Rust runs everywhere.
            Choice::Portable => unsafe { kernel.run::<Portable>() },
        }
    }

    /// Runs a float GEMM kernel with this instruction set.
    #[inline]
    pub(super) fn run_floats<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            // SAFETY: an `Isa` of this choice exists only where `all` has detected the features.
            #[cfg(target_arch = "x86_64")]
            Choice::Avx512Bf16 => unsafe { run_avx512_bf16(kernel) },
            _ => self.run(kernel),
        }
    }

    /// Runs an integer GEMM kernel with this instruction set.
    #[inline]
    pub(super) fn run_dots<K: DotKernel>(self, kernel: K) {
        match self.0 {
            // SAFETY: an `Isa` of this choice exists only where `all` has detected the features.
            #[cfg(target_arch = "x86_64")]
            Choice::Avx512Bf16 | Choice::Avx512Vnni => unsafe { run_vnni(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Choice::AvxVnni => unsafe { run_avx_vnni(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Choice::Vnni256 => unsafe { run_vnni_256(kernel) },
            // SAFETY: as above; `all` offers AVX-512 only together with AVX2.
            #[cfg(target_arch = "x86_64")]
            Choice::Avx512 | Choice::Avx2 => unsafe { run_avx2_dots(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Choice::NeonI8mm => unsafe { run_neon_i8mm(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Choice::NeonDots => unsafe { run_neon_dots(kernel) },
            // SAFETY: plain Rust runs everywhere.
            #[cfg(target_arch = "aarch64")]
            Choice::Neon => unsafe { kernel.run::<PortableDots>() },
            // SAFETY: plain Rust runs everywhere.
            Choice::Portable => unsafe { kernel.run::<PortableDots>() },
        }
    }
}

/// # Safety
/// The CPU supports the enabled features.
#[cfg(target_arch = "x86_64")]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) unsafe fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the features of this function are those that `V` needs.
    unsafe { kernel.run::<super::x86::Avx512<false>>() }
}

/// # Safety
/// The CPU supports the enabled features.
#[cfg(target_arch = "x86_64")]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
pub(super) unsafe fn run_avx512_bf16<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the features of this function are those that `V` needs.
    unsafe { kernel.run::<super::x86::Avx512<true>>() }
}

/// # Safety
/// The CPU supports the enabled features.
#[cfg(target_arch = "x86_64")]
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the features of this function are those that `V` needs.
    unsafe { kernel.run::<super::x86::Avx2>() }
}

/// # Safety
/// The CPU supports the enabled features.
#[cfg(target_arch = "x86_64")]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
pub(super) unsafe fn run_vnni<K: DotKernel>(kernel: K) {
    // SAFETY: the features of this function are those that `D` needs.
    unsafe { kernel.run::<super::packed::VnniDots>() }
}

/// # Safety
/// The CPU supports the enabled features.
#[cfg(target_arch = "x86_64")]
#[inline(never)]
#[target_feature(enable = "avxvnni,avx2,fma")]
pub(super) unsafe fn run_avx_vnni<K: DotKernel>(kernel: K) {
    // SAFETY: the features of this function are those that `D` needs.
    unsafe { kernel.run::<super::packed::Vnni256Dots<false>>() }
}

/// # Safety
/// The CPU supports the enabled features.
#[cfg(target_arch = "x86_64")]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
pub(super) unsafe fn run_vnni_256<K: DotKernel>(kernel: K) {
    // SAFETY: the features of this function are those that `D` needs.
    unsafe { kernel.run::<super::packed::Vnni256Dots<true>>() }
}

/// # Safety
/// The CPU supports the enabled features.
#[cfg(target_arch = "x86_64")]
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn run_avx2_dots<K: DotKernel>(kernel: K) {
    // SAFETY: the features of this function are those that `D` needs.
    unsafe { kernel.run::<super::packed::Avx2Dots>() }
}

/// # Safety
/// The CPU supports the enabled features.
#[cfg(target_arch = "aarch64")]
#[inline(never)]
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn run_neon_dots<K: DotKernel>(kernel: K) {
    // SAFETY: the features of this function are those that `D` needs.
    unsafe { kernel.run::<super::packed::NeonDots<false>>() }
}

/// # Safety
/// The CPU supports the enabled features.
#[cfg(target_arch = "aarch64")]
#[inline(never)]
#[target_feature(enable = "neon,dotprod,i8mm")]
pub(super) unsafe fn run_neon_i8mm<K: DotKernel>(kernel: K) {
    // SAFETY: the features of this function are those that `D` needs.
    unsafe { kernel.run::<super::packed::NeonDots<true>>() }
}
