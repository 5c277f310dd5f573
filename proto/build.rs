//! Compiles the proto files with protoc. The etcd client needs protoc as well.

use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = [
        "proto/outrider/v1/common.proto",
        "proto/outrider/v1/worker.proto",
        "proto/outrider/v1/inference.proto",
        "proto/vllm/vllm_engine.proto",
    ];
    println!("cargo:rerun-if-changed=proto");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is set by cargo")?);
    tonic_prost_build::configure()
        .bytes(".outrider.v1.AssetChunk.data")
        // Sent once per sequence; inline it would increase every step from 160 to 368 bytes.
        .boxed(".outrider.v1.Step.spec")
        .file_descriptor_set_path(out.join("descriptors.bin"))
        .compile_protos(&files, &["proto"])?;
    Ok(())
}
