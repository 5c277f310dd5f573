//! Sources of a model's tensors: the files of a checkpoint, or a generator if only the shapes matter.
//! Matrices are read in blocks of rows by the code that packs them, so that memory never has a whole tensor
//! besides its packed form.

use std::ops::Range;

use cpu_kernels::{KSlices, KernelError, NumbersMut, RowBlocks};

use crate::EngineError;
use crate::weights::{Fp8Rows, Fp8Scales, LinearFormat, fp8_rows};

/// A part of a stored matrix: all of it, or what one rank holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorPart {
    pub(crate) name: String,
    /// `[rows, columns]`, as stored.
    pub(crate) shape: [usize; 2],
    pub(crate) rows: Range<usize>,
    pub(crate) columns: Range<usize>,
}

impl TensorPart {
    /// The whole matrix.
    pub(crate) fn whole(name: String, shape: [usize; 2]) -> Self {
        Self { name, shape, rows: 0..shape[0], columns: 0..shape[1] }
    }
}

/// Generator states of rows, for a device that generates the numbers itself (`cuda/kernels/random.cu`).
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RowSeeds {
    /// One per row.
    pub(crate) states: Vec<u64>,
    /// Requested columns of each row.
    pub(crate) columns: Range<usize>,
    /// The largest magnitude.
    pub(crate) size: f32,
}

/// Named tensors of checked shape.
pub(crate) trait TensorSource: Sync {
    /// Returns an error unless the matrix exists with that shape. Called before memory is allocated for it.
    fn check(&self, part: &TensorPart) -> Result<(), EngineError>;

    /// Fills `out` with the part's columns of consecutive rows. `rows` counts from the part's first row.
    fn read(&self, part: &TensorPart, rows: Range<usize>, out: NumbersMut<'_>) -> Result<(), EngineError>;

    /// Fills `out` with the same rows as FP8: as stored, or quantized by row if they are stored in another
    /// format.
    fn read_fp8(&self, part: &TensorPart, rows: Range<usize>, out: Fp8Rows<'_>) -> Result<(), EngineError> {
        fp8_rows::quantize(self, part, rows, out)
    }

    /// Whether a matrix of this name is stored as FP8.
    fn stores_fp8(&self, _name: &str) -> bool {
        false
    }

    /// Generator states of those rows, if the numbers are generated instead of read.
    fn seeds(&self, _part: &TensorPart, _rows: Range<usize>) -> Option<RowSeeds> {
        None
    }

    /// Reads a vector, always as f32: norms and biases are too small for other formats to matter.
    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, EngineError>;
}

/// Matrices with the same input, as a backend loads them.
pub(crate) struct LinearTensors<'a> {
    pub(crate) source: &'a dyn TensorSource,
    pub(crate) format: LinearFormat,
    /// The matrices, in the order of their outputs in a row; all have the columns that `slices` cover.
    pub(crate) parts: Vec<TensorPart>,
    /// One number per output.
    pub(crate) bias: Option<Vec<f32>>,
    /// K-slices of the sums, in columns of the whole matrix.
    pub(crate) slices: KSlices,
    /// Whether other ranks hold the rest of the sums: channel scales and bias are then applied after the
    /// all-reduce.
    pub(crate) partial: bool,
}

/// Parts of tensors, stacked by rows.
pub(crate) struct StackedRows<'a> {
    source: &'a dyn TensorSource,
    parts: Vec<TensorPart>,
}

impl LinearTensors<'_> {
    /// The rows of the parts, with the columns that `slices` cover.
    pub(crate) fn rows(&self) -> Result<StackedRows<'_>, EngineError> {
        StackedRows::new(self.source, self.parts.clone())
    }

    /// Scales of a row's columns in FP8, see [`Fp8Rows::scales_per_row`].
    pub(crate) fn scales_per_row(&self) -> usize {
        match self.format {
            LinearFormat::Fp8(Fp8Scales::Blocks) => self.slices.num_blocks(),
            _ => 1,
        }
    }

    /// The rows of the parts with all columns, including those that other ranks hold.
    pub(crate) fn whole_rows(&self) -> Result<StackedRows<'_>, EngineError> {
        let whole = |part: &TensorPart| TensorPart { columns: 0..part.shape[1], ..part.clone() };
        StackedRows::new(self.source, self.parts.iter().map(whole).collect())
    }
}

impl<'a> StackedRows<'a> {
    pub(crate) fn new(source: &'a dyn TensorSource, parts: Vec<TensorPart>) -> Result<Self, EngineError> {
        parts.iter().try_for_each(|part| source.check(part))?;
        Ok(Self { source, parts })
    }

    /// Generator states of rows, if the numbers are generated instead of read. All parts have the same
    /// columns.
    pub(crate) fn seeds(&self, rows: Range<usize>) -> Option<RowSeeds> {
        let mut all: Option<RowSeeds> = None;
        self.split_by_part(rows).into_iter().try_for_each(|(part, rows)| {
            let seeds = self.source.seeds(part, rows)?;
            match &mut all {
                Some(all) => all.states.extend(seeds.states),
                None => all = Some(seeds),
            }
            Some(())
        })?;
        all
    }

    /// Total number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.parts.iter().map(|part| part.rows.len()).sum()
    }

    /// Number of columns of each row.
    pub(crate) fn columns(&self) -> usize {
        self.parts.first().map_or(0, |part| part.columns.len())
    }

    /// Fills `out` with consecutive rows.
    pub(crate) fn read(&self, rows: Range<usize>, mut out: NumbersMut<'_>) -> Result<(), EngineError> {
        let (columns, mut filled) = (self.columns(), 0);
        assert_eq!(out.len(), rows.len() * columns, "the output must have the size of the rows");
        for (part, rows) in self.split_by_part(rows) {
            let end = filled + rows.len() * columns;
            self.source.read(part, rows, out.part(filled..end))?;
            filled = end;
        }
        Ok(())
    }

    /// Fills `out` with rows as FP8.
    pub(crate) fn read_fp8(&self, rows: Range<usize>, mut out: Fp8Rows<'_>) -> Result<(), EngineError> {
        let (columns, mut filled) = (self.columns(), 0);
        assert_eq!(out.codes.len(), rows.len() * columns, "the output must have the size of the rows");
        for (part, rows) in self.split_by_part(rows) {
            let end = filled + rows.len();
            self.source.read_fp8(part, rows, out.part(filled..end, columns))?;
            filled = end;
        }
        Ok(())
    }

    /// Splits rows into rows of the parts, each counted from its part's first row.
    fn split_by_part(&self, rows: Range<usize>) -> Vec<(&TensorPart, Range<usize>)> {
        let mut first = 0;
        let mut pieces = Vec::new();
        for part in &self.parts {
            let wanted = rows.start.max(first)..rows.end.min(first + part.rows.len());
            if !wanted.is_empty() {
                pieces.push((part, wanted.start - first..wanted.end - first));
            }
            first += part.rows.len();
        }
        pieces
    }
}

/// The interface that the kernels' packing functions read from.
impl RowBlocks for StackedRows<'_> {
    fn rows(&self) -> usize {
        StackedRows::rows(self)
    }

    fn columns(&self) -> usize {
        StackedRows::columns(self)
    }

    fn read(&self, rows: Range<usize>, out: NumbersMut<'_>) -> Result<(), KernelError> {
        StackedRows::read(self, rows, out).map_err(|error| KernelError::Rows(error.into()))
    }
}
