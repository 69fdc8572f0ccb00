//! Converts parameters that are written without quotation marks to values, by the types in the
//! tool's schema.

use serde_json::Value;

use super::python;

/// Maximum number of schemas examined for one value; beyond that anything is allowed.
const SCHEMAS_MAX: usize = 256;
/// Maximum nesting of schemas, including references.
const NESTING_MAX: usize = 16;

/// Maximum length of a number if text is allowed, too: longer ones are text.
const NUMBER_MAX_BYTES: usize = 64;
/// White space in JSON.
const SPACE: [char; 4] = [' ', '\t', '\n', '\r'];

/// A set of JSON types, one bit each.
type Kinds = u8;
const TEXT: Kinds = 1;
const NUMBER: Kinds = 2;
const TRUTH: Kinds = 4;
const NULL: Kinds = 8;
const LIST: Kinds = 16;
const OBJECT: Kinds = 32;
const ANY: Kinds = 63;

/// The types of a tool's parameters, from its schema.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parameters<'v>(&'v Value);

impl<'v> Parameters<'v> {
    /// The parameter types of the tool of this name; `None` if there is no such tool.
    pub(super) fn of(name: &str, tools: &'v [Value]) -> Option<Self> {
        let mut functions = tools.iter().map(|tool| &tool["function"]);
        let function = functions.find(|function| function["name"] == name)?;
        Some(Self(&function["parameters"]))
    }

    /// The parameter types of a tool without a schema.
    pub(super) fn unknown() -> Self {
        Self(&Value::Null)
    }

    /// Whether the tool has a parameter of this name.
    pub(super) fn has(self, key: &str) -> bool {
        self.0["properties"].get(key).is_some()
    }

    /// The value of a parameter from its text: JSON of a type that the schema allows, else text if
    /// that is allowed.
    pub(super) fn value(self, key: &str, text: &str) -> Value {
        let allowed = self.kinds(key);
        let is_text = allowed & TEXT != 0;
        let json = serde_json::from_str(text).ok();
        // Models that learnt from code write `True` and `['a']` where no text is wanted.
        let literal = || (!is_text).then(|| python::literal(text)).flatten();
        match json.or_else(literal) {
            // Text has no quotation marks around it where the schema says that it is text.
            Some(Value::String(_)) if is_text && allowed != ANY => text.into(),
            Some(Value::Number(_))
                if is_text && text.trim_matches(SPACE).len() > NUMBER_MAX_BYTES =>
            {
                text.into()
            }
            Some(value) if kind(&value) & allowed != 0 || !is_text => value,
            _ => text.into(),
        }
    }

    /// Whether a parameter's value that begins with `begun` is text however it goes on.
    pub(super) fn is_text(self, key: &str, begun: &str) -> bool {
        let allowed = self.kinds(key);
        // Quotation marks are a part of what can only be text.
        let others = if allowed == ANY { ANY } else { allowed & !TEXT };
        allowed & TEXT != 0 && others & json_of(begun) == 0
    }

    /// Whether a parameter may be text.
    pub(super) fn may_be_text(self, key: &str) -> bool {
        self.kinds(key) & TEXT != 0
    }

    /// The names of all parameters.
    pub(super) fn names(self) -> impl Iterator<Item = &'v str> {
        let properties = self.0["properties"].as_object();
        properties
            .into_iter()
            .flat_map(|all| all.keys())
            .map(String::as_str)
    }

    fn kinds(self, key: &str) -> Kinds {
        let mut left = SCHEMAS_MAX;
        match self.of_schema(&self.0["properties"][key], NESTING_MAX, &mut left) {
            // What allows nothing is no schema.
            0 => ANY,
            kinds => kinds,
        }
    }

    fn of_schema(self, schema: &Value, depth: usize, left: &mut usize) -> Kinds {
        let Some(members) = schema.as_object().filter(|_| depth > 0 && *left > 0) else {
            return ANY;
        };
        *left -= 1;
        let mut kinds = ANY;
        for (word, said) in members {
            let list = said.as_array().map_or(&[][..], Vec::as_slice);
            kinds &= match word.as_str() {
                "type" => match said {
                    Value::Array(list) => list.iter().map(named).fold(0, |a, b| a | b),
                    name => named(name),
                },
                "enum" => list.iter().map(kind).fold(0, |a, b| a | b),
                "const" => kind(said),
                "anyOf" | "oneOf" => list
                    .iter()
                    .map(|one| self.of_schema(one, depth - 1, left))
                    .fold(0, |a, b| a | b),
                "allOf" => list
                    .iter()
                    .map(|one| self.of_schema(one, depth - 1, left))
                    .fold(ANY, |a, b| a & b),
                "$ref" => {
                    let place = said.as_str().and_then(|place| place.strip_prefix('#'));
                    let found = place.and_then(|place| self.0.pointer(place));
                    found.map_or(ANY, |one| self.of_schema(one, depth - 1, left))
                }
                _ => ANY,
            };
        }
        kinds
    }
}

