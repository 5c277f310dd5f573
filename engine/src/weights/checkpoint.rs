//! The open files of a checkpoint, and where each tensor lies in them.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use super::fp8::{self, Granularity, StoredScales};
use super::source::TensorPart;
use crate::EngineError;
use crate::lfs_pointer::check_lfs_pointer;
use crate::model_config::ModelConfig;
use crate::weight_files::{WeightFile, WeightFiles};

/// Size of the header length at the start of a file.
const LENGTH_BYTES: u64 = 8;
/// Enough of a file's start to recognize a pointer of Git LFS.
const START_BYTES: usize = 32;
/// A header of this size can name a hundred thousand tensors; a longer one is refused.
const MAX_HEADER_BYTES: u64 = 32 << 20;

/// Stored formats that the engine reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StoredDtype {
    F32,
    F16,
    Bf16,
    /// E4M3, with scales in a separate tensor.
    Fp8,
}

impl StoredDtype {
    /// Bytes per number.
    pub(super) fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Fp8 => 1,
        }
    }
}

/// A file and the locations of its tensors.
#[derive(Debug)]
pub(super) struct ShardFile {
    path: PathBuf,
    file: File,
    len: u64,
    tensors: HashMap<String, Location>,
}

#[derive(Debug)]
struct Location {
    dtype: Dtype,
    shape: Vec<usize>,
    /// Offset from the beginning of the file.
    start: u64,
    num_bytes: usize,
}

/// A tensor in its file, with checked shape and dtype.
#[derive(Debug)]
pub(super) struct StoredTensor<'a> {
    pub(super) dtype: StoredDtype,
    /// Set for FP8 matrices only.
    pub(super) scales: Option<Box<StoredScales<'a>>>,
    shard: &'a ShardFile,
    start: u64,
    num_bytes: usize,
}

impl StoredTensor<'_> {
    pub(super) fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// Bytes of one row of a matrix, with all its columns.
    pub(super) fn row_bytes(&self, part: &TensorPart) -> usize {
        part.shape[1] * self.dtype.size()
    }

    /// Fills `bytes` from byte `first` of the tensor.
    pub(super) fn read(&self, first: usize, bytes: &mut [u8]) -> Result<(), EngineError> {
        self.shard.read(self.start + first as u64, bytes)
    }

    /// Offset of the part's columns in one of its rows; `row` counts from the part's first row.
    pub(super) fn offset(&self, part: &TensorPart, row: usize) -> usize {
        (part.rows.start + row) * self.row_bytes(part) + part.columns.start * self.dtype.size()
    }
}

/// All tensors of a model directory.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    shards: Vec<ShardFile>,
    /// Index of the shard that holds a tensor.
    weight_map: HashMap<String, usize>,
    /// The file that lists the tensors.
    listing: PathBuf,
    /// [`ModelConfig::quantization`], for errors.
    quantization: Option<String>,
}

impl Checkpoint {
    /// Opens the files of a checkpoint and compares them with its configuration.
    pub(crate) fn open(model_dir: &Path, config: &ModelConfig) -> Result<Self, EngineError> {
        let quantization = config.quantization.clone();
        let checkpoint = Self { quantization, ..Self::open_files(model_dir)? };
        checkpoint.check_tied(config)?;
        checkpoint.warn_of_unused(config);
        Ok(checkpoint)
    }

    fn open_files(model_dir: &Path) -> Result<Self, EngineError> {
        let WeightFiles { listing, files } = WeightFiles::of(model_dir)?;
        let (mut shards, mut weight_map) = (Vec::new(), HashMap::new());
        for (i, WeightFile { path, tensors }) in files.into_iter().enumerate() {
            let shard = ShardFile::open(path)?;
            match tensors {
                Some(names) => weight_map.extend(names.into_iter().map(|name| (name, i))),
                None => weight_map.extend(shard.tensors.keys().map(|name| (name.clone(), i))),
            }
            shards.push(shard);
        }
        Ok(Self { shards, weight_map, listing, quantization: None })
    }

