//! The parser never panics, whatever it is given, and what it accepts is inside of the file.

use proptest::prelude::*;
use rocmforge_gguf::write::{GgufWriter, MetaValue};
use rocmforge_gguf::{Error, Gguf, TensorType, Value, ValueType};

/// Reads everything that a header gives access to; panics if any of it is not there.
fn visit(gguf: &Gguf, file_len: u64) {
    fn value(v: Value<'_>) -> usize {
        match v {
            Value::String(text) => text.len(),
            Value::Array(array) => {
                let n = array
                    .iter()
                    .inspect(|v| assert!(value(*v) <= 1 << 20))
                    .count();
                assert_eq!(n, array.len(), "an array has as many elements as it says");
                n
            }
            _ => 1,
        }
    }
    for key in gguf.keys() {
        value(gguf.value(key).expect("a listed key is found"));
        if let Ok(Some(strings)) = gguf.strings(key) {
            assert_eq!(strings.iter().count(), strings.len());
        }
        let _ = (
            gguf.str(key),
            gguf.u64(key),
            gguf.f32(key),
            gguf.bool(key),
            gguf.i32s(key),
            gguf.f32s(key),
        );
    }
    for tensor in gguf.tensors() {
        assert!(tensor.offset >= gguf.data_start() && tensor.range().end <= file_len);
        assert!(tensor.offset.is_multiple_of(gguf.alignment()));
        assert_eq!(gguf.tensor(&tensor.name), Some(tensor));
    }
}

/// Parses, and checks that the bytes behind the header make no difference.
fn check(bytes: &[u8]) {
    let file_len = bytes.len() as u64;
    let Ok(gguf) = Gguf::parse(bytes, file_len) else {
        return;
    };
    visit(&gguf, file_len);
    let header = &bytes[..gguf.header_bytes() as usize];
    let again = Gguf::parse(header, file_len).expect("the header's bytes are enough");
    assert_eq!(again.tensors(), gguf.tensors());
    for short in [header.len() - 1, header.len() / 2] {
        assert!(matches!(
            Gguf::parse(&header[..short], file_len),
            Err(Error::Truncated { .. })
        ));
    }
}

fn scalar() -> impl Strategy<Value = MetaValue> {
    prop_oneof![
        any::<u8>().prop_map(MetaValue::U8),
        any::<i16>().prop_map(MetaValue::I16),
        any::<u32>().prop_map(MetaValue::U32),
        any::<u64>().prop_map(MetaValue::U64),
        any::<f32>().prop_map(MetaValue::F32),
        any::<bool>().prop_map(MetaValue::Bool),
        prop::collection::vec(any::<u8>(), 0..40).prop_map(MetaValue::String),
    ]
}

fn array() -> impl Strategy<Value = MetaValue> {
    let strings = prop::collection::vec(prop::collection::vec(any::<u8>(), 0..12), 0..20)
        .prop_map(|strings| strings.iter().collect::<MetaValue>());
    let numbers =
        prop::collection::vec(any::<i32>(), 0..20).prop_map(|xs| MetaValue::from(xs.as_slice()));
    prop_oneof![strings, numbers].prop_recursive(2, 30, 4, |inner| {
        prop::collection::vec(inner, 0..4).prop_map(|rows| MetaValue::Array(ValueType::Array, rows))
    })
}

prop_compose! {
    fn writer()(
        version in 2u32..=3,
        alignment in prop::sample::select(vec![8u32, 32, 128]),
        keys in prop::collection::vec(prop_oneof![scalar(), array()], 0..12),
        tensors in prop::collection::vec((prop::sample::select(TensorType::ALL), 1u64..3, 1u64..4), 0..8),
    ) -> GgufWriter {
        let mut writer = GgufWriter::new().version(version).alignment(alignment);
        for (i, value) in keys.into_iter().enumerate() {
            writer = writer.key(&format!("key.{i}"), value);
        }
        for (i, (ty, blocks, rows)) in tensors.into_iter().enumerate() {
            writer = writer.zeros(&format!("blk.{i}.weight"), &[blocks * ty.block_size(), rows], ty);
        }
        writer
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        check(&bytes);
    }

    #[test]
    fn arbitrary_bytes_behind_a_good_start_never_panic(
        n_tensors in 0u64..4, n_keys in 0u64..4, rest in prop::collection::vec(prop_oneof![3 => Just(0u8), 2 => 0u8..16, 1 => any::<u8>()], 0..400),
    ) {
        let mut bytes = GgufWriter::new().raw_counts(Some(n_tensors), Some(n_keys)).header();
        bytes.extend(rest);
        check(&bytes);
    }

    #[test]
    fn valid_files_parse(writer in writer()) {
        let bytes = writer.to_bytes();
        let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
        prop_assert_eq!(gguf.header_bytes(), writer.header().len() as u64);
        check(&bytes);
    }

    #[test]
    fn mutated_files_never_panic(
        writer in writer(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), prop_oneof![any::<u8>(), Just(0), Just(0xff), 0u8..16]), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = writer.to_bytes();
        let header = writer.header().len();
        for (at, byte) in edits {
            bytes[at.index(header)] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        check(&bytes);
    }

    #[test]
    fn spliced_numbers_never_panic(
        writer in writer(), at in any::<prop::sample::Index>(),
        number in prop_oneof![any::<u64>(), Just(u64::MAX), Just(i64::MAX as u64), Just(1 << 24), Just(1 << 32), 0u64..64],
    ) {
        let mut bytes = writer.to_bytes();
        let at = at.index(writer.header().len() - 8);
        bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
        check(&bytes);
    }
}
