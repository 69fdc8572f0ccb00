//! The hand-written splitters against the published expressions.

use super::*;
use crate::unicode::{LOOKS, LOOKS_MAX};
use fancy_regex::Regex;
use proptest::prelude::*;

const GPT2_REGEX: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
// `(?i:'s)` in the published forms also takes U+017F in engines that fold
// Unicode case; engines in the field take ASCII only, and so do we.
const CONTRACTIONS: &str = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]";

const BLOOM_REGEX: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

/// What DeepSeek LLM's second expression has in its brackets.
const CASED: &str = "\u{41}-\u{5A}\u{61}-\u{7A}\u{B5}\u{C0}-\u{D6}\u{D8}-\u{F6}\u{F8}-\u{1BA}\u{1BC}-\u{1BF}\u{1C4}-\u{293}\u{295}-\u{2AF}\u{370}-\u{373}\u{376}\u{377}\u{37B}-\u{37D}\u{37F}\u{386}\u{388}-\u{38A}\u{38C}\u{38E}-\u{3A1}\u{3A3}-\u{3F5}\u{3F7}-\u{481}\u{48A}-\u{52F}\u{531}-\u{556}\u{10A0}-\u{10C5}\u{13A0}-\u{13F5}\u{13F8}-\u{13FD}\u{1C90}-\u{1CBA}\u{1CBD}-\u{1CBF}\u{1D00}-\u{1D2B}\u{1D6B}-\u{1D77}\u{1D79}-\u{1D9A}\u{1E00}-\u{1F15}\u{1F18}-\u{1F1D}\u{1F20}-\u{1F45}\u{1F48}-\u{1F4D}\u{1F50}-\u{1F57}\u{1F59}\u{1F5B}\u{1F5D}\u{1F5F}-\u{1F7D}\u{1F80}-\u{1FB4}\u{1FB6}-\u{1FBC}\u{1FBE}\u{1FC2}-\u{1FC4}\u{1FC6}-\u{1FCC}\u{1FD0}-\u{1FD3}\u{1FD6}-\u{1FDB}\u{1FE0}-\u{1FEC}\u{1FF2}-\u{1FF4}\u{1FF6}-\u{1FFC}\u{2102}\u{2107}\u{210A}-\u{2113}\u{2115}\u{2119}-\u{211D}\u{2124}\u{2126}\u{2128}\u{212A}-\u{212D}\u{212F}-\u{2134}\u{2139}\u{213C}-\u{213F}\u{2145}-\u{2149}\u{214E}\u{2183}\u{2184}\u{2C00}-\u{2C7B}\u{2C7E}-\u{2CE4}\u{2CEB}-\u{2CEE}\u{2CF2}\u{2CF3}\u{A640}-\u{A66D}\u{A680}-\u{A69B}\u{A722}-\u{A76F}\u{A771}-\u{A787}\u{A78B}-\u{A78E}\u{AB70}-\u{ABBF}\u{FB00}-\u{FB06}\u{FB13}-\u{FB17}\u{FF21}-\u{FF3A}\u{FF41}-\u{FF5A}\u{10400}-\u{1044F}\u{104B0}-\u{104D3}\u{104D8}-\u{104FB}\u{10C80}-\u{10CB2}\u{10CC0}-\u{10CF2}\u{118A0}-\u{118DF}\u{1E900}-\u{1E943}";

fn cl100k(digits: &str) -> String {
    format!(
        r"(?:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
}

fn o200k(digits: &str, contractions: &str) -> String {
    let upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]";
    let lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]";
    format!(
        r"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{contractions}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{contractions}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
}

/// The published expressions of one name of each kind.
fn published() -> Vec<(&'static str, Vec<String>)> {
    let digit = r"\p{N}".to_owned();
    vec![
        ("gpt-2", vec![GPT2_REGEX.into()]),
        ("starcoder", vec![digit.clone(), GPT2_REGEX.into()]),
        ("llama-bpe", vec![cl100k("{1,3}")]),
        ("qwen2", vec![cl100k("")]),
        (
            "qwen35",
            vec![format!(
                r"(?:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            )],
        ),
        (
            "seed-coder",
            vec![format!(
                r"(?:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
            )],
        ),
        ("tekken", vec![o200k("", "")]),
        ("gpt-4o", vec![o200k("{1,3}", &format!("(?:{CONTRACTIONS})?"))]),
        (
            "deepseek-v3",
            vec![
                r"\p{N}{1,3}".into(),
                "[一-龥\u{3040}-ゟ゠-ヿ]+".into(),
                r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##.into(),
            ],
        ),
        (
            "deepseek-coder",
            vec![
                r"[\r\n]".into(),
                r"\s?\p{L}+".into(),
                r"\s?\p{P}+".into(),
                "[一-龥\u{800}-一가-\u{D7FF}]+".into(),
                digit,
            ],
        ),
        (
            "deepseek-llm",
            vec![
                r"[\r\n]".into(),
                format!(r"\s?[{CASED}]+"),
                "\\s?[!-/:-~！-／：-～‘-‟\u{3000}-。]+".into(),
                r"\s+$".into(),
                "[一-龥\u{800}-一가-\u{D7FF}]+".into(),
                r"\p{N}+".into(),
            ],
        ),
        (
            "kimi-k2",
            vec![{
                let upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]";
                let lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]";
                format!(
                    r"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+(?:{CONTRACTIONS})?|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*(?:{CONTRACTIONS})?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                )
            }],
        ),
        ("bloom", vec![BLOOM_REGEX.into()]),
        ("viking", vec![BLOOM_REGEX.into(), r"\p{N}".into()]),
        ("superbpe", vec![r"\p{N}+".into(), r"(?=(\d{3})+(?!\d))".into()]),
        ("gemma4", vec![r"[^\n]+|[\n]+".into()]),
        ("laguna", vec![r"[^\n]+|[\n]+".into(), cl100k("")]),
        ("minicpm5", vec![r"\p{N}{1,3}".into(), cl100k("+")]),
        (
            "falcon",
            vec![
                r"[\p{P}\$\+<=>\^~\|`]+".into(),
                GPT2_REGEX.into(),
                "[0-9][0-9][0-9]".into(),
            ],
        ),
        (
            "default",
            vec![
                r"[\p{P}\$\+<=>\^~\|]+".into(),
                GPT2_REGEX.into(),
                r"\p{N}+".into(),
                "[0-9][0-9][0-9]".into(),
            ],
        ),
    ]
}

fn isolate<'t>(regex: &Regex, pieces: Vec<&'t str>) -> Vec<&'t str> {
    let mut out = Vec::new();
    for piece in pieces {
        let mut gap = 0;
        for found in regex.find_iter(piece) {
            let found = found.expect("short inputs stay below the backtrack limit");
            if gap < found.start() {
                out.push(&piece[gap..found.start()]);
            }
            // A look-ahead alone only cuts.
            if !found.as_str().is_empty() {
                out.push(found.as_str());
            }
            gap = found.end();
        }
        if gap < piece.len() {
            out.push(&piece[gap..]);
        }
    }
    out
}