    /// Looks up a tensor and checks its shape.
    pub(super) fn tensor(&self, name: &str, expected: &[usize]) -> Result<StoredTensor<'_>, EngineError> {
        self.find(name, expected).map_err(|error| match &self.quantization {
            Some(method) => EngineError::Quantized { error: Box::new(error), method: method.clone() },
            None => error,
        })
    }

    fn find(&self, name: &str, expected: &[usize]) -> Result<StoredTensor<'_>, EngineError> {
        let (shard, location) = self.locate(name)?;
        if location.shape != expected {
            return Err(wrong_shape(name, expected, (shard, location)));
        }
        let tensor = shard.stored(name, location)?;
        match (tensor.dtype, expected) {
            (StoredDtype::Fp8, &[rows, columns]) => {
                let scales = Some(Box::new(self.scales(name, [rows, columns])?));
                Ok(StoredTensor { scales, ..tensor })
            }
            (StoredDtype::Fp8, _) => Err(wrong_dtype(name, (shard, location))),
            _ => Ok(tensor),
        }
    }

    fn locate(&self, name: &str) -> Result<(&ShardFile, &Location), EngineError> {
        let missing =
            |path: &Path| EngineError::MissingTensor { tensor: name.to_owned(), path: path.to_owned() };
        let shard = &self.shards[*self.weight_map.get(name).ok_or_else(|| missing(&self.listing))?];
        Ok((shard, shard.tensors.get(name).ok_or_else(|| missing(&shard.path))?))
    }

    /// Looks up the scales of an FP8 matrix.
    fn scales(&self, matrix: &str, shape: [usize; 2]) -> Result<StoredScales<'_>, EngineError> {
        let names = fp8::SCALE_NAMES.map(|end| format!("{matrix}{end}"));
        let name = names.iter().find(|name| self.weight_map.contains_key(*name)).unwrap_or(&names[0]);
        let (shard, location) = self.locate(name)?;
        let granularity = Granularity::of(&location.shape, shape)
            .ok_or_else(|| wrong_shape(name, &[shape[0], 1], (shard, location)))?;
        let numbers = shard.stored(name, location)?;
        if numbers.dtype == StoredDtype::Fp8 {
            return Err(wrong_dtype(name, (shard, location)));
        }
        Ok(StoredScales { numbers, granularity })
    }

    /// Whether there is a tensor of this name, stored as FP8.
    pub(super) fn is_fp8(&self, name: &str) -> bool {
        self.locate(name).is_ok_and(|(_, location)| location.dtype == Dtype::F8_E4M3)
    }

    /// Whether there is a tensor of this name, stored as bf16.
    pub(super) fn is_bf16(&self, name: &str) -> bool {
        self.locate(name).is_ok_and(|(_, location)| location.dtype == Dtype::BF16)
    }

    /// Names of all tensors.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.weight_map.keys().map(String::as_str)
    }

    /// The directory of the files.
    pub(super) fn directory(&self) -> &Path {
        self.listing.parent().unwrap_or(Path::new(""))
    }

    /// The files in the order of their names.
    pub(super) fn shards(&self) -> &[ShardFile] {
        &self.shards
    }
}

fn wrong_shape(tensor: &str, expected: &[usize], (shard, location): (&ShardFile, &Location)) -> EngineError {
    EngineError::WrongShape {
        tensor: tensor.to_owned(),
        path: shard.path.clone(),
        expected: expected.to_vec(),
        found: location.shape.clone(),
    }
}

fn wrong_dtype(tensor: &str, (shard, location): (&ShardFile, &Location)) -> EngineError {
    EngineError::WrongDtype {
        tensor: tensor.to_owned(),
        path: shard.path.clone(),
        found: format!("{:?}", location.dtype),
    }
}

