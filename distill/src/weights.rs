//! A checkpoint's weights as trainable numbers, and writing a new checkpoint in the same format.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use engine::weight_files::{SINGLE_FILE, WeightFile, WeightFiles};
use half::{bf16, f16};
use ndarray::Array2;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use tempfile::TempDir;

use crate::error::DistillError;

/// Endings of files with weights and of their indices, in any format. They are not copied: beside the trained
/// weights, the old ones could be taken for them.
const WEIGHT_ENDINGS: [&str; 9] = [
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
];

/// Makes a checkpoint readable by other users.
const DIRECTORY_MODE: u32 = 0o755;

/// Tensors of a checkpoint in f32, by name. A vector is a matrix of one row.
#[derive(Debug, Clone)]
pub struct Weights {
    directory: PathBuf,
    tensors: BTreeMap<String, Tensor>,
}

/// A tensor of a checkpoint.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// The values.
    pub numbers: Array2<f32>,
    /// The shape in the checkpoint.
    shape: Vec<usize>,
    dtype: Dtype,
}

impl Tensor {
    /// Whether it is a matrix; norms and biases are not.
    pub fn is_matrix(&self) -> bool {
        self.shape.len() > 1
    }
}

impl Weights {
    /// Reads the given tensors, each with its shape, from a checkpoint directory, as the engine would. All
    /// other tensors are left out, also when the weights are written: a copy of tied embeddings, for example,
    /// would no longer equal them.
    ///
    /// # Errors
    /// A file cannot be read, or the index names one in another directory; a tensor is missing, or has another
    /// shape or a format other than f32, f16 or bf16.
    pub fn read(directory: &Path, wanted: &[(String, Vec<usize>)]) -> Result<Self, DistillError> {
        let mut tensors = BTreeMap::new();
        for WeightFile { path, tensors: listed } in WeightFiles::of(directory)?.files {
            let bytes =
                fs::read(&path).map_err(|source| DistillError::Read { path: path.clone(), source })?;
            let broken = |reason: String| DistillError::Unsupported { path: path.clone(), reason };
            let file = SafeTensors::deserialize(&bytes).map_err(|error| broken(error.to_string()))?;
            for (name, _) in wanted {
                if listed.as_ref().is_some_and(|listed| !listed.contains(name)) {
                    continue;
                }
                let Ok(view) = file.tensor(name) else { continue };
                tensors.insert(name.clone(), read(&view).map_err(|why| broken(format!("{name} {why}")))?);
            }
        }
        let weights = Self { directory: directory.to_owned(), tensors };
        for (name, shape) in wanted {
            weights.get(name, shape)?;
        }
        Ok(weights)
    }

    /// Returns a tensor that must exist with this shape.
    pub fn get(&self, name: &str, shape: &[usize]) -> Result<&Array2<f32>, DistillError> {
        let found = self.tensors.get(name).filter(|tensor| tensor.shape == shape);
        found.map(|tensor| &tensor.numbers).ok_or_else(|| DistillError::NoTensor {
            path: self.directory.clone(),
            name: name.to_owned(),
            shape: shape.to_vec(),
        })
    }

    /// Returns a tensor, if it exists.
    pub fn find(&self, name: &str) -> Option<&Array2<f32>> {
        self.tensors.get(name).map(|tensor| &tensor.numbers)
    }

    /// Bytes that the tensors take in a file, in their original formats.
    pub fn stored_bytes(&self) -> u64 {
        let stored = |tensor: &Tensor| tensor.numbers.len() * if tensor.dtype == Dtype::F32 { 4 } else { 2 };
        self.tensors.values().map(|tensor| stored(tensor) as u64).sum()
    }

    /// All tensors, in order of their names.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&str, &mut Tensor)> {
        self.tensors.iter_mut().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// Names of all tensors, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Writes a checkpoint directory with these weights, in their original formats, and copies every file of
    /// the old directory that holds no weights. The directory appears whole or not at all.
    ///
    /// # Errors
    /// A file cannot be written, or `out` already exists.
    pub fn write(&self, out: &Path) -> Result<(), DistillError> {
        let unwritable = |source| DistillError::Write { path: out.to_owned(), source };
        let unfinished = unfinished_beside(out).map_err(unwritable)?;
        for path in files(&self.directory)?.into_iter().filter(|path| path.is_file()) {
            let name = path.file_name().expect("a file of a directory has a name");
            if !holds_weights(&name.to_string_lossy()) {
                fs::copy(&path, unfinished.path().join(name)).map_err(unwritable)?;
            }
        }
        fs::write(unfinished.path().join(SINGLE_FILE), self.to_bytes()).map_err(unwritable)?;
        fs::set_permissions(unfinished.path(), Permissions::from_mode(DIRECTORY_MODE)).map_err(unwritable)?;
        fs::rename(unfinished.path(), out).map_err(unwritable)?;
        // The directory was renamed: there is nothing to remove.
        drop(unfinished.keep());
        Ok(())
    }

