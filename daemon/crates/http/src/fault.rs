//! Finds the invalid field of a body, and describes the error in terms of JSON.

use serde::de::DeserializeOwned;
use serde_json::error::Category;
use serde_json::{Error, Value};

/// Maximum number of members of a body that are tried to find the invalid one.
const MEMBERS_MAX: usize = 64;

/// Maximum size in bytes of a body whose members are tried: each trial parses the whole body again.
const TRIED_MAX_BYTES: usize = 16 << 10;

/// Maximum length of a field's name in a message, in bytes.
const FIELD_MAX: usize = 128;

/// The invalid field, such as `tools[0].type`, and what is wrong with it. The field is `body` if no
/// single one is invalid.
pub(super) fn of<T: DeserializeOwned>(bytes: &[u8], error: &Error) -> (String, String) {
    let body = || "body".to_owned();
    if bytes.is_empty() {
        return (body(), "it is empty; send a JSON object".to_owned());
    }
    let place = format!(" at line {} column {}", error.line(), error.column());
    let text = error.to_string();
    let text = in_words(text.strip_suffix(&place).unwrap_or(&text));
    let said = format!("{text} (line {}, column {})", error.line(), error.column());
    if error.classify() != Category::Data {
        return (body(), format!("it is not valid JSON: {said}"));
    }
    let field = path_of::<T>(bytes).or_else(|| member_of::<T>(bytes));
    (field.unwrap_or_else(body), said)
}

/// The path to the invalid value; `None` if that is the whole body, or a flattened member
/// (`serde(flatten)`).
fn path_of<T: DeserializeOwned>(bytes: &[u8]) -> Option<String> {
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let error = serde_path_to_error::deserialize::<_, T>(&mut reader).err()?;
    let path = error.path();
    path.iter().next()?;
    let mut text = path.to_string();
    let end = (0..=FIELD_MAX.min(text.len())).rev();
    text.truncate(end.into_iter().find(|&at| text.is_char_boundary(at))?);
    Some(text)
}

/// The member without which the body parses, or fails for another reason; for flattened members,
/// whose errors have no path.
fn member_of<T: DeserializeOwned>(bytes: &[u8]) -> Option<String> {
    if bytes.len() > TRIED_MAX_BYTES {
        return None;
    }
    let Value::Object(all) = serde_json::from_slice(bytes).ok()? else {
        return None;
    };
    let fault = |members| T::deserialize(Value::Object(members)).err();
    let whole = fault(all.clone())?.to_string();
    let is_it = |name: &&String| {
        let mut others = all.clone();
        others.remove(*name);
        fault(others).is_none_or(|error| {
            let error = error.to_string();
            error != whole && !error.starts_with("missing field")
        })
    };
    let name = all.keys().take(MEMBERS_MAX).find(is_it)?;
    (name.len() <= FIELD_MAX).then(|| name.clone())
}

/// Replaces serde's terms in an error message by those of JSON.
fn in_words(text: &str) -> String {
    let mut words: Vec<&str> = Vec::new();
    let mut terms = text.split(' ');
    while let Some(word) = terms.next() {
        let term = match word {
            "struct" => {
                terms.next();
                "an object"
            }
            "i32" | "i64" | "u32" | "u64" | "usize" => "an integer",
            "f32" | "f64" => "a number",
            "sequence," => "list,",
            "sequence" => "list",
            "map," => "object,",
            "map" if words.last() == Some(&"a") => {
                words.pop();
                "an object"
            }
            _ => word,
        };
        words.push(term);
    }
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[allow(dead_code, reason = "what is read is not looked at")]
    struct Wire {
        messages: Vec<Message>,
        max_tokens: Option<i64>,
        #[serde(flatten)]
        rest: Rest,
    }

    #[derive(Debug, Deserialize)]
    #[allow(dead_code, reason = "what is read is not looked at")]
    struct Message {
        role: String,
    }

    #[derive(Debug, Deserialize)]
    #[allow(dead_code, reason = "what is read is not looked at")]
    struct Rest {
        temperature: Option<f32>,
        stop: Option<Vec<String>>,
    }

    fn fault(body: &str) -> (String, String) {
        let error = serde_json::from_slice::<Wire>(body.as_bytes()).unwrap_err();
        of::<Wire>(body.as_bytes(), &error)
    }

    #[test]
    fn the_field_at_fault_is_named() {
        let cases = [
            (
                r#"{"messages": [], "max_tokens": "1"}"#,
                "max_tokens",
                "expected an integer",
            ),
            (r#"{"messages": {}}"#, "messages", "expected a list"),
            (
                "{\"messages\": [{\"role\": \"a\"},\n{\"role\": 1}]}",
                "messages[1].role",
                "a string",
            ),
            (
                r#"{"messages": [{}]}"#,
                "messages[0]",
                "missing field `role`",
            ),
            (r#"{"messages": [7]}"#, "messages[0]", "expected an object"),
            (
                r#"{"messages": [], "temperature": []}"#,
                "temperature",
                "list, expected a number",
            ),
            (
                r#"{"messages": [], "a": "],\"", "stop": [1]}"#,
                "stop",
                "expected a string",
            ),
            (r#"{"temperature": 1}"#, "body", "missing field `messages`"),
            (
                r#"{"messages": NaN}"#,
                "body",
                "it is not valid JSON: expected value",
            ),
            ("null", "body", "expected an object"),
            ("", "body", "it is empty"),
        ];
        for (body, field, message) in cases {
            let (at, said) = fault(body);
            assert_eq!(at, field, "{body}: {said}");
            assert!(said.contains(message), "{body}: {said}");
        }
    }
}
