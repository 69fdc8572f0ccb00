//! The walk in pieces: what it asks for, and that it comes to the same as in one go.
#![allow(
    clippy::unwrap_used,
    reason = "a failed unwrap is a failed test, in helpers too"
)]

use proptest::prelude::*;

use super::{Parser, Step};
use crate::write::{GgufWriter, MetaValue};
use crate::{Error, Gguf, TensorType, ValueType};

/// Walks `file` handing over only what is asked for, and `extra` bytes more. Gives the result
/// and the bytes handed over.
fn in_pieces(file: &[u8], extra: usize) -> (Result<Gguf, Error>, usize, usize) {
    let mut parser = Parser::new(file.len() as u64);
    let (mut have, mut steps) = (0, 0);
    let walked = loop {
        match parser.advance(&file[..have]) {
            Ok(Step::Done) => break Ok(()),
            Ok(Step::More(need)) => {
                let need = usize::try_from(need).unwrap();
                assert!(
                    need > have && need <= file.len(),
                    "asked for {need} having {have} of {}",
                    file.len()
                );
                have = file.len().min(need + extra);
                steps += 1;
            }
            Err(error) => break Err(error),
        }
    };
    let end = parser.header_len();
    (
        walked.and_then(|()| parser.finish(file[..end].to_vec())),
        have,
        steps,
    )
}

fn writer(strings: &[Vec<u8>], rows: &[Vec<i16>], tensors: usize) -> GgufWriter {
    let nested = rows
        .iter()
        .map(|row| MetaValue::from(row.as_slice()))
        .collect();
    let lists = MetaValue::Array(
        ValueType::Array,
        strings
            .chunks(3)
            .map(|some| some.iter().collect())
            .collect(),
    );
    let mut writer = GgufWriter::new()
        .key("strings", strings.iter().collect::<MetaValue>())
        .key("nested", MetaValue::Array(ValueType::Array, nested))
        .key("lists", lists)
        .key("last", 1u8);
    for i in 0..tensors {
        writer = writer.zeros(&format!("t{i}"), &[32, 1 + i as u64], TensorType::Q8_0);
    }
    writer
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn pieces_come_to_the_whole_and_never_reach_behind_the_header(
        strings in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..30), 0..30),
        rows in prop::collection::vec(prop::collection::vec(any::<i16>(), 0..5), 0..5),
        tensors in 0usize..5,
        extra in 0usize..20,
    ) {
        let writer = writer(&strings, &rows, tensors);
        let (file, header) = (writer.to_bytes(), writer.header());
        let whole = Gguf::parse(&file, file.len() as u64).unwrap();
        for extra in [0, extra] {
            let (gguf, have, _) = in_pieces(&file, extra);
            let gguf = gguf.unwrap();
            prop_assert!(have <= header.len() + extra);
            prop_assert_eq!(&gguf.header, &whole.header);
            let strings = |gguf: &Gguf| -> Vec<Vec<u8>> {
                let strings = gguf.strings("strings").unwrap().unwrap();
                strings.iter().map(<[u8]>::to_vec).collect()
            };
            prop_assert_eq!(strings(&gguf), strings(&whole));
            prop_assert_eq!(gguf.tensors(), whole.tensors());
        }
    }

    #[test]
    fn pieces_of_a_damaged_file_fail_as_the_whole_does(
        strings in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..30), 0..30),
        tensors in 0usize..5,
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let writer = writer(&strings, &[vec![1], vec![]], tensors);
        let mut file = writer.to_bytes();
        file[at.index(writer.header().len())] = byte;
        let whole = Gguf::parse(&file, file.len() as u64);
        let (pieces, _, _) = in_pieces(&file, 0);
        prop_assert_eq!(pieces.is_ok(), whole.is_ok());
    }
}

#[test]
fn a_large_vocabulary_takes_few_pieces() {
    let words: Vec<Vec<u8>> = (0..100_000u32)
        .map(|i| i.to_string().into_bytes())
        .collect();
    let (gguf, have, steps) = in_pieces(&writer(&words, &[], 40).to_bytes(), 0);
    assert_eq!(have, gguf.unwrap().header.len());
    assert!(steps < 60, "{steps} pieces");
}
