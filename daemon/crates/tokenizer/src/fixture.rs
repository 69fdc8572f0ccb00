//! Small vocabularies for unit tests.

use crate::byte_level;
use crate::texts::Texts;
use crate::vocab::{EOS, Usage, Vocab, VocabData};

pub(crate) fn texts<'a>(list: impl IntoIterator<Item = &'a [u8]>) -> Texts {
    let mut texts = Texts::default();
    for text in list {
        texts
            .push_with("test", |buffer| buffer.extend_from_slice(text))
            .unwrap();
    }
    texts
}

/// The 256 byte tokens, then `tokens`, then the control token `<|im_end|>`
/// and the user-defined `<tool>`.
pub(crate) fn bpe_data(tokens: &[&str], merges: &[&str]) -> VocabData {
    let bytes: Vec<Vec<u8>> = (0..=255)
        .map(|byte| {
            let mut text = Vec::new();
            byte_level::push_char(byte, &mut text);
            text
        })
        .collect();
    let plain = bytes.len() + tokens.len();
    let mut types = vec![1; plain];
    types.extend([3, 4]);
    let all = bytes.iter().map(Vec::as_slice);
    let all = all.chain(tokens.iter().map(|t| t.as_bytes()));
    VocabData {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        tokens: texts(all.chain([&b"<|im_end|>"[..], b"<tool>"])),
        types: Some(types),
        merges: Some(texts(merges.iter().map(|m| m.as_bytes()))),
        usage: Usage {
            special: std::array::from_fn(|key| (key == EOS).then_some(plain as i64)),
            ..Usage::default()
        },
        ..VocabData::default()
    }
}

pub(crate) fn bpe(tokens: &[&str], merges: &[&str]) -> (Vocab, Texts) {
    let mut data = bpe_data(tokens, merges);
    let merges = data.merges.take().unwrap();
    (Vocab::new(data).unwrap(), merges)
}

/// `<unk>`, `<s>`, `</s>`, the byte tokens 3 to 258, then `tokens` with their
/// scores and types.
pub(crate) fn spm_data(tokens: &[(&str, f32, i32)]) -> VocabData {
    let mut list: Vec<(String, f32, i32)> = vec![
        ("<unk>".into(), 0.0, 2),
        ("<s>".into(), 0.0, 3),
        ("</s>".into(), 0.0, 3),
    ];
    list.extend((0..=255).map(|byte| (format!("<0x{byte:02X}>"), 0.0, 6)));
    list.extend(
        tokens
            .iter()
            .map(|&(text, score, kind)| (text.to_owned(), score, kind)),
    );
    VocabData {
        model: "llama".into(),
        tokens: texts(list.iter().map(|t| t.0.as_bytes())),
        scores: Some(list.iter().map(|t| t.1).collect()),
        types: Some(list.iter().map(|t| t.2).collect()),
        ..VocabData::default()
    }
}
