//! What all nodes of a model have to agree on before anything is loaded. Whether the weights are the same,
//! byte by byte, is known when they are loaded ([`engine::Nodes`]).

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context as _;
use sha2::{Digest, Sha256};
use worker::compute_device::ComputeDevice;
use worker::config::WorkerConfig;

use super::config::NodesConfig;

/// Facts by name.
pub(super) type Facts = BTreeMap<String, String>;

/// The facts of this node.
pub(super) fn facts(config: &WorkerConfig, nodes: &NodesConfig) -> anyhow::Result<Facts> {
    let model = config.model.as_deref().context("no model was given: pass --model DIR")?;
    let device = match &config.device {
        ComputeDevice::Cpu => "cpu".to_owned(),
        ComputeDevice::Cuda(ordinals) => format!("{} gpus", ordinals.len()),
    };
    let facts = [
        ("build", service::release::version().to_owned()),
        ("nnodes", nodes.count.to_string()),
        ("device", device),
        ("tensor-parallel", config.tensor_parallel.to_string()),
        ("weights", config.weights.name().to_owned()),
        ("ballast", config.ballast.to_string()),
        (
            "max-model-len",
            config.max_model_len.map_or_else(|| "the model's".to_owned(), |len| len.to_string()),
        ),
        ("cuda-deterministic", config.cuda_deterministic.to_string()),
        ("config.json", short_hash(&std::fs::read(model.join("config.json")).context("config.json")?)),
        ("names and sizes of the weight files", short_hash(weight_files(model)?.as_bytes())),
    ];
    Ok(facts.map(|(name, value)| (name.to_owned(), value)).into())
}

/// Why a node with these facts cannot join, if it cannot: the first fact that differs, and what to do.
pub(super) fn difference(leader: &Facts, node: usize, other: &Facts) -> Option<String> {
    let absent = "absent".to_owned();
    let names = leader.keys().chain(other.keys());
    names
        .map(|name| (name, leader.get(name).unwrap_or(&absent), other.get(name).unwrap_or(&absent)))
        .find_map(|(name, own, theirs)| {
            let advice = match name.as_str() {
                "build" => "run the same build on all nodes".to_owned(),
                "device" => "give all nodes the same kind and number of devices (--device)".to_owned(),
                "config.json" | "names and sizes of the weight files" => {
                    "give all nodes the same checkpoint (--model)".to_owned()
                }
                flag => format!("give all nodes the same --{flag}"),
            };
            (own != theirs).then(|| format!("{name}: {theirs} on node {node}, {own} on node 0; {advice}"))
        })
}

/// One line per weight file, in order of names.
fn weight_files(model: &Path) -> anyhow::Result<String> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(model).with_context(|| model.display().to_string())? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            // A link in a cache leads to the file.
            let len = std::fs::metadata(&path).with_context(|| path.display().to_string())?.len();
            files.insert(path.file_name().unwrap_or_default().to_owned(), len);
        }
    }
    Ok(files.iter().map(|(name, len)| format!("{} {len}\n", name.display())).collect())
}

/// Enough of a hash to tell files apart.
fn short_hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_named_with_both_values_and_what_to_do() {
        let facts = |weights: &str, build: &str| -> Facts {
            [("weights", weights), ("build", build)].map(|(a, b)| (a.to_owned(), b.to_owned())).into()
        };
        let own = facts("bf16", "1");
        assert_eq!(difference(&own, 3, &facts("bf16", "1")), None);
        let said = difference(&own, 3, &facts("int8", "1")).unwrap();
        assert_eq!(said, "weights: int8 on node 3, bf16 on node 0; give all nodes the same --weights");
        let said = difference(&own, 3, &facts("int8", "2")).unwrap();
        assert_eq!(said, "build: 2 on node 3, 1 on node 0; run the same build on all nodes");
        let mut more = own.clone();
        more.insert("ballast".to_owned(), "5".to_owned());
        let said = difference(&own, 1, &more).unwrap();
        assert_eq!(said, "ballast: 5 on node 1, absent on node 0; give all nodes the same --ballast");
    }

    #[test]
    fn weight_files_are_those_of_the_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        for (name, bytes) in
            [("b.safetensors", &b"12"[..]), ("a.safetensors", b"1"), ("tokenizer.json", b"{}")]
        {
            std::fs::write(dir.path().join(name), bytes).unwrap();
        }
        assert_eq!(weight_files(dir.path()).unwrap(), "a.safetensors 1\nb.safetensors 2\n");
    }
}
