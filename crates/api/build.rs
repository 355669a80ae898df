//! Compiles the protocol files with protox, so that no system `protoc` is needed for ours.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile(
        ["rlmesh/cluster/v1/cluster.proto", "rlmesh/cluster/v1/runner.proto", "rlmesh/cluster/v1/discovery.proto"],
        ["proto"],
    )?;
    tonic_prost_build::configure().bytes(".").compile_fds(files)?;
    Ok(())
}
