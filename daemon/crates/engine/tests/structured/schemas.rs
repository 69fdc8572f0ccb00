//! Random JSON schemas that describe values of bounded size, and whether a value is one of them.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};

/// Deepest nesting of what is made.
const DEPTH_MAX: u32 = 3;

/// A schema; its root is an object half of the time.
pub(crate) fn random(rng: &mut ChaCha8Rng) -> Value {
    let mut schema = match rng.random_bool(0.5) {
        true => object(rng, 0),
        false => any(rng, 0),
    };
    schema["$defs"] = json!({"leaf": any(rng, DEPTH_MAX)});
    schema
}

fn any(rng: &mut ChaCha8Rng, depth: u32) -> Value {
    let deep = depth < DEPTH_MAX;
    match rng.random_range(0..if deep { 12 } else { 8 }) {
        0 => json!({"type": "boolean"}),
        1 => json!({"type": "null"}),
        2 => {
            let least = rng.random_range(-2000..2000);
            json!({"type": "integer", "minimum": least, "maximum": least + rng.random_range(0..500)})
        }
        3 => json!({"type": "integer", "exclusiveMinimum": 0, "maximum": rng.random_range(1..9)}),
        4 => json!({"enum": (0..rng.random_range(1..5)).map(|_| word(rng)).collect::<Vec<_>>()}),
        5 => json!({"const": [word(rng), rng.random_range(0..99), null]}),
        6 => {
            let least = rng.random_range(0..4);
            json!({"type": "string", "minLength": least, "maxLength": least + rng.random_range(0..12)})
        }
        7 => json!({"type": "string", "pattern": "^[a-c]{2,5}-[0-9]{1,3}$"}),
        8 => {
            let least = rng.random_range(0..3);
            json!({"type": "array", "items": any(rng, depth + 1), "minItems": least,
                "maxItems": least + rng.random_range(0..3)})
        }
        9 => json!({"anyOf": [any(rng, depth + 1), any(rng, depth + 1)]}),
        10 => json!({"$ref": "#/$defs/leaf"}),
        _ => object(rng, depth),
    }
}

fn object(rng: &mut ChaCha8Rng, depth: u32) -> Value {
    let mut properties = Map::new();
    let mut required = Vec::new();
    for _ in 0..rng.random_range(0..5) {
        let name = word(rng);
        if rng.random_bool(0.6) && !properties.contains_key(&name) {
            required.push(name.clone());
        }
        properties.insert(name, any(rng, depth + 1));
    }
    json!({"type": "object", "properties": properties, "required": required,
        "additionalProperties": false})
}

fn word(rng: &mut ChaCha8Rng) -> String {
    const LETTERS: [&str; 12] = [
        "a",
        "be",
        "story",
        " ",
        "\u{e9}",
        "\"",
        "\\",
        "\n",
        "7",
        "_",
        "fox",
        "\u{1f98a}",
    ];
    let n = rng.random_range(1..5);
    (0..n)
        .map(|_| LETTERS[rng.random_range(0..LETTERS.len())])
        .collect()
}

/// What `value` lacks of `schema`, as far as [`random`] goes; `root` is where names are looked up.
pub(crate) fn wrong(root: &Value, schema: &Value, value: &Value) -> Option<String> {
    let bad = |what: &str| Some(format!("{value} is not as {schema} says: {what}"));
    if schema.get("$ref").is_some() {
        return wrong(root, &root["$defs"]["leaf"], value);
    }
    if let Some(choices) = schema["anyOf"].as_array() {
        let fits = choices.iter().any(|one| wrong(root, one, value).is_none());
        return if fits { None } else { bad("anyOf") };
    }
    if let Some(words) = schema["enum"].as_array() {
        return if words.contains(value) {
            None
        } else {
            bad("enum")
        };
    }
    if let Some(only) = schema.get("const") {
        return if only == value { None } else { bad("const") };
    }
    match schema["type"].as_str() {
        Some("boolean") if value.is_boolean() => None,
        Some("null") if value.is_null() => None,
        Some("integer") => {
            let Some(n) = value.as_i64() else {
                return bad("integer");
            };
            let fits = schema["minimum"].as_i64().is_none_or(|least| n >= least)
                && schema["exclusiveMinimum"]
                    .as_i64()
                    .is_none_or(|least| n > least)
                && schema["maximum"].as_i64().is_none_or(|most| n <= most);
            if fits { None } else { bad("range") }
        }
        Some("string") => {
            let Some(text) = value.as_str() else {
                return bad("string");
            };
            let n = text.chars().count() as u64;
            let fits = schema["minLength"].as_u64().is_none_or(|least| n >= least)
                && schema["maxLength"].as_u64().is_none_or(|most| n <= most)
                && (schema.get("pattern").is_none() || is_code(text));
            if fits { None } else { bad("text") }
        }
        Some("array") => {
            let Some(items) = value.as_array() else {
                return bad("array");
            };
            let n = items.len() as u64;
            let within = schema["minItems"].as_u64().is_none_or(|least| n >= least)
                && schema["maxItems"].as_u64().is_none_or(|most| n <= most);
            if !within {
                return bad("length");
            }
            items
                .iter()
                .find_map(|item| wrong(root, &schema["items"], item))
        }
        Some("object") => {
            let Some(members) = value.as_object() else {
                return bad("object");
            };
            let required = schema["required"].as_array().into_iter().flatten();
            for name in required.filter_map(Value::as_str) {
                if !members.contains_key(name) {
                    return bad(name);
                }
            }
            members
                .iter()
                .find_map(|(name, member)| match schema["properties"].get(name) {
                    Some(schema) => wrong(root, schema, member),
                    None => bad("a member too many"),
                })
        }
        _ => bad("type"),
    }
}

/// The one pattern that [`random`] uses.
fn is_code(text: &str) -> bool {
    let Some((letters, digits)) = text.split_once('-') else {
        return false;
    };
    (2..=5).contains(&letters.len())
        && letters.bytes().all(|b| (b'a'..=b'c').contains(&b))
        && (1..=3).contains(&digits.len())
        && digits.bytes().all(|b| b.is_ascii_digit())
}
