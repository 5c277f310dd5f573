//! Ranks of several nodes, which are threads here, over the host's NCCL.

use std::sync::Arc;

use super::tests::EIGHT_DEVICES;
use crate::cuda::GpuOptions;
use crate::cuda::device::CudaDevice;
use crate::cuda::gpus::load_on_gpus;
use crate::cuda::host_driver::HostDriver;
use crate::cuda::on_host::{self, Check};
use crate::cuda::test_model::{TINY, changed_config};
use crate::nodes::{Follower, Nodes, nodes_of_threads};
use crate::{Engine, EngineError, LoadOptions, SequenceRows, TokenId};

/// The host's driver with the functions by which nodes find each other; `None` in the test's first run.
fn driver(name: &str) -> Option<HostDriver> {
    let shim = on_host::build(include_str!("node_shim.hpp"), "libnccl.so.2", Check::Nothing).unwrap();
    let driver = HostDriver::build().unwrap();
    let path = format!("{}:{}", shim.parent().unwrap().display(), driver.libraries.display());
    let variables = [EIGHT_DEVICES, &[("LD_LIBRARY_PATH", &path)]].concat();
    HostDriver::for_test_with(name, &variables)
}

/// Bits of the logits of two sequences, one of which is a fork of the other.
fn bits(engine: &mut Engine) -> Vec<u32> {
    let ids: Vec<TokenId> = (0..24).map(|i| i * 7 % 50).collect();
    let rows = |slot, token_ids, num_logits| SequenceRows { slot, token_ids, num_logits };
    let a = engine.open();
    let mut found = vec![engine.forward(&[rows(a, &ids[..18], 3)]).unwrap()];
    let b = engine.fork(a, 17).unwrap();
    found.push(engine.forward(&[rows(b, &ids[18..21], 2), rows(a, &ids[21..22], 1)]).unwrap());
    let rows = found.iter().flat_map(|logits| (0..logits.rows()).map(|i| logits.row(i)));
    rows.flatten().map(|x| x.to_bits()).collect()
}

fn load(options: &LoadOptions, gpus: &GpuOptions, nodes: &Arc<Nodes>) -> Result<Engine, EngineError> {
    let loaded = Engine::random_by(options, 7, |source, model| {
        load_on_gpus(options, source, model, (gpus, Some(nodes)))
    });
    loaded.inspect_err(|error| nodes.report_failure(error))
}

#[test]
fn nodes_change_no_bit() {
    let Some(driver) = driver("cuda::ranks::nccl::node_tests::nodes_change_no_bit") else { return };
    let (_dir, options) = changed_config(TINY, &[("intermediate_size", 288)]);
    // The host's NCCL copies from memory to memory, which between nodes is the network's part.
    let devices: Vec<CudaDevice> =
        (0..4).map(|ordinal| CudaDevice::open(ordinal, Some(&driver.kernels)).unwrap()).collect();
    for (i, device) in devices.iter().enumerate() {
        let mut others = (0..4).filter(|&other| other != i);
        others.try_for_each(|other| device.share_memory_with(other)).unwrap();
    }
    let gpus = |ordinals: &[usize]| GpuOptions {
        kernels: Some(driver.kernels.clone()),
        ..GpuOptions::for_devices(ordinals)
    };
    let mut alone = Engine::random(&options.on_gpus(gpus(&[0])), 7).unwrap();
    let expected = bits(&mut alone);
    for (leaders, followers) in [(&[0][..], &[1][..]), (&[0, 1], &[2, 3])] {
        let [leader, follower] = nodes_of_threads(2).try_into().ok().expect("two nodes");
        let (gpus, options) = (&gpus, &options);
        std::thread::scope(|scope| {
            let follow = scope.spawn(move || {
                let nodes = Arc::new(follower);
                let engine = load(options, &gpus(followers), &nodes).unwrap();
                Follower::new(engine, nodes).run()
            });
            let mut engine = load(options, &gpus(leaders), &Arc::new(leader)).unwrap();
            assert!(bits(&mut engine) == expected, "{leaders:?} and {followers:?}");
            assert_eq!(engine.info().numerics_id, alone.info().numerics_id);
            drop(engine);
            let end = follow.join().unwrap();
            assert!(matches!(end, EngineError::NodeFailed { node: 0, .. }), "{end}");
        });
    }
}

/// GPUs reach the memory of other GPUs only within a node.
#[test]
fn sums_over_peer_pointers_are_refused() {
    let (_dir, options) = changed_config(TINY, &[]);
    let gpus = GpuOptions { peer_sums: true, ..GpuOptions::for_devices(&[0]) };
    let nodes = Arc::new(nodes_of_threads(2).remove(0));
    let error = load(&options, &gpus, &nodes).map(drop).unwrap_err().to_string();
    assert!(error.contains("peer_sums is true: gpus do not access the memory of other nodes"), "{error}");
}