    /// Serializes the tensors to a safetensors file.
    fn to_bytes(&self) -> Vec<u8> {
        let stored: Vec<(&str, &Tensor, Vec<u8>)> =
            self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor, bytes(tensor))).collect();
        let views = stored.iter().map(|(name, tensor, bytes)| {
            let view = TensorView::new(tensor.dtype, tensor.shape.clone(), bytes);
            (*name, view.expect("a tensor has as many bytes as its shape says"))
        });
        let format = Some([("format".to_owned(), "pt".to_owned())].into());
        safetensors::serialize(views, format).expect("tensors in memory can be written to memory")
    }
}

/// Finds out before a training whether its result can be written to `out`, whose parents are created.
///
/// # Errors
/// `out` exists, or no directory can be created beside it.
pub fn check_out(out: &Path) -> Result<(), DistillError> {
    let checked = match fs::symlink_metadata(out) {
        Ok(_) => Err(std::io::ErrorKind::AlreadyExists.into()),
        Err(_) => unfinished_beside(out).map(drop),
    };
    checked.map_err(|source| DistillError::Write { path: out.to_owned(), source })
}

/// An empty directory in which a checkpoint is written before it is renamed to `out`.
fn unfinished_beside(out: &Path) -> std::io::Result<TempDir> {
    let parent = match out.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    fs::create_dir_all(parent)?;
    tempfile::Builder::new().prefix(".distilled-").tempdir_in(parent)
}

fn read(view: &TensorView<'_>) -> Result<Tensor, String> {
    let (dtype, shape) = (view.dtype(), view.shape().to_vec());
    let numbers: Vec<f32> = match dtype {
        Dtype::F32 => numbers(view.data(), f32::from_le_bytes),
        Dtype::F16 => numbers(view.data(), |bytes| f16::from_le_bytes(bytes).to_f32()),
        Dtype::BF16 => numbers(view.data(), |bytes| bf16::from_le_bytes(bytes).to_f32()),
        other => return Err(format!("is {other:?}: only F32, F16 and BF16 can be trained")),
    };
    let (rows, columns) = match shape.as_slice() {
        [rows, columns] => (*rows, *columns),
        [columns] => (1, *columns),
        _ => return Err(format!("has the shape {shape:?}: only vectors and matrices can be trained")),
    };
    let numbers = Array2::from_shape_vec((rows, columns), numbers).map_err(|error| error.to_string())?;
    Ok(Tensor { numbers, shape, dtype })
}

fn numbers<const N: usize>(data: &[u8], number: impl Fn([u8; N]) -> f32) -> Vec<f32> {
    data.as_chunks().0.iter().map(|bytes| number(*bytes)).collect()
}

/// The values in the tensor's stored format.
fn bytes(tensor: &Tensor) -> Vec<u8> {
    let numbers = tensor.numbers.iter();
    match tensor.dtype {
        Dtype::F16 => numbers.flat_map(|number| f16::from_f32(*number).to_le_bytes()).collect(),
        Dtype::BF16 => numbers.flat_map(|number| bf16::from_f32(*number).to_le_bytes()).collect(),
        _ => numbers.flat_map(|number| number.to_le_bytes()).collect(),
    }
}

/// Whether a file of this name holds weights or lists files that do.
fn holds_weights(name: &str) -> bool {
    WEIGHT_ENDINGS.iter().any(|ending| name.ends_with(ending))
}

