//! Where a model's tensors come from: the files of a checkpoint, or a generator where only the shapes matter. Matrices are
//! read block by block, by whoever lays them out, so that no tensor ever lies in memory whole beside what is made of it.

use std::ops::Range;

use cpu_kernels::{KSlices, KernelError, NumbersMut, RowBlocks};

use crate::EngineError;
use crate::weights::LinearFormat;

/// A stored matrix, and what of it is wanted: all of it, or what one rank of several holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorPart {
    pub(crate) name: String,
    /// `[rows, columns]`, as stored.
    pub(crate) shape: [usize; 2],
    pub(crate) rows: Range<usize>,
    pub(crate) columns: Range<usize>,
}

impl TensorPart {
    /// All of a matrix.
    pub(crate) fn whole(name: String, shape: [usize; 2]) -> Self {
        Self { name, shape, rows: 0..shape[0], columns: 0..shape[1] }
    }
}

/// What rows of made numbers follow from, for a device that makes them by itself (`cuda/kernels/random.cu`).
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RowSeeds {
    /// One for each row.
    pub(crate) states: Vec<u64>,
    /// Columns that are wanted of each.
    pub(crate) columns: Range<usize>,
    /// The largest number.
    pub(crate) size: f32,
}

/// Named tensors of checked shape.
pub(crate) trait TensorSource: Sync {
    /// Whether the matrix is there and of that shape. Asked before memory is taken for it.
    fn check(&self, part: &TensorPart) -> Result<(), EngineError>;

    /// Fills `out` with rows of a matrix, one behind the other, of each the part's columns. `rows` counts from the part's first.
    fn read(&self, part: &TensorPart, rows: Range<usize>, out: NumbersMut<'_>) -> Result<(), EngineError>;

    /// What the same rows follow from, where numbers are made and not read.
    fn seeds(&self, _part: &TensorPart, _rows: Range<usize>) -> Option<RowSeeds> {
        None
    }

    /// A vector, always f32: norms and biases are too small to save on.
    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, EngineError>;
}

/// Matrices that share their input, as a backend loads them.
pub(crate) struct LinearTensors<'a> {
    pub(crate) source: &'a dyn TensorSource,
    pub(crate) format: LinearFormat,
    /// Their outputs lie one behind the other in a row; all have the columns that `slices` cover.
    pub(crate) parts: Vec<TensorPart>,
    /// One number for each output.
    pub(crate) bias: Option<Vec<f32>>,
    /// How the sums are cut, in columns of the whole matrix.
    pub(crate) slices: KSlices,
    /// Whether other ranks hold the rest of the sums: scales of channels and the bias then come after them.
    pub(crate) partial: bool,
}

/// Parts of tensors that stand one on the other.
pub(crate) struct Stacked<'a> {
    source: &'a dyn TensorSource,
    parts: Vec<TensorPart>,
}

impl LinearTensors<'_> {
    /// The rows of the parts, of each the columns that `slices` cover.
    pub(crate) fn rows(&self) -> Result<Stacked<'_>, EngineError> {
        Stacked::new(self.source, self.parts.clone())
    }

    /// The rows of the parts with all columns, also those that other ranks hold.
    pub(crate) fn whole_rows(&self) -> Result<Stacked<'_>, EngineError> {
        let whole = |part: &TensorPart| TensorPart { columns: 0..part.shape[1], ..part.clone() };
        Stacked::new(self.source, self.parts.iter().map(whole).collect())
    }
}

impl<'a> Stacked<'a> {
    pub(crate) fn new(source: &'a dyn TensorSource, parts: Vec<TensorPart>) -> Result<Self, EngineError> {
        parts.iter().try_for_each(|part| source.check(part))?;
        Ok(Self { source, parts })
    }

    /// What rows follow from, where numbers are made and not read; the parts have the same columns.
    pub(crate) fn seeds(&self, rows: Range<usize>) -> Option<RowSeeds> {
        let mut all: Option<RowSeeds> = None;
        self.pieces(rows).into_iter().try_for_each(|(part, rows)| {
            let seeds = self.source.seeds(part, rows)?;
            match &mut all {
                Some(all) => all.states.extend(seeds.states),
                None => all = Some(seeds),
            }
            Some(())
        })?;
        all
    }

    /// How many there are.
    pub(crate) fn rows(&self) -> usize {
        self.parts.iter().map(|part| part.rows.len()).sum()
    }

    /// Numbers in each.
    pub(crate) fn columns(&self) -> usize {
        self.parts.first().map_or(0, |part| part.columns.len())
    }

    /// Fills `out` with rows, one behind the other.
    pub(crate) fn read(&self, rows: Range<usize>, mut out: NumbersMut<'_>) -> Result<(), EngineError> {
        let (columns, mut filled) = (self.columns(), 0);
        assert_eq!(out.len(), rows.len() * columns, "rows are read to a place of their size");
        for (part, rows) in self.pieces(rows) {
            let end = filled + rows.len() * columns;
            self.source.read(part, rows, out.part(filled..end))?;
            filled = end;
        }
        Ok(())
    }

    /// Rows as rows of the parts, each counted from its part's first.
    fn pieces(&self, rows: Range<usize>) -> Vec<(&TensorPart, Range<usize>)> {
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

/// As the kernels' packers take them.
impl RowBlocks for Stacked<'_> {
    fn rows(&self) -> usize {
        Stacked::rows(self)
    }

    fn columns(&self) -> usize {
        Stacked::columns(self)
    }

    fn read(&self, rows: Range<usize>, out: NumbersMut<'_>) -> Result<(), KernelError> {
        Stacked::read(self, rows, out).map_err(|error| KernelError::Rows(error.into()))
    }
}
