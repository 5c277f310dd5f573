//! Quantizes and packs a matrix panel by panel, in parallel, directly from its storage. Runs once, at load.
//! The naive twin of the rounding is in `reference::quantized`.

use half::bf16;

use super::layout::{GROUP, KLayout};
use super::{PANEL, PackedMatrix, Scales, k_per_line, shift};
use crate::KernelError;
use crate::Threads;
use crate::dispatch::{Isa, Kernel};
use crate::k_slices::KSlices;
use crate::lines::{Line, Lines};
use crate::matrix::{NumbersMut, QuantizedFormat, RowBlocks};
use crate::simd::F32x16;
use crate::threads::SharedSliceMut;
use crate::transpose::{LINE_WORDS, transpose};

/// Maximum length of a sum of int8 products; a longer one might overflow 32 bits.
const MAX_SUM: usize = 131_072;

/// Smaller numbers are treated as zero, since the inverse of their scale might be infinite.
pub(super) const SMALLEST: f32 = 1e-30;

/// All bits of an f32 but the sign.
const WITHOUT_SIGN: u32 = 0x7fff_ffff;

impl PackedMatrix {
    /// Quantizes rows, which may have more columns than the K-slices cover: scales are those of whole rows.
    pub fn pack(
        format: QuantizedFormat,
        slices: &KSlices,
        rows: &dyn RowBlocks,
        threads: &Threads,
    ) -> Result<Self, KernelError> {
        let layout = KLayout::new(format, slices);
        check_sums(&layout)?;
        let (width, k) = (rows.rows(), rows.columns());
        let (panels, panel_lines) = (width.div_ceil(PANEL), layout.padded() / k_per_line(format));
        let panel_groups = layout.pieces().len() * PANEL;
        let mut lines = Lines::of_matrix(panels * panel_lines)?;
        let mut scales = match format {
            QuantizedFormat::Int8 => Scales::Channel(vec![0.0; panels * PANEL]),
            QuantizedFormat::Int4 => Scales::Group(vec![bf16::ZERO; panels * panel_groups]),
        };
        let (shared_lines, shared_scales) = (SharedSliceMut::new(&mut lines), SharedScales::new(&mut scales));
        let isa = Isa::in_use()?;
        threads.try_for_ranges(panels, |range| {
            let mut numbers = vec![0.0f32; PANEL.min(width) * k];
            let mut codes = QuantizedPanel::new(&layout);
            for panel in range {
                let channels = panel * PANEL..width.min((panel + 1) * PANEL);
                let numbers = &mut numbers[..channels.len() * k];
                rows.read(channels, NumbersMut::F32(numbers))?;
                // SAFETY: every panel is quantized once, and its lines and scales belong to no other panel.
                let (lines, scales) = unsafe {
                    let lines = shared_lines.slice_mut(panel * panel_lines..(panel + 1) * panel_lines);
                    (lines, shared_scales.of_panel(panel, panel_groups))
                };
                isa.run(QuantizePanel { layout: &layout, numbers, k, codes: &mut codes, scales });
                codes.pack_lines(lines);
            }
            Ok(())
        })?;
        Ok(Self { width, layout, lines, scales })
    }
}

fn check_sums(layout: &KLayout) -> Result<(), KernelError> {
    let Some(piece) = layout.pieces().iter().find(|piece| piece.len > MAX_SUM) else { return Ok(()) };
    let reason = format!(
        "a sum of this many int8 products may overflow 32 bits, expected at most {MAX_SUM}; use int4 or bf16"
    );
    Err(KernelError::BadOption { option: "weights", value: piece.k.len() as u64, reason })
}

/// [`Scales`] that several threads write.
enum SharedScales<'a> {
    Channel(SharedSliceMut<'a, f32>),
    Group(SharedSliceMut<'a, bf16>),
}

impl<'a> SharedScales<'a> {
    fn new(scales: &'a mut Scales) -> Self {
        match scales {
            Scales::Channel(scales) => Self::Channel(SharedSliceMut::new(scales)),
            Scales::Group(scales) => Self::Group(SharedSliceMut::new(scales)),
        }
    }

    /// # Safety
    /// No two results for one panel may live at the same time.
    unsafe fn of_panel(&self, panel: usize, groups: usize) -> PanelScales<'_> {
        // SAFETY: panels do not overlap; the caller guarantees that no two results are for one panel.
        unsafe {
            match self {
                Self::Channel(scales) => {
                    PanelScales::Channel(scales.slice_mut(panel * PANEL..(panel + 1) * PANEL))
                }
                Self::Group(scales) => {
                    PanelScales::Group(scales.slice_mut(panel * groups..(panel + 1) * groups))
                }
            }
        }
    }
}

