//! Constrained output, in the fields of each dialect.

use rocmforge_chat::format::Format;
use rocmforge_failure::{self as failure, Failure};
use rocmforge_grammar::Grammar;
use serde::Deserialize;
use serde_json::Value;

use super::sampling::says_something;

/// The first line by which llama-server recognizes a grammar in llguidance's Lark; others are GBNF.
const LARK_MARK: &str = "%llguidance";
/// Text that every GBNF grammar contains, and no Lark grammar outside of its strings.
const GBNF_MARK: &str = "::=";

/// Format fields of OpenAI's chat and completion requests, including those of llama-server and
/// vLLM.
#[derive(Debug, Default, Deserialize)]
pub(super) struct WireFormat {
    response_format: Option<Value>,
    json_schema: Option<Value>,
    grammar: Option<Value>,
    structured_outputs: Option<Value>,
    guided_json: Option<Value>,
    guided_regex: Option<Value>,
    guided_choice: Option<Value>,
    guided_grammar: Option<Value>,
}

impl WireFormat {
    /// The format that the fields ask for; an error if there are several.
    pub(super) fn format(self) -> Result<Option<Format>, Failure> {
        let named = [
            of_response(self.response_format.as_ref())?,
            schema(self.json_schema),
            grammar(self.grammar.as_ref(), "grammar")?,
            guided("json", self.guided_json.as_ref(), "guided_json")?,
            guided("regex", self.guided_regex.as_ref(), "guided_regex")?,
            guided("choice", self.guided_choice.as_ref(), "guided_choice")?,
            guided("grammar", self.guided_grammar.as_ref(), "guided_grammar")?,
            structured(self.structured_outputs.as_ref())?,
        ];
        let mut named = named.into_iter().flatten();
        let first = named.next();
        match (&first, named.next()) {
            (Some(first), Some(second)) => Err(failure::invalid(
                second.field,
                &format!(
                    "the output is constrained to {} already; give one format",
                    first.field
                ),
            )),
            _ => Ok(first),
        }
    }
}

/// The format of OpenAI's `response_format`: `{"type": "json_schema", "json_schema": {"schema":
/// {...}}}`.
fn of_response(format: Option<&Value>) -> Result<Option<Format>, Failure> {
    const FIELD: &str = "response_format";
    let Some(format) = format.filter(|format| says_something(Some(format))) else {
        return Ok(None);
    };
    if !format.is_object() {
        let message = format!(
            "{format} is no object; give one with a type, as {{\"type\": \"json_object\"}}"
        );
        return Err(failure::invalid(FIELD, &message));
    }
    of_kind(&format["type"], described(format), FIELD)
}

/// The schema object of a format: below `json_schema` in chat completions, beside the type
/// elsewhere. Clients send either to both.
fn described(format: &Value) -> &Value {
    match &format["json_schema"]["schema"] {
        Value::Null => &format["schema"],
        schema => schema,
    }
}

/// The format of `text.format` in OpenAI's responses: `{"type": "json_schema", "schema": {...}}`.
pub(super) fn of_responses(text: Option<&Value>) -> Result<Option<Format>, Failure> {
    let format = text.map(|text| &text["format"]);
    let Some(format) = format.filter(|format| says_something(Some(format))) else {
        return Ok(None);
    };
    of_kind(&format["type"], described(format), "text.format")
}

/// The format of Anthropic's `output_config.format`, or the older `output_format`.
pub(super) fn of_messages(
    config: Option<&Value>,
    before: Option<&Value>,
) -> Result<Option<Format>, Failure> {
    let config = config.map(|config| &config["format"]);
    for (format, field) in [(config, "output_config.format"), (before, "output_format")] {
        if let Some(format) = format.filter(|format| says_something(Some(format))) {
            return of_kind(&format["type"], described(format), field);
        }
    }
    Ok(None)
}

fn of_kind(
    kind: &Value,
    described: &Value,
    field: &'static str,
) -> Result<Option<Format>, Failure> {
    let grammar = match (kind.as_str(), described) {
        (Some("text"), _) => return Ok(None),
        (Some("json_object"), Value::Null) => Grammar::JsonObject,
        (Some("json_object" | "json_schema"), Value::Object(_) | Value::Bool(_)) => {
            Grammar::JsonSchema(described.clone())
        }
        (Some("json_schema"), _) => {
            let message = "it has no schema; give one, an object";
            return Err(failure::invalid(field, message));
        }
        _ => {
            let message = format!("{kind} is no type here; give text, json_object or json_schema");
            return Err(failure::invalid(field, &message));
        }
    };
    Ok(Some(Format::new(grammar, field)))
}

