//! Messages of gRPC, through gate, decoding and checks, up to the model that is not there. An input
//! is a byte that chooses the call, and the message.
//!
//! Every call is refused, and none with an error of ours.
#![no_main]

use std::cell::LazyCell;

use libfuzzer_sys::fuzz_target;
use rocmforge_fuzz::desk::Desk;

const CALLS: [&str; 13] = [
    "Inference/Generate",
    "Inference/Chat",
    "Inference/Tokenize",
    "Inference/Detokenize",
    "Inference/Score",
    "Models/Load",
    "Models/Unload",
    "Models/Get",
    "Models/Preload",
    "Models/Pin",
    "Models/Unpin",
    "Models/None",
    "None/None",
];

thread_local! {
    static DESK: LazyCell<Desk> = LazyCell::new(Desk::new);
}

fuzz_target!(|data: &[u8]| {
    let Some((&call, message)) = data.split_first() else {
        return;
    };
    let call = CALLS[usize::from(call) % CALLS.len()];
    let (code, words) = DESK.with(|desk| desk.grpc(call, message));
    // tonic's own word for what is no message.
    let is_ours = !words.contains("failed to decode Protobuf message");
    assert!(
        code != 0 && (code != 13 || !is_ours),
        "{call}: {code}: {words}"
    );
});
