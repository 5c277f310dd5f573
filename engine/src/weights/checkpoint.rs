//! The files of a checkpoint: one model.safetensors, or an index and its shards.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use safetensors::tensor::{Dtype, SafeTensors};

use crate::EngineError;
use crate::model_config::fields::{Fields, read_json_object};

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

/// The formats that the engine reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoredDtype {
    F32,
    F16,
    Bf16,
}

/// A mapped file and where its tensors lie.
#[derive(Debug)]
struct Shard {
    path: PathBuf,
    map: Arc<Mmap>,
    tensors: HashMap<String, Location>,
}

#[derive(Debug)]
struct Location {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Range<usize>,
}

/// A tensor's bytes, in place.
#[derive(Debug)]
pub(crate) struct StoredTensor<'a> {
    pub(crate) dtype: StoredDtype,
    pub(crate) bytes: &'a [u8],
    pub(crate) map: &'a Arc<Mmap>,
    pub(crate) range: Range<usize>,
}

/// All tensors of a model directory.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    shards: Vec<Shard>,
    /// Which shard holds a tensor.
    weight_map: HashMap<String, usize>,
    /// The file that says what tensors there are.
    contents: PathBuf,
}

impl Checkpoint {
    pub(crate) fn open(model_dir: &Path) -> Result<Self, EngineError> {
        let index = model_dir.join(INDEX_FILE);
        let single = model_dir.join(SINGLE_FILE);
        // Where both are, the single file wins, as it does in transformers.
        if single.exists() || !index.exists() {
            let shard = Shard::open(single.clone())?;
            let weight_map = shard.tensors.keys().map(|name| (name.clone(), 0)).collect();
            return Ok(Self { shards: vec![shard], weight_map, contents: single });
        }
        Self::open_sharded(model_dir, index)
    }

    fn open_sharded(model_dir: &Path, index: PathBuf) -> Result<Self, EngineError> {
        let object = read_json_object(&index)?;
        let fields = Fields::top(&index, &object);
        let map = fields.nested("weight_map")?.ok_or_else(|| fields.missing("weight_map"))?;
        let mut file_of = Vec::new();
        for tensor in map.names() {
            let file = map.optional_string(tensor)?.ok_or_else(|| map.missing(tensor))?;
            if Path::new(file).file_name().is_none_or(|name| name != file) {
                return Err(
                    map.bad(tensor, format!("is \"{file}\", expected a file name in the same directory"))
                );
            }
            file_of.push((tensor, file));
        }
        let files: BTreeSet<&str> = file_of.iter().map(|(_, file)| *file).collect();
        let files: Vec<&str> = files.into_iter().collect();
        let shards =
            files.iter().map(|file| Shard::open(model_dir.join(file))).collect::<Result<Vec<_>, _>>()?;
        let shard_of = |file| files.binary_search(&file).expect("every file of the map was collected above");
        let weight_map =
            file_of.iter().map(|(tensor, file)| ((*tensor).to_owned(), shard_of(*file))).collect();
        Ok(Self { shards, weight_map, contents: index })
    }

    /// Looks a tensor up and compares its shape.
    pub(crate) fn tensor(&self, name: &str, expected: &[usize]) -> Result<StoredTensor<'_>, EngineError> {
        let missing =
            |path: &Path| EngineError::MissingTensor { tensor: name.to_owned(), path: path.to_owned() };
        let shard = &self.shards[*self.weight_map.get(name).ok_or_else(|| missing(&self.contents))?];
        let location = shard.tensors.get(name).ok_or_else(|| missing(&shard.path))?;
        if location.shape != expected {
            return Err(EngineError::WrongShape {
                tensor: name.to_owned(),
                path: shard.path.clone(),
                expected: expected.to_vec(),
                found: location.shape.clone(),
            });
        }
        let dtype = match location.dtype {
            Dtype::F32 => StoredDtype::F32,
            Dtype::F16 => StoredDtype::F16,
            Dtype::BF16 => StoredDtype::Bf16,
            other => {
                return Err(EngineError::WrongDtype {
                    tensor: name.to_owned(),
                    path: shard.path.clone(),
                    found: format!("{other:?}"),
                });
            }
        };
        let range = location.bytes.clone();
        Ok(StoredTensor { dtype, bytes: &shard.map[range.clone()], map: &shard.map, range })
    }

    /// Whether every tensor of the checkpoint is stored as bf16.
    pub(super) fn all_bf16(&self) -> bool {
        self.shards.iter().flat_map(|shard| shard.tensors.values()).all(|t| t.dtype == Dtype::BF16)
    }

    /// The mapped files in the order of their names.
    pub(super) fn files(&self) -> impl Iterator<Item = &[u8]> {
        self.shards.iter().map(|shard| &shard.map[..])
    }
}

impl Shard {
    fn open(path: PathBuf) -> Result<Self, EngineError> {
        let io = |source| EngineError::Io { path: path.clone(), source };
        let file = File::open(&path).map_err(io)?;
        if !file.metadata().map_err(io)?.is_file() {
            return Err(EngineError::BrokenFile { path, reason: "not a regular file".to_owned() });
        }
        let map = map(&file).map_err(io)?;
        let (header_len, metadata) = match SafeTensors::read_metadata(&map) {
            Ok(parsed) => parsed,
            Err(error) => {
                let reason = format!("truncated or not a safetensors file: {error}");
                return Err(EngineError::BrokenFile { path, reason });
            }
        };
        // The header's length field is 8 bytes; offsets count from the end of the header.
        let data_start = 8 + header_len;
        let tensors = metadata
            .tensors()
            .into_iter()
            .map(|(name, info)| {
                let bytes = data_start + info.data_offsets.0..data_start + info.data_offsets.1;
                (name, Location { dtype: info.dtype, shape: info.shape.clone(), bytes })
            })
            .collect();
        Ok(Self { path, map: Arc::new(map), tensors })
    }
}

#[expect(unsafe_code, reason = "mapping a file is the one unsafe call outside cpu/")]
fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the map is read-only and private to this process. That no other process changes the file
    // meanwhile is asked of the operator in the head of `weights`; no type invariant rests on the bytes,
    // which are only ever read as plain numbers.
    unsafe { Mmap::map(file) }
}
