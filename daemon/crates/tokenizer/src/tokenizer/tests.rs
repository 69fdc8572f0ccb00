//! Tokenizers over small vocabularies: special tokens, refusals, round trips.

use super::*;
use crate::fixture::{bpe_data, spm_data, texts};
use crate::texts::Texts;
use crate::vocab::MERGES;
use proptest::prelude::*;

/// Types of the tokens in `spm`.
const NORMAL: i32 = 1;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

pub(super) fn bpe() -> Tokenizer {
    Tokenizer::new(bpe_data(
        &["he", "ll", "hell", "hello", "Ġhello", "Ġw", "Ã¤"],
        &["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ w", "Ã ¤"],
    ))
    .unwrap()
}

pub(super) fn spm() -> Tokenizer {
    Tokenizer::new(spm_data(&[
        ("▁", -5.0, NORMAL),
        ("a", -5.0, NORMAL),
        ("b", -5.0, NORMAL),
        ("c", -5.0, NORMAL),
        ("ab", -1.0, NORMAL),
        ("bc", -2.0, NORMAL),
        ("▁a", -3.0, NORMAL),
        ("abc", -4.0, UNUSED),
        ("▁▁", -0.5, NORMAL),
        ("<tool▁x>", 0.0, USER_DEFINED),
    ]))
    .unwrap()
}

pub(super) fn spelled(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
    let text = |&id| {
        String::from_utf8_lossy(tokenizer.vocab().texts.get(id as usize).unwrap()).into_owned()
    };
    ids.iter().map(text).collect()
}

fn encoded(tokenizer: &Tokenizer, text: &str, parse_special: bool) -> Vec<String> {
    spelled(
        tokenizer,
        &tokenizer.encode(text, false, parse_special).unwrap(),
    )
}

#[test]
fn special_tokens_are_parsed_on_request_and_user_defined_ones_always() {
    let tokenizer = bpe();
    assert_eq!(
        encoded(&tokenizer, "hello<tool> hello<|im_end|>", true),
        ["hello", "<tool>", "Ġhello", "<|im_end|>"]
    );
    let plain = encoded(&tokenizer, "hello<tool><|im_end|>", false);
    assert_eq!(plain[..2], ["hello", "<tool>"]);
    assert_eq!(plain.concat(), "hello<tool><|im_end|>");
    assert!(plain.len() > 4);
}

#[test]
fn the_longest_special_token_wins() {
    let mut data = bpe_data(&[], &["a b"]);
    let mut list: Vec<Vec<u8>> = data.tokens.iter().map(<[u8]>::to_vec).collect();
    list.extend([&b"ab"[..], b"<t>", b"<t><t>", b"<t>x"].map(<[u8]>::to_vec));
    data.tokens = texts(list.iter().map(Vec::as_slice));
    data.types.as_mut().unwrap().extend([1, 3, 3, 3]);
    let tokenizer = Tokenizer::new(data).unwrap();
    assert_eq!(
        encoded(&tokenizer, "<t><t><t>x<t>y", true),
        ["<t><t>", "<t>x", "<t>", "y"]
    );
}

#[test]
fn phi3_special_tokens_take_the_space_behind_them() {
    let mut data = bpe_data(&["he"], &["h e"]);
    data.name = Some("Phi-3 Mini".into());
    let tokenizer = Tokenizer::new(data).unwrap();
    assert_eq!(
        encoded(&tokenizer, "<|im_end|> \n he", true),
        ["<|im_end|>", "he"]
    );
    assert_eq!(encoded(&tokenizer, "<|im_end|>  ", true), ["<|im_end|>"]);
}

#[test]
fn bos_and_eos_follow_the_metadata_then_the_pre_tokenizer() {
    let ids = |edit: fn(&mut VocabData)| {
        let mut data = bpe_data(&["he"], &["h e"]);
        data.usage.special[crate::vocab::BOS] = Some(7);
        edit(&mut data);
        Tokenizer::new(data)
            .unwrap()
            .encode("he", true, false)
            .unwrap()
    };
    assert_eq!(ids(|_| ()), [256]);
    assert_eq!(ids(|data| data.usage.add_bos = Some(true)), [7, 256]);
    assert_eq!(ids(|data| data.usage.add_eos = Some(true)), [256, 257]);
    assert_eq!(ids(|data| data.pre = Some("llama-bpe".into())), [7, 256]);
    let off = |data: &mut VocabData| {
        data.pre = Some("llama-bpe".into());
        data.usage.add_bos = Some(false);
    };
    assert_eq!(ids(off), [256]);
    let none = |data: &mut VocabData| {
        data.usage.add_bos = Some(true);
        data.usage.special[crate::vocab::BOS] = Some(-1);
    };
    assert_eq!(ids(none), [256]);
}

