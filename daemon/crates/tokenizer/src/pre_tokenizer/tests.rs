//! The hand-written splitters against the published expressions.

use super::*;
use fancy_regex::Regex;
use proptest::prelude::*;

const GPT2_REGEX: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
// `(?i:'s)` in the published forms also takes U+017F in engines that fold
// Unicode case; engines in the field take ASCII only, and so do we.
const CONTRACTIONS: &str = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]";

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
            out.push(found.as_str());
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
        " \u{20}\t\n\r\u{b}\u{85}\u{a0}\u{3000}'sStTrReEvVmMlLdDaZé中あ가ǅʰ\u{301}\u{903}0123٣Ⅷ½.,!/([`$+<=>^~|-_\\\"、。👍\u{200d}\u{0}\u{ad}ſ"
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
