//! Compatibility with the first build of protocol version 1. The recorded frames are its first frames,
//! encoded by `protoc --encode` from `worker.proto` of commit ae4a0ed. Extensions of the protocol must not
//! change how these frames are decoded, and that build must be able to decode the frames of a current one.

use prost::Message as _;
use proto::v1;
use proto::version::{PROTOCOL_VERSIONS, common_version};

const WORKER: &[u8] = include_bytes!("../testdata/worker_hello_1.bin");
const ROUTER: &[u8] = include_bytes!("../testdata/router_hello_1.bin");

/// Content of the recorded worker hello.
fn worker_hello() -> v1::WorkerHello {
    v1::WorkerHello {
        protocol_version_min: 1,
        protocol_version_max: 1,
        worker_id: 72_623_859_790_382_856,
        role: v1::WorkerRole::Target.into(),
        model_id: "demo".to_owned(),
        numerics_id: "0123456789abcdef".to_owned(),
        vocab_size: 4_096,
        tokenizer_fingerprint: "aa55".to_owned(),
        sampling_scheme: "philox-gumbel-1".to_owned(),
        max_draft_tokens: 16,
        kv_blocks: 1_024,
        kv_block_size: 16,
        task_types: vec!["code".to_owned()],
        max_model_len: 2_048,
        eos_token_ids: vec![0],
        assets: vec![v1::Asset { name: "tokenizer.json".to_owned(), sha256: "00ff".to_owned(), size: 12 }],
        step_times: vec![v1::StepTimePoint { rows: 1, kv_tokens: 512, micros: 900 }],
        max_tree_tokens: 0,
        shadow: false,
        cpu: None,
        batch_times: Vec::new(),
    }
}

#[test]
fn a_recorded_worker_hello_is_decoded_and_version_1_is_negotiated() {
    let frame = v1::WorkerFrame::decode(WORKER).unwrap();
    assert_eq!(frame.credits.as_ref().map(|credits| credits.blocks), Some(1_024));
    let hello = frame.hello.unwrap();
    assert_eq!(hello, worker_hello());
    let remote = hello.protocol_version_min..=hello.protocol_version_max;
    assert_eq!(
        common_version(&PROTOCOL_VERSIONS, &remote),
        Some(1),
        "version 1 stays supported until an ADR drops it"
    );
}

#[test]
fn a_recorded_router_hello_is_decoded_and_version_1_is_negotiated() {
    let hello = v1::RouterFrame::decode(ROUTER).unwrap().hello.unwrap();
    assert_eq!(hello.router_id, 72_623_859_790_382_856);
    let remote = hello.protocol_version_min..=hello.protocol_version_max;
    assert_eq!(common_version(&PROTOCOL_VERSIONS, &remote), Some(1));
}

#[test]
fn hellos_encode_to_the_recorded_bytes() {
    let credits = Some(v1::Credits { blocks: 1_024 });
    let frame = v1::WorkerFrame { hello: Some(worker_hello()), credits, ..v1::WorkerFrame::default() };
    assert_eq!(frame.encode_to_vec(), WORKER);
    let hello = v1::RouterHello {
        protocol_version_min: 1,
        protocol_version_max: 1,
        router_id: 72_623_859_790_382_856,
    };
    let frame = v1::RouterFrame { hello: Some(hello), ..v1::RouterFrame::default() };
    assert_eq!(frame.encode_to_vec(), ROUTER);
}

/// The first build has no field for batches. If it took them for points of one sequence, its step times would
/// be wrong.
#[test]
fn batches_are_not_among_the_step_times_of_one_sequence() {
    let batch = v1::BatchTimePoint { sequences: 32, rows: 160, kv_tokens: 8_192, micros: 37_000 };
    let hello = v1::WorkerHello { batch_times: vec![batch], ..worker_hello() };
    let bytes = hello.encode_to_vec();
    let known = worker_hello().encode_to_vec();
    let added = bytes.strip_prefix(known.as_slice()).unwrap();
    assert_eq!(added[..2], [0xaa, 0x01], "field 21, length-delimited: unknown to the first build");
    assert_eq!(v1::WorkerHello::decode(bytes.as_slice()).unwrap(), hello);
}

#[test]
fn unknown_fields_of_a_later_version_are_ignored() {
    // Field 100, length-delimited: a field that a later build added.
    let later = [ROUTER, &[0xa2, 0x06, 0x03, 1, 2, 3]].concat();
    assert_eq!(v1::RouterFrame::decode(later.as_slice()).unwrap(), v1::RouterFrame::decode(ROUTER).unwrap());
}
