//! GGUF headers. An input is the beginning of a file.
//!
//! Whatever it says, parsing ends with a header or a refusal; what a header gives access to is
//! there; and the bytes behind the header make no difference.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rocmforge_gguf::{Error, Gguf, Value};

/// Looks at all of a value.
fn look_at(value: Value<'_>) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(array) => {
            let n = array.iter().map(look_at).count();
            assert_eq!(n, array.len(), "an array has as many elements as it says");
            n
        }
        _ => 1,
    }
}

fuzz_target!(|data: &[u8]| {
    let file_len = data.len() as u64;
    let gguf = match Gguf::parse(data, file_len) {
        Ok(gguf) => gguf,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    for key in gguf.keys() {
        look_at(gguf.value(key).expect("a listed key is found"));
        if let Ok(Some(strings)) = gguf.strings(key) {
            assert_eq!(strings.iter().count(), strings.len());
        }
        let _ = (gguf.str(key), gguf.u64(key), gguf.f32(key));
        let _ = (gguf.bool(key), gguf.i32s(key), gguf.f32s(key));
    }
    for tensor in gguf.tensors() {
        assert!(tensor.offset >= gguf.data_start() && tensor.range().end <= file_len);
        assert_eq!(gguf.tensor(&tensor.name), Some(tensor));
    }
    let header = &data[..gguf.header_bytes() as usize];
    let again = Gguf::parse(header, file_len).expect("the header's bytes are enough");
    assert_eq!(again.tensors(), gguf.tensors());
    let short = Gguf::parse(&header[..header.len() - 1], file_len);
    assert!(matches!(short, Err(Error::Truncated { .. })));
});
