//! What fuzz targets share: how an input is taken apart, a vocabulary, and a daemon.

#![forbid(unsafe_code)]

pub mod desk;

use rocmforge_gguf::Gguf;
use rocmforge_gguf::write::{GgufWriter, MetaValue};
use rocmforge_tokenizer::Tokenizer;

/// Stands between the parts of an input. No text in UTF-8 has it.
pub const PART: u8 = 0xFF;
/// Stands between the items of a part.
pub const ITEM: u8 = 0xFE;

/// From now on panics in the sources of these libraries are what whoever calls them makes of them.
/// The fuzzer takes all others for findings.
pub fn leave_panics_of(libraries: &'static [&'static str]) {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let file = panic.location().map_or("", |location| location.file());
        if !libraries.iter().any(|name| file.contains(name)) {
            before(panic);
        }
    }));
}

/// The parts of an input; those that it lacks are empty.
pub fn parts<const N: usize>(data: &[u8]) -> [&[u8]; N] {
    let mut parts = data.splitn(N, |&byte| byte == PART);
    std::array::from_fn(|_| parts.next().unwrap_or_default())
}

/// The items of a part; none of an empty one.
pub fn items(part: &[u8]) -> impl Iterator<Item = &[u8]> {
    let items = part.split(|&byte| byte == ITEM);
    items.filter(move |_| !part.is_empty())
}

/// A text, with what is no UTF-8 replaced.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The file that a writer has written.
///
/// # Panics
/// Where it cannot be read.
pub fn file(writer: &GgufWriter) -> Gguf {
    let bytes = writer.to_bytes();
    Gguf::parse(&bytes, bytes.len() as u64).expect("a writer's file can be read")
}

/// The character that a byte is written as in a byte-level vocabulary.
fn byte_level(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(256 + before).expect("below the surrogates")
}

/// All bytes, some words, and the control tokens of a chat.
///
/// # Panics
/// Never: the vocabulary is sound.
pub fn tokenizer() -> Tokenizer {
    let bytes = (0..=255).map(|byte| byte_level(byte).to_string());
    let words = ["\":", "{\"", "\"}", "tr", "true", "null", "Ġa"];
    let control = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"];
    let n_plain = 256 + words.len();
    let tokens = bytes.chain(words.iter().chain(&control).map(|&w| w.to_owned()));
    let types = vec![[1i32].repeat(n_plain), [3].repeat(control.len())].concat();
    let merges = ["\" :", "{ \"", "\" }", "t r"];
    let writer = GgufWriter::new()
        .key("tokenizer.ggml.model", "gpt2")
        .key("tokenizer.ggml.pre", "llama-bpe")
        .key("tokenizer.ggml.tokens", tokens.collect::<MetaValue>())
        .key("tokenizer.ggml.token_type", types.as_slice())
        .key(
            "tokenizer.ggml.merges",
            merges.iter().collect::<MetaValue>(),
        )
        .key("tokenizer.ggml.bos_token_id", n_plain as u32)
        .key("tokenizer.ggml.eos_token_id", n_plain as u32 + 1);
    Tokenizer::from_gguf(&file(&writer)).expect("a sound vocabulary")
}