#[test]
fn a_chat_begins_with_one_bos() {
    let mut data = bpe_data(&["he"], &["h e"]);
    data.usage.special[crate::vocab::BOS] = Some(258);
    data.usage.add_bos = Some(true);
    let tokenizer = Tokenizer::new(data).unwrap();
    assert_eq!(tokenizer.encode_chat(99, "he").unwrap(), [258, 256]);
    assert_eq!(tokenizer.encode_chat(99, "<tool>he").unwrap(), [258, 256]);
}

#[test]
fn sentencepiece_merges_by_score() {
    let tokenizer = spm();
    // "ab" beats "bc"; "▁a" would need the "a" that "ab" took.
    assert_eq!(encoded(&tokenizer, "abc", false), ["▁", "ab", "c"]);
    assert_eq!(encoded(&tokenizer, "a  a", false), ["▁a", "▁▁", "a"]);
    assert_eq!(tokenizer.encode("a", true, false).unwrap(), [1, 265]);
}

#[test]
fn sentencepiece_spells_unknown_characters_in_bytes() {
    let tokenizer = spm();
    assert_eq!(encoded(&tokenizer, "aé", false), ["▁a", "<0xC3>", "<0xA9>"]);
    assert_eq!(
        tokenizer
            .decode(&tokenizer.encode("aé", true, false).unwrap())
            .unwrap(),
        "aé"
    );
}

#[test]
fn sentencepiece_without_byte_tokens_falls_back_to_unknown() {
    let mut data = spm_data(&[("▁", -1.0, NORMAL)]);
    data.types.as_mut().unwrap()[3 + 0xC3] = UNUSED;
    let tokenizer = Tokenizer::new(data.clone()).unwrap();
    assert_eq!(encoded(&tokenizer, "éx", false), ["▁", "<unk>", "<0x78>"]);
    data.types.as_mut().unwrap()[0] = NORMAL;
    let error = Tokenizer::new(data)
        .unwrap()
        .encode("é", false, false)
        .unwrap_err();
    assert!(
        matches!(error, Error::Unencodable { byte: 0xC3 }),
        "{error}"
    );
}

#[test]
fn sentencepiece_prefix_and_user_defined_tokens() {
    let tokenizer = spm();
    assert_eq!(encoded(&tokenizer, "<tool x>a", false), ["<tool▁x>", "▁a"]);
    assert_eq!(encoded(&tokenizer, "</s>a", true), ["</s>", "▁a"]);
    assert_eq!(encoded(&tokenizer, "", true), Vec::<String>::new());
    let mut data = spm_data(&[("▁", -1.0, NORMAL), ("a", -1.0, NORMAL)]);
    data.usage.add_space_prefix = Some(false);
    let plain = Tokenizer::new(data).unwrap();
    assert_eq!(encoded(&plain, "a a", false), ["a", "▁", "a"]);
    assert_eq!(
        plain
            .decode(&plain.encode(" a", false, false).unwrap())
            .unwrap(),
        " a"
    );
}

#[test]
fn words_cut_at_spaces_give_the_ids_of_the_whole() {
    // One token with a space inside forbids cutting; "x" keeps it from mattering.
    let words = [
        ("▁", -9.0, NORMAL),
        ("a", -9.0, NORMAL),
        ("▁a", -1.0, NORMAL),
        ("▁▁", -2.0, NORMAL),
        ("aa", -3.0, NORMAL),
        ("▁aa", -4.0, NORMAL),
        ("▁▁a", -5.0, NORMAL),
    ];
    let cut = Tokenizer::new(spm_data(&words)).unwrap();
    let mut with_inner = words.to_vec();
    with_inner.push(("x▁y", -1.0, NORMAL));
    let whole = Tokenizer::new(spm_data(&with_inner)).unwrap();
    let mut runner = proptest::test_runner::TestRunner::new(config());
    runner
        .run(&"[a ]{0,60}", |text| {
            prop_assert_eq!(
                cut.encode(&text, true, false).unwrap(),
                whole.encode(&text, true, false).unwrap()
            );
            Ok(())
        })
        .unwrap();
}

/// What is wrong with `data`.
pub(super) fn refusal(data: VocabData) -> Error {
    Tokenizer::new(data).unwrap_err()
}