fn files(directory: &Path) -> Result<Vec<PathBuf>, DistillError> {
    let unreadable = |source| DistillError::Read { path: directory.to_owned(), source };
    let entries = directory.read_dir().map_err(unreadable)?;
    let mut paths: Vec<PathBuf> =
        entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>().map_err(unreadable)?;
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use engine::ModelSettings;
    use engine::weight_files::INDEX_FILE;

    use super::*;

    fn bundled_draft() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/draft")
    }

    #[test]
    fn what_was_not_trained_is_written_as_it_was_read() {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("sub/out");
        let settings = ModelSettings::read(&bundled_draft().join("config.json")).unwrap();
        Weights::read(&bundled_draft(), &settings.tensors).unwrap().write(&out).unwrap();
        let names = |directory: &Path| -> Vec<_> {
            files(directory).unwrap().iter().map(|path| path.file_name().unwrap().to_owned()).collect()
        };
        assert_eq!(names(&out), names(&bundled_draft()));
        for name in names(&out).iter().filter(|name| *name != SINGLE_FILE) {
            let read = |directory: &Path| fs::read(directory.join(name)).unwrap();
            assert_eq!(read(&out), read(&bundled_draft()), "{}", name.display());
        }
        let read = |directory: &Path| fs::read(directory.join(SINGLE_FILE)).unwrap();
        let (old, new) = (read(&bundled_draft()), read(&out));
        let expected = Weights::read(&out, &settings.tensors).unwrap().stored_bytes();
        // The rest of the file is its header.
        assert!((expected..expected + 100_000).contains(&(new.len() as u64)), "{expected}, {}", new.len());
        let (old, new) = (SafeTensors::deserialize(&old).unwrap(), SafeTensors::deserialize(&new).unwrap());
        assert_eq!(old.len(), new.len());
        for (name, tensor) in old.iter() {
            assert_eq!(new.tensor(name).unwrap(), tensor, "{name}");
        }
        let siblings = files(out.parent().unwrap()).unwrap();
        assert_eq!(siblings.len(), 1, "something unfinished is left: {siblings:?}");
    }

    /// Writes a file of tensors with one number each.
    fn write_tensors(path: &Path, tensors: &[(&str, f32)]) {
        let stored: Vec<(&str, [u8; 4])> =
            tensors.iter().map(|(name, number)| (*name, number.to_le_bytes())).collect();
        let views =
            stored.iter().map(|(name, data)| (*name, TensorView::new(Dtype::F32, vec![1], data).unwrap()));
        fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
    }

    /// The given tensors, of one number each.
    fn wanted(names: &[&str]) -> Vec<(String, Vec<usize>)> {
        names.iter().map(|name| ((*name).to_owned(), vec![1])).collect()
    }

    #[test]
    fn the_files_of_the_index_are_read_and_no_other_weights_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        write_tensors(&path("model-1-of-2.safetensors"), &[("a", 1.0), ("unused", 7.0)]);
        // The index lists another file for `a`.
        write_tensors(&path("model-2-of-2.safetensors"), &[("a", 7.0), ("b", 2.0)]);
        // Their names come after those of the shards, so that they would win.
        write_tensors(&path("other.safetensors"), &[("a", 7.0)]);
        write_tensors(&path("outdated.safetensors"), &[("c", 7.0)]);
        let index = r#"{"weight_map": {"a": "model-1-of-2.safetensors", "unused": "model-1-of-2.safetensors",
            "b": "model-2-of-2.safetensors"}}"#;
        fs::write(path(INDEX_FILE), index).unwrap();
        let kept = ["config.json", "tokenizer.json", "vocab.txt"];
        let others = ["pytorch_model.bin", "pytorch_model.bin.index.json", "c.pth", "d.pt", "e.gguf"];
        for name in kept.iter().chain(&others) {
            fs::write(path(name), "x").unwrap();
        }

        let weights = Weights::read(directory.path(), &wanted(&["a", "b"])).unwrap();
        assert_eq!(weights.names().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(weights.get("a", &[1]).unwrap()[[0, 0]], 1.0);
        let parent = tempfile::tempdir().unwrap();
        let out = parent.path().join("out");
        weights.write(&out).unwrap();
        let found: Vec<String> =
            files(&out).unwrap().iter().map(|path| path.file_name().unwrap().display().to_string()).collect();
        assert_eq!(found, ["config.json", SINGLE_FILE, "tokenizer.json", "vocab.txt"]);

        // As in the engine, a single file takes precedence over an index.
        write_tensors(&path(SINGLE_FILE), &[("a", 3.0)]);
        let error = Weights::read(directory.path(), &wanted(&["a", "b"])).unwrap_err().to_string();
        assert!(error.contains("no tensor b of shape [1]"), "{error}");
        let weights = Weights::read(directory.path(), &wanted(&["a"])).unwrap();
        assert_eq!(weights.names().collect::<Vec<_>>(), ["a"]);
        assert_eq!(weights.get("a", &[1]).unwrap()[[0, 0]], 3.0);
    }

    #[test]
    fn an_index_cannot_name_files_of_other_directories() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("draft");
        fs::create_dir(&directory).unwrap();
        write_tensors(&root.path().join("outside.safetensors"), &[("a", 1.0)]);
        fs::write(directory.join(INDEX_FILE), r#"{"weight_map": {"a": "../outside.safetensors"}}"#).unwrap();
        let error = Weights::read(&directory, &wanted(&["a"])).unwrap_err().to_string();
        assert!(error.contains("expected a file name in the same directory"), "{error}");
    }

    #[test]
    fn what_cannot_be_trained_is_refused_by_name() {
        let directory = tempfile::tempdir().unwrap();
        for (dtype, shape, expected) in [
            (Dtype::F64, vec![2, 2], "w is F64: only F32, F16 and BF16"),
            (Dtype::F32, vec![2, 2, 2], "w has the shape [2, 2, 2]: only vectors and matrices"),
        ] {
            let data = [0; 32];
            let view = TensorView::new(dtype, shape.clone(), &data).unwrap();
            let bytes = safetensors::serialize([("w", view)], None).unwrap();
            fs::write(directory.path().join(SINGLE_FILE), bytes).unwrap();
            let error = Weights::read(directory.path(), &[("w".to_owned(), shape)]).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
