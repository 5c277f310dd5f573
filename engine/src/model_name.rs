//! Name of a model that has none in its settings: what clients request it by.

use std::path::Path;

/// Returns the name of the checkpoint in `model_dir`: `name_or_path` (`_name_or_path` of its config.json)
/// unless that is the path of a training run; else the repository, if the directory is a snapshot in Hugging
/// Face's cache; else the directory's name.
pub fn model_name(name_or_path: Option<&str>, model_dir: &Path) -> String {
    let is_name = |name: &&str| !name.is_empty() && !name.starts_with(['/', '.', '~']);
    name_or_path.filter(is_name).map(str::to_owned).unwrap_or_else(|| {
        let absolute = std::path::absolute(model_dir).unwrap_or_else(|_| model_dir.to_owned());
        let directory_name = || Some(absolute.file_name()?.to_string_lossy().into_owned());
        cached_repository(&absolute).or_else(directory_name).unwrap_or_else(|| "model".to_owned())
    })
}

/// The repository whose snapshot a directory is: `models--OWNER--NAME/snapshots/COMMIT`.
fn cached_repository(directory: &Path) -> Option<String> {
    let snapshots = directory.parent().filter(|parent| parent.ends_with("snapshots"))?;
    let repository = snapshots.parent()?.file_name()?.to_str()?.strip_prefix("models--")?;
    Some(repository.replace("--", "/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_the_repository_or_the_directory_names_a_model() {
        let snapshot = "/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12100db370d81485cdf75e47ca";
        for (name_or_path, model_dir, expected) in [
            (Some("owner/name"), snapshot, "owner/name"),
            (Some("/runs/7"), "/models/llama-8b", "llama-8b"),
            (Some(""), "/models/llama-8b/", "llama-8b"),
            (None, snapshot, "Qwen/Qwen3-0.6B"),
            (None, "/hub/models--gpt2/snapshots/607a30d7", "gpt2"),
            (None, "/hub/models--owner--name/other/llama-8b", "llama-8b"),
            (None, "/runs/snapshots/step-100", "step-100"),
            (None, "/", "model"),
        ] {
            assert_eq!(model_name(name_or_path, Path::new(model_dir)), expected);
        }
    }
}