#[test]
fn bad_vocabularies_are_refused_by_name() {
    let good = || bpe_data(&["he"], &["h e"]);
    let edited = |edit: fn(&mut VocabData)| {
        let mut data = good();
        edit(&mut data);
        refusal(data)
    };
    assert!(Tokenizer::new(good()).is_ok());
    let error = edited(|d| d.tokens = Texts::default());
    assert!(matches!(error, Error::Size { len: 0, .. }), "{error}");
    let error = edited(|d| d.merges = None);
    assert!(
        matches!(error, Error::MissingKey { key: MERGES }),
        "{error}"
    );
    let error = edited(|d| d.types.as_mut().unwrap().truncate(3));
    assert!(
        matches!(
            error,
            Error::Length {
                len: 3,
                n_vocab: 259,
                ..
            }
        ),
        "{error}"
    );
    let error = edited(|d| d.model = "rwkv".into());
    assert!(
        error.is_unsupported() && error.to_string().contains("rwkv"),
        "{error}"
    );
    let error = edited(|d| d.pre = Some("klingon".into()));
    assert!(error.is_unsupported(), "{error}");
    let error = refusal(bpe_data(&["he", "he"], &["h e"]));
    assert!(
        matches!(
            error,
            Error::DuplicateToken {
                first: 256,
                second: 257,
                ..
            }
        ),
        "{error}"
    );
}

/// llama.cpp loads all of these, some of them with a warning.
#[test]
fn what_does_not_keep_a_vocabulary_from_being_used_is_told() {
    let told = |edit: fn(&mut VocabData), words: &[&str]| {
        let mut data = bpe_data(&["he"], &["h e"]);
        edit(&mut data);
        let tokenizer = Tokenizer::new(data).unwrap();
        let remarks = tokenizer.tolerated().to_vec();
        assert_eq!(remarks.len(), words.len(), "{remarks:?}");
        for (remark, word) in remarks.iter().zip(words) {
            assert!(remark.contains(word), "{remark}");
        }
        tokenizer
    };
    let he = |tokenizer: &Tokenizer| tokenizer.encode("he", false, false).unwrap();
    assert_eq!(he(&told(|_| (), &[])), [256]);
    let no_merges = told(|d| d.merges = Some(Texts::default()), &[]);
    assert_eq!(he(&no_merges).len(), 2);
    told(
        |d| d.types.as_mut().unwrap().push(1),
        &["260 entries for 259 tokens"],
    );
    told(
        |d| d.types.as_mut().unwrap()[5] = 7,
        &["token 5 has type 7"],
    );
    // What no rule of the format uses is not looked at.
    told(|d| d.scores = Some(vec![f32::NAN; 7]), &[]);
    told(
        |d| d.usage.special[crate::vocab::EOS] = Some(-2),
        &["eos_token_id is -2"],
    );
    told(
        |d| d.usage.special[crate::vocab::EOS] = Some(i64::MAX),
        &["eos_token_id is"],
    );
    let outside = told(
        |d| d.usage.special[crate::vocab::BOS] = Some(259),
        &["bos_token_id is 259"],
    );
    assert_eq!(outside.bos(), None);
    for merge in [&b"h q"[..], b"zzz e", b"he", b"h ", b""] {
        let mut data = bpe_data(&["he"], &["h e"]);
        data.merges = Some(texts([merge, &b"h e"[..]]));
        let tokenizer = Tokenizer::new(data).unwrap();
        let remarks = tokenizer.tolerated();
        assert!(
            remarks.len() == 1 && remarks[0].contains("1 of 2 merges"),
            "{remarks:?}"
        );
        assert_eq!(he(&tokenizer), [256], "the others are used");
    }
    let spm = |scores: Option<Vec<f32>>| {
        let mut data = spm_data(&[("a", 0.0, NORMAL), ("b", 0.0, NORMAL), ("ab", 0.0, NORMAL)]);
        data.scores = scores;
        let tokenizer = Tokenizer::new(data).unwrap();
        assert_eq!(
            tokenizer.tolerated().len(),
            1,
            "{:?}",
            tokenizer.tolerated()
        );
        tokenizer.encode("ab", false, false).unwrap()
    };
    let n = spm_data(&[("a", 0.0, NORMAL), ("b", 0.0, NORMAL), ("ab", 0.0, NORMAL)])
        .tokens
        .len();
    let same = spm(None);
    assert_eq!(same, spm(Some(vec![f32::NAN; n])));
    assert_eq!(same, spm(Some(vec![0.0; n + 1])));
}