fn schema(schema: Option<Value>) -> Option<Format> {
    let schema = schema.filter(|schema| !schema.is_null())?;
    Some(Format::new(Grammar::JsonSchema(schema), "json_schema"))
}

/// A grammar in GBNF, or in Lark if it begins with [`LARK_MARK`], as for llama-server, or if the
/// field is not llama-server's `grammar` and the text has no [`GBNF_MARK`].
fn grammar(grammar: Option<&Value>, field: &'static str) -> Result<Option<Format>, Failure> {
    let text = match grammar {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) if text.is_empty() => return Ok(None),
        Some(Value::String(text)) => text.clone(),
        Some(_) => return Err(failure::invalid(field, "give a text")),
    };
    let is_lark =
        text.trim_start().starts_with(LARK_MARK) || field != "grammar" && !text.contains(GBNF_MARK);
    let grammar = match is_lark {
        true => Grammar::Lark(text),
        false => Grammar::Gbnf(text),
    };
    Ok(Some(Format::new(grammar, field)))
}

/// The format of vLLM's `structured_outputs`: an object with one kind of constraint.
fn structured(wanted: Option<&Value>) -> Result<Option<Format>, Failure> {
    const FIELD: &str = "structured_outputs";
    const KINDS: [&str; 5] = ["json", "json_object", "regex", "choice", "grammar"];
    let Some(wanted) = wanted.filter(|wanted| says_something(Some(wanted))) else {
        return Ok(None);
    };
    let mut kinds = KINDS
        .into_iter()
        .filter(|kind| says_something(wanted.get(*kind)));
    match (kinds.next(), kinds.next()) {
        (Some(kind), None) => guided(kind, wanted.get(kind), FIELD),
        _ => {
            let message = format!("give exactly one of {}", KINDS.join(", "));
            Err(failure::invalid(FIELD, &message))
        }
    }
}

fn guided(
    kind: &str,
    value: Option<&Value>,
    field: &'static str,
) -> Result<Option<Format>, Failure> {
    let Some(value) = value.filter(|value| says_something(Some(value))) else {
        return Ok(None);
    };
    let grammar = match (kind, value) {
        ("json_object", _) => Grammar::JsonObject,
        ("json", Value::String(text)) => return Format::of_schema_text(text, field).map(Some),
        ("json", schema) => Grammar::JsonSchema(schema.clone()),
        ("regex", Value::String(text)) => Grammar::Regex(text.clone()),
        ("choice", Value::Array(list)) if list.iter().all(Value::is_string) => {
            // A text in JSON's spelling is one in Lark's.
            let texts: Vec<String> = list.iter().map(Value::to_string).collect();
            Grammar::Lark(format!("start: {}", texts.join(" | ")))
        }
        ("grammar", grammar_text) => return grammar(Some(grammar_text), field),
        _ => {
            return Err(failure::invalid(
                field,
                "give a text, or for a choice a list of texts",
            ));
        }
    };
    Ok(Some(Format::new(grammar, field)))
}