/// The kind that a schema's `type` names.
fn named(name: &Value) -> Kinds {
    match name.as_str() {
        Some("string") => TEXT,
        Some("number" | "integer") => NUMBER,
        Some("boolean") => TRUTH,
        Some("null") => NULL,
        Some("array") => LIST,
        Some("object") => OBJECT,
        _ => ANY,
    }
}

/// The JSON types that a text beginning with `begun` may have.
fn json_of(begun: &str) -> Kinds {
    let text = begun.trim_start_matches(SPACE);
    let may_be = |word: &str| word.starts_with(text) || text.trim_end_matches(SPACE) == word;
    let of_number = |c: char| c.is_ascii_digit() || "+-.eE".contains(c) || SPACE.contains(&c);
    let (kind, may_be) = match text.chars().next() {
        None => return ANY,
        Some('"') => (TEXT, true),
        Some('{') => (OBJECT, true),
        Some('[') => (LIST, true),
        Some('t') => (TRUTH, may_be("true")),
        Some('f') => (TRUTH, may_be("false")),
        Some('n') => (NULL, may_be("null")),
        Some('-' | '0'..='9') => {
            let may_be = text.len() <= NUMBER_MAX_BYTES && text.chars().all(of_number);
            (NUMBER, may_be)
        }
        Some(_) => return 0,
    };
    if may_be { kind } else { 0 }
}

fn kind(value: &Value) -> Kinds {
    match value {
        Value::String(_) => TEXT,
        Value::Number(_) => NUMBER,
        Value::Bool(_) => TRUTH,
        Value::Null => NULL,
        Value::Array(_) => LIST,
        Value::Object(_) => OBJECT,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::described;
    use super::*;

    fn value(schema: &Value, text: &str) -> Value {
        let parameters = json!({
            "properties": {"a": schema},
            "$defs": {"Size": {"enum": ["1", "2"]}, "Loop": {"$ref": "#/$defs/Loop"}},
        });
        let tools = [described("f", None, &parameters)];
        Parameters::of("f", &tools).unwrap().value("a", text)
    }

    #[test]
    fn text_stays_text_where_the_schema_allows_it() {
        let nullable = json!({"anyOf": [{"type": "string"}, {"type": "null"}]});
        let listed = json!({"type": ["string", "null"]});
        let words = json!({"enum": ["1", "2", "true", "null"]});
        let referred = json!({"$ref": "#/$defs/Size"});
        for schema in [&json!({"type": "string"}), &nullable, &listed, &words] {
            for text in ["12", "007e2", "true", "[1]", "\"x\"", "True", "x"] {
                assert_eq!(value(schema, text), text, "{schema}");
            }
        }
        for schema in [&json!({"type": "string"}), &words] {
            assert_eq!(value(schema, "null"), "null");
        }
        // What may be null is null, as there is no other way to write it.
        for schema in [&nullable, &listed] {
            assert_eq!(value(schema, "null"), Value::Null);
        }
        assert_eq!(value(&referred, "1"), "1");
        let all = json!({"allOf": [{"$ref": "#/$defs/Size"}], "description": "A size."});
        assert_eq!(value(&all, "2"), "2");
    }

    #[test]
    fn other_values_are_json_of_their_kind() {
        for (schema, text, expected) in [
            (json!({"type": "integer"}), "12", json!(12)),
            (json!({"type": ["string", "integer"]}), "12", json!(12)),
            (
                json!({"type": ["string", "integer"]}),
                "true",
                json!("true"),
            ),
            (json!({"type": "boolean"}), "True", json!(true)),
            (json!({"type": "boolean"}), "False", json!(false)),
            (json!({"type": ["boolean", "null"]}), "None", Value::Null),
            (json!({"type": "array"}), "['a', True]", json!(["a", true])),
            (json!({"type": "integer"}), "twelve", json!("twelve")),
            (json!({"enum": [1, "b"]}), "1", json!(1)),
            (json!({"enum": [1, "b"]}), "b", json!("b")),
            (json!({}), "12", json!(12)),
            (
                json!({"type": ["string", "number"]}),
                &"1".repeat(65),
                json!("1".repeat(65)),
            ),
            (json!({}), "\"x\"", json!("x")),
            (json!({}), "True", json!("True")),
            (json!({"$ref": "#/$defs/Loop"}), "12", json!(12)),
            (json!({"$ref": "#/$defs/None"}), "12", json!(12)),
        ] {
            assert_eq!(value(&schema, text), expected, "{schema}");
        }
    }

    #[test]
    fn schemas_that_refer_to_each_other_take_no_time() {
        let wide = json!({"anyOf": vec![json!({"$ref": "#/properties/a"}); 100]});
        assert_eq!(value(&wide, "12"), 12);
    }
}
