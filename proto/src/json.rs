//! How messages are written as JSON, where that is not what serde does by itself. The build script
//! says which fields these are.

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use crate::v1::*;

/// An enum whose values have words, such as `stop_token`.
pub trait Word {
    /// The value as a lowercase word; `unknown` if it is not specified.
    fn word(self) -> &'static str;
}

include!(concat!(env!("OUT_DIR"), "/words.rs"));

/// An enum as its word; `unknown` for a value that this version does not know.
pub(crate) fn word<S: Serializer, E: Word + TryFrom<i32>>(
    value: &i32,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let word = E::try_from(*value).map_or("unknown", E::word);
    serializer.serialize_str(word)
}

/// Whether a field says nothing.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A message, or the default one if it is not set.
pub(crate) fn or_default<T: Clone + Default + Serialize, S: Serializer>(
    value: &Option<T>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    value.clone().unwrap_or_default().serialize(serializer)
}

/// A text, or null if it is empty.
pub(crate) fn or_null<S: Serializer>(text: &str, serializer: S) -> Result<S::Ok, S::Error> {
    (!text.is_empty()).then_some(text).serialize(serializer)
}

/// A number as a string of digits.
pub(crate) fn digits<S: Serializer>(number: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(number)
}

/// The bytes of a token: `piece` is text with U+FFFD for what is no UTF-8, `piece_hex` is exact.
pub(crate) fn piece<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(Some(2))?;
    map.serialize_entry("piece", &String::from_utf8_lossy(bytes))?;
    map.serialize_entry("piece_hex", &hex(bytes))?;
    map.end()
}

/// The bytes of tokens, as [`piece`] has them, in two lists.
pub(crate) fn pieces<S: Serializer>(all: &[Vec<u8>], serializer: S) -> Result<S::Ok, S::Error> {
    let texts: Vec<_> = all
        .iter()
        .map(|bytes| String::from_utf8_lossy(bytes))
        .collect();
    let exact: Vec<String> = all.iter().map(|bytes| hex(bytes)).collect();
    let mut map = serializer.serialize_map(Some(2))?;
    map.serialize_entry("pieces", &texts)?;
    map.serialize_entry("pieces_hex", &exact)?;
    map.end()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{json, to_value};

    use super::*;

    #[test]
    fn enums_are_words_and_unknown_ones_say_so() {
        let change = |policy: i32| to_value(SetPolicyRequest { policy }).unwrap();
        assert_eq!(change(1), json!({"policy": "pass-aware"}));
        assert_eq!(change(0), json!({"policy": "unknown"}));
        assert_eq!(change(77), json!({"policy": "unknown"}));
        assert_eq!(FinishReason::StopToken.word(), "stop_token");
    }

    #[test]
    fn half_a_character_does_not_break_the_line() {
        let answer = TokenizeResponse {
            ids: vec![1],
            pieces: vec![vec![0xc3]],
        };
        let expected = json!({"ids": [1], "pieces": ["\u{fffd}"], "pieces_hex": ["c3"]});
        assert_eq!(to_value(answer).unwrap(), expected);
        let done = GenerateDone {
            seed: 14_466_886_325_030_996_175,
            ..Default::default()
        };
        let done = to_value(done).unwrap();
        assert_eq!(done["seed"], "14466886325030996175");
        assert!(done.get("stop_string").is_none() && done.get("choice").is_none());
    }

    #[test]
    fn a_token_without_a_probability_has_null() {
        let first = TokenLogprob {
            id: 7,
            piece: b"a".to_vec(),
            ..Default::default()
        };
        let expected = json!({"id": 7, "piece": "a", "piece_hex": "61", "logprob": null});
        assert_eq!(to_value(first).unwrap(), expected);
    }

    #[test]
    fn what_is_not_set_is_null_or_its_default_or_left_out() {
        let model = to_value(Model {
            defaults: Some(ModelDefaults {
                top_k: Some(7),
                ..Default::default()
            }),
            ..Default::default()
        });
        let model = model.unwrap();
        assert!(model["draft"].is_null() && model["file"].is_null());
        assert_eq!(model["defaults"], json!({"top_k": 7}));
        let usage = to_value(ModelCacheUsage::default()).unwrap();
        assert_eq!(usage["usage"]["evictions_by"]["own_pass"], 0);
    }
}