/// starcoder and refact have no token for some bytes, and took `<|endoftext|>`
/// for them.
#[test]
fn a_byte_without_a_token_is_left_out() {
    let mut data = bpe_data(&["he"], &["h e"]);
    let list: Vec<Vec<u8>> = data.tokens.iter().map(<[u8]>::to_vec).collect();
    let spoilt = list
        .iter()
        .map(|t| if t == b"x" { &b"[gone]"[..] } else { t });
    data.tokens = texts(spoilt);
    data.usage.special[crate::vocab::UNK] = Some(0);
    let tokenizer = Tokenizer::new(data).unwrap();
    assert_eq!(tokenizer.encode("hex", false, false).unwrap(), [256]);
    assert!(tokenizer.encode("x", false, false).unwrap().is_empty());
    // Neighbours of what is left out may join, as in HF's tokenizers.
    assert_eq!(tokenizer.encode("hxe", false, false).unwrap(), [256]);
    let long = "hxe".repeat(40);
    assert_eq!(tokenizer.encode(&long, false, false).unwrap(), [256; 40]);
}

#[test]
fn ids_outside_of_the_vocabulary() {
    let tokenizer = bpe();
    let error = tokenizer.decode(&[0, 9999]).unwrap_err();
    assert!(matches!(error, Error::TokenId { id: 9999, .. }), "{error}");
    assert_eq!(tokenizer.token_bytes(9999), None);
    assert_eq!(tokenizer.stream().push(&tokenizer, u32::MAX), "");
    assert!(!tokenizer.is_end_of_generation(9999));
}

#[test]
fn end_of_generation_by_metadata_and_by_name() {
    let mut data = bpe_data(&["he", "<|eot_id|>"], &["h e"]);
    data.usage.special[3] = Some(5);
    let tokenizer = Tokenizer::new(data).unwrap();
    assert_eq!(tokenizer.end_of_generation(), [5, 257, 258]);
    // A plain token of such a name is a control token all the same.
    assert!(tokenizer.is_special(257) && tokenizer.decode(&[257]).unwrap().is_empty());
    let harmony = bpe_data(&["he", "<|end|>", "<|return|>", "<|call|>"], &["h e"]);
    let harmony = Tokenizer::new(harmony).unwrap();
    assert_eq!(harmony.end_of_generation(), [258, 259, 260]);
}

#[test]
fn a_stream_holds_half_characters_back() {
    let tokenizer = bpe();
    let bytes: Vec<u32> = "é👋"
        .bytes()
        .map(|b| {
            tokenizer
                .encode("a", false, false)
                .map(|_| u32::from(b))
                .unwrap()
        })
        .collect();
    let mut stream = tokenizer.stream();
    let pieces: Vec<String> = bytes
        .iter()
        .map(|&id| stream.push(&tokenizer, id))
        .collect();
    assert_eq!(pieces, ["", "é", "", "", "", "👋"]);
    assert_eq!(stream.finish(), "");
    // Cut short, and broken by a byte that cannot follow.
    let mut stream = tokenizer.stream();
    assert_eq!(stream.push(&tokenizer, 0xF0), "");
    assert_eq!(stream.push(&tokenizer, 0x9F), "");
    assert_eq!(stream.push(&tokenizer, u32::from(b'a')), "\u{FFFD}a");
    assert_eq!(stream.push(&tokenizer, 0x80), "\u{FFFD}");
    assert_eq!(stream.push(&tokenizer, 0xE4), "");
    assert_eq!(stream.finish(), "\u{FFFD}");
}

#[test]
fn encoding_gives_up_past_the_limit() {
    let tokenizer = bpe();
    let text = "hello hello hello";
    assert_eq!(
        tokenizer
            .encode_at_most(3, text, false, false)
            .unwrap()
            .len(),
        3
    );
    for (max, text) in [(2, text), (0, "h"), (1, "<|im_end|>h"), (1, "<tool><tool>")] {
        let error = tokenizer.encode_at_most(max, text, true, true).unwrap_err();
        assert!(
            matches!(error, Error::TooManyTokens { max: found } if found == max),
            "{error}"
        );
    }
    assert!(
        tokenizer
            .encode_at_most(0, "", false, false)
            .unwrap()
            .is_empty()
    );
    // Refused by its length alone.
    let error = tokenizer
        .encode_at_most(9, &"x".repeat(1000), false, false)
        .unwrap_err();
    assert!(matches!(error, Error::TooManyTokens { .. }), "{error}");
}