/// Scales of one panel.
enum PanelScales<'a> {
    /// `[PANEL]`.
    Channel(&'a mut [f32]),
    /// `[piece of K][PANEL]`.
    Group(&'a mut [bf16]),
}

/// Quantized values (codes) of a panel's channels, one byte each: `[PANEL, padded]`.
struct QuantizedPanel {
    format: QuantizedFormat,
    padded: usize,
    bytes: Vec<u8>,
}

impl QuantizedPanel {
    /// Bytes that are not written stay zero: padding, and missing channels of the last panel. The buffer is
    /// reused safely, because only a thread's last panel can lack channels.
    fn new(layout: &KLayout) -> Self {
        let (format, padded) = (layout.format(), layout.padded());
        Self { format, padded, bytes: vec![shift(format) as u8; PANEL * padded] }
    }

    /// Packs four int8 codes per word, or eight of int4 with the second four in the high halves. Words of
    /// neighbouring channels are adjacent.
    fn pack_lines(&self, lines: &mut [Line]) {
        let per_word = k_per_line(self.format);
        for (block, lines) in lines.chunks_mut(LINE_WORDS).enumerate() {
            let mut words = [[0u32; LINE_WORDS]; PANEL];
            for (words, codes) in words.iter_mut().zip(self.bytes.chunks_exact(self.padded)) {
                let codes = codes[block * LINE_WORDS * per_word..].chunks_exact(per_word);
                for (word, codes) in words.iter_mut().zip(codes) {
                    let quad = |at: usize| [codes[at], codes[at + 1], codes[at + 2], codes[at + 3]];
                    *word = match self.format {
                        QuantizedFormat::Int8 => u32::from_ne_bytes(quad(0)),
                        QuantizedFormat::Int4 => {
                            u32::from_ne_bytes(quad(0)) | u32::from_ne_bytes(quad(4)) << 4
                        }
                    };
                }
            }
            transpose(&words, lines);
        }
    }
}

/// Kernel that quantizes the channels of one panel.
struct QuantizePanel<'a> {
    layout: &'a KLayout,
    /// `[channels, k]`.
    numbers: &'a [f32],
    k: usize,
    codes: &'a mut QuantizedPanel,
    scales: PanelScales<'a>,
}

impl Kernel for QuantizePanel<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: F32x16>(mut self) {
        let channels =
            self.numbers.chunks_exact(self.k).zip(self.codes.bytes.chunks_exact_mut(self.codes.padded));
        for (channel, (numbers, codes)) in channels.enumerate() {
            match &mut self.scales {
                PanelScales::Channel(scales) => {
                    let (scale, inverse) = int8_scale(numbers);
                    scales[channel] = scale;
                    for piece in self.layout.pieces() {
                        let codes = &mut codes[piece.start..piece.start + piece.len];
                        quantize(&numbers[piece.k.clone()], inverse, QuantizedFormat::Int8, codes);
                    }
                }
                PanelScales::Group(scales) => {
                    for (index, piece) in self.layout.pieces().iter().enumerate() {
                        // A part of a group has the whole group's scale, so slicing K does not change a
                        // weight.
                        let group = piece.k.start / GROUP * GROUP;
                        let scale = int4_scale(&numbers[group..numbers.len().min(group + GROUP)]);
                        scales[index * PANEL + channel] = scale;
                        let inverse = if scale == bf16::ZERO { 0.0 } else { 1.0 / scale.to_f32() };
                        let codes = &mut codes[piece.start..piece.start + piece.len];
                        quantize(&numbers[piece.k.clone()], inverse, QuantizedFormat::Int4, codes);
                    }
                }
            }
        }
    }
}

/// Quantizes numbers. A NaN becomes 0; its scale is a NaN already.
#[inline(always)]
fn quantize(numbers: &[f32], inverse: f32, format: QuantizedFormat, codes: &mut [u8]) {
    let (min, max) = match format {
        QuantizedFormat::Int8 => (-127.0, 127.0),
        QuantizedFormat::Int4 => (-8.0, 7.0),
    };
    for (out, x) in codes.iter_mut().zip(numbers) {
        let code = (x * inverse).round_ties_even().clamp(min, max) as i32;
        *out = code.wrapping_add(shift(format)) as u8;
    }
}

/// The scale that maps the largest number to 127, and its inverse. The scale is NaN if a number is not
/// finite, so that the result shows it.
#[inline(always)]
pub(super) fn int8_scale(numbers: &[f32]) -> (f32, f32) {
    let largest = largest(numbers);
    if !largest.is_finite() {
        (f32::NAN, 0.0)
    } else if largest < SMALLEST {
        (0.0, 0.0)
    } else {
        (largest / 127.0, 127.0 / largest)
    }
}

/// The scale that maps the number farthest from zero (the first one if several) to -8, whatever its sign, so
/// that all sixteen codes are used and not fifteen.
#[inline(always)]
fn int4_scale(group: &[f32]) -> bf16 {
    let largest = largest(group);
    if !largest.is_finite() {
        bf16::NAN
    } else if largest < SMALLEST {
        bf16::ZERO
    } else {
        let farthest = group.iter().find(|x| x.abs() == largest);
        bf16::from_f32(farthest.expect("the largest magnitude is that of an element") / -8.0)
    }
}

/// The largest magnitude; not finite if one of the numbers is not.
#[inline(always)]
fn largest(numbers: &[f32]) -> f32 {
    // Without signs, floats are ordered like their bits, and non-finite numbers are above all others.
    let mut largest = 0;
    for x in numbers {
        largest = largest.max(x.to_bits() & WITHOUT_SIGN);
    }
    f32::from_bits(largest)
}