fn ours(name: &str, text: &str) -> Vec<String> {
    let mut pieces = Vec::new();
    PreTokenizer::by_name(Some(name))
        .unwrap()
        .split(text, &mut |piece| {
            pieces.push(piece.to_owned());
            Ok(())
        })
        .unwrap();
    pieces
}

/// Characters of every class, those near the expressions' borders often.
fn text() -> impl Strategy<Value = String> {
    let border = prop::sample::select(
        " \u{20}\t\n\r\u{b}\u{85}\u{a0}\u{3000}'sStTrReEvVmMlLdDaZé中あ가ǅʰ\u{301}\u{903}0123٣Ⅷ½.,!/([`$+<=>^~|-_\\\"、。👍\u{200d}\u{0}\u{ad}ſƻʔ㐀々〇⺀ΩK…।…‘～"
            .chars()
            .collect::<Vec<_>>(),
    );
    prop::collection::vec(prop_oneof![9 => border, 1 => any::<char>()], 0..40)
        .prop_map(String::from_iter)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn scanners_agree_with_the_published_expressions(text in text()) {
        thread_local! {
            static REGEXES: Vec<(&'static str, Vec<Regex>)> = published()
                .into_iter()
                .map(|(name, list)| (name, list.iter().map(|r| Regex::new(r).unwrap()).collect()))
                .collect();
        }
        REGEXES.with(|all| {
            for (name, regexes) in all {
                let mut expected = if text.is_empty() { vec![] } else { vec![text.as_str()] };
                for regex in regexes {
                    expected = isolate(regex, expected);
                }
                prop_assert_eq!(ours(name, &text), expected, "{}", name);
            }
            Ok(())
        })?;
    }
}

#[test]
fn every_listed_stage_list_has_a_published_form_in_the_test() {
    let tested: Vec<_> = published()
        .iter()
        .map(|(name, _)| PreTokenizer::by_name(Some(name)).unwrap().stages)
        .collect();
    for (names, stages, _, _) in TABLE {
        assert!(
            tested.contains(stages),
            "{names:?} is not compared with its expression"
        );
    }
}

#[test]
fn long_runs_are_cut_in_time_in_proportion_under_every_name() {
    // Looks at characters are counted, since time tells of the machine, too. A scanner that looks
    // back or ahead to a run's end at each place has tens of thousands of them for a character;
    // those that try several alternatives in several stages have a few for each.
    const LOOKS_OF_ONE: u64 = 100;
    /// Says where it was when a look too many ends the test, and lets later ones look again.
    struct At(&'static str, &'static str);
    impl Drop for At {
        fn drop(&mut self) {
            LOOKS_MAX.set(u64::MAX);
            if std::thread::panicking() {
                eprintln!("under {} with a run of {:?}", self.0, self.1);
            }
        }
    }
    for (name, _) in published() {
        for unit in [
            "hello",
            "a",
            "aB",
            "\u{4e00}",
            "7",
            "!",
            "!a",
            " ",
            "\n",
            "\n ",
            " \n",
            "'",
            "'s",
            "é\u{301}",
        ] {
            let text = unit.repeat((1 << 18) / unit.len());
            // A scanner that takes time by the square of a run would take minutes to its end.
            LOOKS_MAX.set(LOOKS.get() + LOOKS_OF_ONE * text.chars().count() as u64);
            let _at = At(name, unit);
            let pieces = ours(name, &text);
            assert!(pieces.concat() == text, "{name}: {unit:?}");
        }
    }
}

#[test]
fn an_unknown_name_lists_the_known_ones() {
    let error = PreTokenizer::by_name(Some("klingon")).unwrap_err();
    assert!(error.is_unsupported());
    let message = error.to_string();
    assert!(
        message.contains("klingon") && message.contains("llama-bpe") && message.contains("qwen2"),
        "{message}"
    );
}

#[test]
fn no_name_means_default() {
    assert_eq!(PreTokenizer::by_name(None).unwrap().stages, DEFAULT);
}
