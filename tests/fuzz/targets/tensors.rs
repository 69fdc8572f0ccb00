//! Tensor tables, and the plans that are made of them. An input is a header; the file that it
//! claims to begin has room for the data.
//!
//! Tensors lie in the file and share no byte. A model that is accepted has a plan of segments whose
//! bytes are in the file too.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rocmforge_gguf::Gguf;
use rocmforge_model::Model;

/// Bytes of tensor data that the file claims to have.
const DATA_BYTES: u64 = 64 << 20;

fuzz_target!(|data: &[u8]| {
    let file_len = data.len() as u64 + DATA_BYTES;
    let Ok(gguf) = Gguf::parse(data, file_len) else {
        return;
    };
    let mut ranges: Vec<_> = gguf.tensors().iter().map(|tensor| tensor.range()).collect();
    ranges.sort_by_key(|range| (range.start, range.end));
    assert!(ranges.iter().all(|range| range.end <= file_len));
    let apart = ranges.is_sorted_by(|a, b| a.end <= b.start || a.is_empty() || b.is_empty());
    assert!(apart, "two tensors share bytes");
    match Model::from_gguf(&gguf) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(model) => {
            assert!(model.info().n_vocab > 0);
            let plan = model.plan();
            assert!(!plan.segments.is_empty());
            for segment in &plan.segments {
                for tensor in &segment.tensors {
                    let end = tensor.offset.checked_add(tensor.bytes);
                    assert!(end.is_some_and(|end| end <= file_len), "{}", segment.name);
                }
            }
        }
    }
});
