//! Compiles the protos with protox: no protoc is needed for our own wire.

use std::path::PathBuf;

use prost::Message as _;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = [
        "proto/outrider/v1/common.proto",
        "proto/outrider/v1/worker.proto",
        "proto/outrider/v1/inference.proto",
    ];
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(files, ["proto"])?;
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is set by cargo")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().bytes(".outrider.v1.AssetChunk.data").compile_fds(descriptors)?;
    Ok(())
}
