//! Compiles rocmforge/v1/*.proto with a compiler in Rust, so that no protoc has
//! to be installed, and writes the messages, the client and server stubs, and
//! the descriptor set that reflection serves.

use std::error::Error;
use std::path::PathBuf;

use prost::Message;

const FILES: [&str; 4] = [
    "rocmforge/v1/models.proto",
    "rocmforge/v1/inference.proto",
    "rocmforge/v1/cache.proto",
    "rocmforge/v1/server.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=rocmforge");

    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    let descriptors = protox::compile(FILES, ["."])?;
    std::fs::write(
        out.join("rocmforge_descriptor.bin"),
        descriptors.encode_to_vec(),
    )?;
    tonic_prost_build::configure()
        .build_transport(false)
        .compile_fds(descriptors)?;
    Ok(())
}