#[test]
fn huge_words_take_time_in_proportion() {
    // Quadratic merging of these would take hours.
    let tokenizer = bpe();
    for unit in ["hello", "a", "\u{4e00}", "!", " ", "\n ", "'", "hH"] {
        let text = unit.repeat((1 << 20) / unit.len());
        let ids = tokenizer.encode(&text, true, true).unwrap();
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    }
    let tokenizer = spm();
    for unit in ["ab", " ", "a b", "é"] {
        let text = unit.repeat((1 << 20) / unit.len());
        let ids = tokenizer.encode(&text, true, true).unwrap();
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    }
    let error = tokenizer
        .encode(&"a".repeat(MAX_TEXT_BYTES + 1), true, true)
        .unwrap_err();
    assert!(matches!(error, Error::TextTooLong { .. }), "{error}");
}

pub(super) fn config() -> ProptestConfig {
    ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// Text in which words, names of special tokens and any characters mix.
pub(super) fn any_text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        prop::sample::select(vec![
            "hello",
            " hello",
            "he",
            "<tool>",
            "<|im_end|>",
            "</s>",
            "  ",
            "ab",
            "ä"
        ])
        .prop_map(str::to_owned),
        any::<char>().prop_map(String::from),
        any::<String>(),
    ];
    prop::collection::vec(part, 0..8).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn any_text_survives_byte_level_bpe(text in any_text(), pre in 0..12usize) {
        let names = ["gpt-2", "starcoder", "llama-bpe", "qwen2", "qwen35", "seed-coder", "tekken", "gpt-4o", "deepseek-v3", "deepseek-coder", "falcon", "default"];
        let mut data = bpe_data(&["he", "ll", "hell"], &["h e", "l l", "he ll"]);
        data.pre = Some(names[pre].into());
        let tokenizer = Tokenizer::new(data).unwrap();
        let ids = tokenizer.encode(&text, true, false).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids).unwrap(), text.clone());
        let named = DecodeOptions { special: true, from_start: true };
        let ids = tokenizer.encode(&text, false, true).unwrap();
        prop_assert_eq!(tokenizer.decode_with(&ids, named).unwrap(), text);
    }

    #[test]
    fn any_text_survives_sentencepiece(text in any_text()) {
        // The mark itself is the one character that comes back as a space.
        let text = text.replace(SPM_SPACE, "_");
        let tokenizer = spm();
        let ids = tokenizer.encode(&text, true, false).unwrap();
        if !text.contains("<tool x>") {
            prop_assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        }
    }

    #[test]
    fn a_stream_gives_what_decode_gives(
        ids in prop::collection::vec(0..300u32, 0..60),
        special: bool,
        from_start: bool,
        sentencepiece: bool,
    ) {
        let tokenizer = if sentencepiece { spm() } else { bpe() };
        let options = DecodeOptions { special, from_start };
        let mut stream = tokenizer.stream_with(options);
        let mut text = String::new();
        let known: Vec<u32> = ids.iter().copied().filter(|&id| (id as usize) < tokenizer.n_vocab()).collect();
        for &id in &ids {
            text.push_str(&stream.push(&tokenizer, id));
        }
        text.push_str(&stream.finish());
        prop_assert_eq!(&text, &tokenizer.decode_with(&known, options).unwrap());
        let mut bytes: Vec<u8> = Vec::new();
        for &id in &known {
            bytes.extend_from_slice(tokenizer.rendered(id, special));
        }
        let lossy = String::from_utf8_lossy(&bytes);
        let stripped = lossy.strip_prefix(' ').unwrap_or(&lossy);
        prop_assert!(text == lossy || from_start && sentencepiece && text == stripped);
    }

    #[test]
    fn any_vocabulary_is_taken_or_refused(
        tokens in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..6), 0..40),
        types in prop::collection::vec(0..8i32, 0..40),
        merges in prop::collection::vec("[ab ]{0,4}", 0..6),
        sentencepiece: bool,
        text in any_text(),
        ids in prop::collection::vec(any::<u32>(), 0..8),
    ) {
        let n = tokens.len();
        let types = (types.len() > 20).then(|| (0..n).map(|i| types[i % types.len()].min(6)).collect());
        let data = VocabData {
            model: if sentencepiece { "llama" } else { "gpt2" }.into(),
            tokens: texts(tokens.iter().map(Vec::as_slice)),
            types,
            scores: Some((0..n).map(|i| -(i as f32)).collect()),
            merges: Some(texts(merges.iter().map(String::as_bytes))),
            ..VocabData::default()
        };
        if let Ok(tokenizer) = Tokenizer::new(data) {
            let _ = tokenizer.encode(&text, true, true);
            let _ = tokenizer.decode(&ids);
            let mut stream = tokenizer.stream();
            for id in ids {
                stream.push(&tokenizer, id);
            }
        }
    }
}