impl ShardFile {
    /// A tensor without its scales.
    fn stored(&self, name: &str, location: &Location) -> Result<StoredTensor<'_>, EngineError> {
        let dtype = match location.dtype {
            Dtype::F32 => StoredDtype::F32,
            Dtype::F16 => StoredDtype::F16,
            Dtype::BF16 => StoredDtype::Bf16,
            Dtype::F8_E4M3 => StoredDtype::Fp8,
            _ => return Err(wrong_dtype(name, (self, location))),
        };
        let (start, num_bytes) = (location.start, location.num_bytes);
        Ok(StoredTensor { dtype, scales: None, shard: self, start, num_bytes })
    }

    fn open(path: PathBuf) -> Result<Self, EngineError> {
        let io = |source| EngineError::Io { path: path.clone(), source };
        let file = File::open(&path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        if !metadata.is_file() {
            return Err(EngineError::BrokenFile { path, reason: "not a regular file".to_owned() });
        }
        let mut shard = Self { path, file, len: metadata.len(), tensors: HashMap::new() };
        shard.tensors = shard.read_header().map_err(|error| match error {
            HeaderError::Engine(error) => error,
            HeaderError::Broken(reason) => EngineError::BrokenFile {
                path: shard.path.clone(),
                reason: format!("truncated or not a safetensors file: {reason}"),
            },
        })?;
        Ok(shard)
    }

    /// Size of the file in bytes when it was opened.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Fills `bytes` from byte `start` of the file; an error if the file has become too short.
    pub(super) fn read(&self, start: u64, bytes: &mut [u8]) -> Result<(), EngineError> {
        let io = |source| EngineError::Io { path: self.path.clone(), source };
        self.file.read_exact_at(bytes, start).map_err(io)
    }

    /// Reads the locations of the tensors. Verifies that all of them lie inside the file, and that together
    /// they fill it.
    fn read_header(&self) -> Result<HashMap<String, Location>, HeaderError> {
        let broken = |reason: String| HeaderError::Broken(reason);
        let max_len = self.len.checked_sub(LENGTH_BYTES).ok_or_else(|| broken("no header".to_owned()))?;
        let mut start = vec![0; START_BYTES.min(self.len as usize)];
        self.read(0, &mut start)?;
        check_lfs_pointer(&start).map_err(|error| broken(error.to_string()))?;
        let mut length = [0; LENGTH_BYTES as usize];
        length.copy_from_slice(&start[..LENGTH_BYTES as usize]);
        let header_len = u64::from_le_bytes(length);
        if header_len > max_len.min(MAX_HEADER_BYTES) {
            let reason =
                format!("a header of {header_len} bytes, expected at most {}", max_len.min(MAX_HEADER_BYTES));
            return Err(broken(reason));
        }
        let mut header = vec![0; header_len as usize];
        self.read(LENGTH_BYTES, &mut header)?;
        let header: Metadata =
            serde_json::from_slice(&header).map_err(|error| broken(format!("invalid header: {error}")))?;
        let data_start = LENGTH_BYTES + header_len;
        let mut tensors = HashMap::new();
        let mut filled = 0;
        let by_name = header.tensors();
        // In order of their offsets, so that every run reports the same first error.
        for name in header.offset_keys() {
            let Some(info) = by_name.get(&name) else { continue };
            let location = locate(info, data_start).filter(|at| at.start + at.num_bytes as u64 <= self.len);
            let Some(location) = location else {
                return Err(broken(format!(
                    "tensor `{name}` has offsets that contradict its shape or the file length"
                )));
            };
            filled += location.num_bytes as u64;
            tensors.insert(name, location);
        }
        if data_start + filled != self.len {
            let reason = format!("tensors of {filled} bytes in {} bytes of data", self.len - data_start);
            return Err(broken(reason));
        }
        Ok(tensors)
    }
}

/// Error of reading a header.
enum HeaderError {
    Engine(EngineError),
    Broken(String),
}

impl From<EngineError> for HeaderError {
    fn from(error: EngineError) -> Self {
        Self::Engine(error)
    }
}

/// A tensor's location in the file, or `None` if offsets and shape contradict each other. Offsets in `info`
/// count from the end of the header.
fn locate(info: &TensorInfo, data_start: u64) -> Option<Location> {
    let (start, end) = info.data_offsets;
    let numbers = info.shape.iter().try_fold(1usize, |product, &n| product.checked_mul(n))?;
    let bits = numbers.checked_mul(info.dtype.bitsize())?;
    let num_bytes = end.checked_sub(start)?;
    if !bits.is_multiple_of(8) || bits / 8 != num_bytes {
        return None;
    }
    let start = data_start.checked_add(start as u64)?;
    start.checked_add(num_bytes as u64)?;
    Some(Location { dtype: info.dtype, shape: info.shape.clone(), start, num_bytes })
}