/// The format of Ollama's `format`: "json", or a schema.
pub(super) fn of_ollama(format: Option<Value>) -> Result<Option<Format>, Failure> {
    let grammar = match format {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(word)) if word.is_empty() => return Ok(None),
        Some(Value::String(word)) if word == "json" => Grammar::JsonObject,
        Some(schema @ Value::Object(_)) => Grammar::JsonSchema(schema),
        Some(_) => {
            let message = "give \"json\", or a JSON schema";
            return Err(failure::invalid("format", message));
        }
    };
    Ok(Some(Format::new(grammar, "format")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn grammar_of(format: Result<Option<Format>, Failure>) -> Option<Grammar> {
        format.unwrap().map(|format| format.grammar)
    }

    fn field_of(format: Result<Option<Format>, Failure>) -> String {
        format.unwrap_err().fields()[0].0.clone()
    }

    fn wire(value: Value) -> Result<Option<Format>, Failure> {
        serde_json::from_value::<WireFormat>(value)
            .unwrap()
            .format()
    }

    #[test]
    fn each_dialect_says_it_its_own_way() {
        let schema = json!({"type": "object"});
        let held = Some(Grammar::JsonSchema(schema.clone()));
        let chat = json!({"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": schema}});
        let flat = json!({"type": "json_schema", "name": "n", "schema": schema});
        assert_eq!(grammar_of(wire(json!({"response_format": chat}))), held);
        assert_eq!(grammar_of(wire(json!({"json_schema": schema}))), held);
        let beside = json!({"response_format": {"type": "json_object", "schema": schema}});
        assert_eq!(grammar_of(wire(beside)), held);
        assert_eq!(
            grammar_of(of_responses(Some(&json!({"format": flat})))),
            held
        );
        assert_eq!(
            grammar_of(of_messages(Some(&json!({"format": flat})), None)),
            held
        );
        assert_eq!(grammar_of(of_messages(None, Some(&flat))), held);
        // Clients and llama-server's documentation use the one form where the other belongs.
        assert_eq!(grammar_of(wire(json!({"response_format": flat}))), held);
        let nested = json!({"format": chat});
        assert_eq!(grammar_of(of_responses(Some(&nested))), held);
        assert_eq!(grammar_of(of_messages(Some(&nested), None)), held);
        assert_eq!(grammar_of(of_ollama(Some(schema))), held);

        let object = Some(Grammar::JsonObject);
        let wanted = json!({"response_format": {"type": "json_object"}});
        assert_eq!(grammar_of(wire(wanted)), object);
        assert_eq!(grammar_of(of_ollama(Some(json!("json")))), object);
        let lark = "%llguidance {}\nstart: \"a\"".to_owned();
        let wanted = grammar_of(wire(json!({"grammar": lark})));
        assert_eq!(wanted, Some(Grammar::Lark(lark)));

        let gbnf = "root ::= \"a\"".to_owned();
        let held = Some(Grammar::Gbnf(gbnf.clone()));
        assert_eq!(grammar_of(wire(json!({"grammar": gbnf}))), held);
        assert_eq!(grammar_of(wire(json!({"guided_grammar": gbnf}))), held);
        let within = json!({"structured_outputs": {"grammar": gbnf}});
        assert_eq!(grammar_of(wire(within)), held);
        let held = Some(Grammar::Lark("start: \"a\"".to_owned()));
        assert_eq!(
            grammar_of(wire(json!({"guided_grammar": "start: \"a\""}))),
            held
        );
        let held = Some(Grammar::Regex("a+".to_owned()));
        assert_eq!(
            grammar_of(wire(json!({"structured_outputs": {"regex": "a+"}}))),
            held
        );
        let held = Some(Grammar::Lark("start: \"a\" | \"b\\n\"".to_owned()));
        assert_eq!(
            grammar_of(wire(json!({"guided_choice": ["a", "b\n"]}))),
            held
        );

        for nothing in [
            json!({}),
            json!({"response_format": null, "grammar": ""}),
            json!({"response_format": {"type": "text"}}),
        ] {
            assert_eq!(grammar_of(wire(nothing)), None);
        }
        assert_eq!(grammar_of(of_ollama(Some(json!("")))), None);
        assert_eq!(
            grammar_of(of_responses(Some(&json!({"verbosity": "low"})))),
            None
        );
    }

    #[test]
    fn what_says_nothing_clear_is_refused_by_its_name() {
        let format = |value: Value| field_of(wire(json!({"response_format": value})));
        assert_eq!(format(json!({"type": "xml"})), "response_format");
        assert_eq!(format(json!({"type": "json_schema"})), "response_format");
        assert_eq!(format(json!("json")), "response_format");
        assert_eq!(field_of(wire(json!({"grammar": 5}))), "grammar");
        for several in [json!({}), json!({"regex": "a", "choice": ["a"]})] {
            let wanted = json!({"structured_outputs": several});
            let empty = several == json!({});
            match wire(wanted) {
                Ok(None) => assert!(empty),
                other => assert_eq!(field_of(other), "structured_outputs"),
            }
        }
        assert_eq!(
            field_of(wire(json!({"guided_choice": [1]}))),
            "guided_choice"
        );
        let both = json!({"response_format": {"type": "json_object"}, "json_schema": {}});
        assert_eq!(field_of(wire(both)), "json_schema");
        assert_eq!(field_of(of_ollama(Some(json!("yaml")))), "format");
        assert_eq!(
            field_of(of_responses(Some(&json!({"format": {"type": "grammar"}})))),
            "text.format"
        );
    }
}
