//! Grammars of the formats of calls: for calls that are forced from the output's beginning, and for
//! those of strict tools from their mark on.
//!
//! The mark that opens calls, and what stands behind it up to the last mark of a block, are those
//! of the form ([`super::forms`]), as its chat template has them.

use rocmforge_grammar::{Notation, Piece};
use serde_json::{Map, Value, json};

use super::forms::{Form, Headers, of};
use super::hermes::{CLOSE, OPEN};
use super::typed::Parameters;

/// A tool whose calls are constrained to a schema.
#[derive(Debug, Clone)]
pub struct Function<'v> {
    /// Name of the tool, as a call writes it.
    pub name: &'v str,
    /// JSON schema of the arguments, an object.
    pub schema: Value,
}

/// The grammar of calls in an output.
#[derive(Debug)]
pub struct Shape {
    /// Text before a block of calls.
    pub open: String,
    /// Grammar of a block of calls after that text.
    pub block: Piece,
    /// Grammar between two blocks, if there may be several.
    pub between: Option<Piece>,
    /// Whether calls are the whole output.
    pub at_start: bool,
    /// Whether the output ends after a call.
    pub then_ends: bool,
}

fn text(text: impl Into<String>) -> Piece {
    Piece::Text(text.into())
}

fn mark(text: impl Into<String>) -> Piece {
    Piece::Mark(text.into())
}

fn all(pieces: Vec<Piece>) -> Piece {
    Piece::All(pieces)
}

fn any(functions: &[Function<'_>], one: impl Fn(&Function<'_>) -> Piece) -> Piece {
    let named = |function: &Function<'_>| {
        Piece::Named(format!("tool '{}'", function.name), Box::new(one(function)))
    };
    Piece::Any(functions.iter().map(named).collect())
}

/// The grammar of one item, or of several with `between` in between.
fn several(one: Piece, between: Piece, may_be_several: bool) -> Piece {
    match may_be_several {
        true => Piece::Several(Box::new(one), Box::new(between)),
        false => one,
    }
}

/// The grammar of a JSON object's key with the colon after it.
fn key(name: &str) -> Vec<Piece> {
    vec![
        text(Value::from(name).to_string()),
        Piece::Space,
        text(":"),
        Piece::Space,
    ]
}

/// The grammar of `{"name": "f", "arguments": {...}}`, with a form's keys.
fn object(function: &Function<'_>, name: &str, arguments: &str) -> Piece {
    all(vec![text("{"), rest_of_object(function, name, arguments)])
}

/// The grammar of such an object after the text before its first key.
fn rest_of_object(function: &Function<'_>, name: &str, arguments: &str) -> Piece {
    let called = text(Value::from(function.name).to_string());
    let mut pieces = vec![Piece::Space];
    pieces.extend(key(name));
    pieces.extend([called, Piece::Space, text(","), Piece::Space]);
    pieces.extend(key(arguments));
    pieces.extend([
        Piece::Json(function.schema.clone()),
        Piece::Space,
        text("}"),
    ]);
    all(pieces)
}

/// The grammar of a JSON list of such objects.
fn list(functions: &[Function<'_>], name: &str, arguments: &str, more: bool) -> Piece {
    in_list(
        any(functions, |function| object(function, name, arguments)),
        more,
    )
}

/// The grammar of a JSON list of one item, or several.
fn in_list(one: Piece, more: bool) -> Piece {
    let comma = all(vec![text(","), Piece::Space]);
    let calls = several(one, comma, more);
    all(vec![
        text("["),
        Piece::Space,
        calls,
        Piece::Space,
        text("]"),
    ])
}

/// The grammar in which a template's models write one or several calls of these functions.
pub fn shape(source: &str, functions: &[Function<'_>], more: bool) -> Option<Shape> {
    if let Some(headers) = Headers::of(source) {
        return Some(of_headers(headers, functions, more));
    }
    let form = of(source)?;
    let block = block(form, source, functions, more);
    let has_blocks = matches!(form.open, OPEN | "<seed:tool_call>" | "<|tool_call>");
    let is_named = form.open == "[TOOL_CALLS]" && is_named(source);
    let between = match (more, is_named) {
        (true, false) if has_blocks => Some(Piece::Space),
        (true, true) => Some(text("")),
        _ => None,
    };
    let open = match form.open {
        // Its calls are all of an output.
        "" => "{".to_owned(),
        open => open.to_owned(),
    };
    Some(Shape {
        open,
        block,
        between,
        at_start: form.open.is_empty(),
        then_ends: false,
    })
}

/// Whether Mistral's template writes a name before each call's arguments.
fn is_named(source: &str) -> bool {
    source.contains("[ARGS]") || !source.contains("\"arguments\"")
}

/// The grammar of a block of calls after its mark.
fn block(form: Form, source: &str, functions: &[Function<'_>], more: bool) -> Piece {
    let close = || mark(form.close);
    let objects = || list(functions, "name", "arguments", more);
    match form.open {
        "<|tool_call>" => all(vec![any(functions, gemma), close()]),
        "<|tool_calls_section_begin|>" => {
            all(vec![several(any(functions, kimi), text(""), more), close()])
        }
        "<｜DSML｜function_calls>" => invokes(functions, "｜DSML｜", form.close, more),
        "<｜tool▁calls▁begin｜>" => {
            let is_fenced = source.contains("```json");
            let one = any(functions, |function| deepseek(function, is_fenced));
            all(vec![several(one, Piece::Space, more), close()])
        }
        "<minimax:tool_call>" => invokes(functions, "", form.close, more),
        "<|START_ACTION|>" => all(vec![
            Piece::Space,
            in_list(any(functions, cohere), more),
            Piece::Space,
            close(),
        ]),
        "<|tool_call_start|>" => {
            let comma = all(vec![text(","), Piece::Space]);
            let calls = several(any(functions, python), comma, more);
            all(vec![text("["), calls, text("]"), close()])
        }
        "<TOOLCALL>" | "<tool_calls>" => all(vec![Piece::Space, objects(), Piece::Space, close()]),
        "<|tool_call|>" => all(vec![Piece::Space, objects()]),
        "<|function_call|>" => {
            let one = any(functions, |function| object(function, "name", "arguments"));
            all(vec![Piece::Space, one])
        }
        "[TOOL_CALLS]" if is_named(source) => {
            let args = if source.contains("[ARGS]") {
                "[ARGS]"
            } else {
                ""
            };
            let one = any(functions, |function| {
                let json = Piece::Json(function.schema.clone());
                all(vec![text(function.name), mark(args), json])
            });
            all(vec![Piece::Space, one])
        }
        "[TOOL_CALLS]" => all(vec![Piece::Space, objects()]),
        // What opens it has the object's brace.
        "" => any(functions, |function| {
            rest_of_object(function, "name", "parameters")
        }),
        _ if form.open == OPEN && source.contains("<arg_key>") => all(vec![
            any(functions, keys_and_values),
            Piece::Space,
            mark(CLOSE),
        ]),
        _ if form.open != OPEN || source.contains("<function=") => {
            all(vec![any(functions, tagged), Piece::Space, close()])
        }
        _ => {
            let one = any(functions, |function| object(function, "name", "arguments"));
            all(vec![Piece::Space, one, Piece::Space, close()])
        }
    }
}

/// The grammar of Gemma 4's calls: `call:f{a:1}`.
fn gemma(function: &Function<'_>) -> Piece {
    let value = Piece::Value(function.schema.clone(), Notation::Gemma);
    all(vec![text(format!("call:{}", function.name)), value])
}

/// The grammar of a call in Python's notation: `f(a=1)`.
fn python(function: &Function<'_>) -> Piece {
    let arguments = Piece::Arguments(function.schema.clone());
    let open = text(format!("{}(", function.name));
    all(vec![open, arguments, text(")")])
}

/// The grammar of Kimi K2's calls: `functions.f:0` and JSON, each between marks.
fn kimi(function: &Function<'_>) -> Piece {
    all(vec![
        mark("<|tool_call_begin|>"),
        text(format!("functions.{}:", function.name)),
        Piece::Pattern("[0-9]{1,4}"),
        mark("<|tool_call_argument_begin|>"),
        Piece::Json(function.schema.clone()),
        mark("<|tool_call_end|>"),
    ])
}

/// The grammar of DeepSeek's calls: a name and JSON between marks, optionally in a fence.
fn deepseek(function: &Function<'_>, is_fenced: bool) -> Piece {
    let json = Piece::Json(function.schema.clone());
    let mut pieces = vec![mark("<｜tool▁call▁begin｜>")];
    pieces.extend(match is_fenced {
        true => vec![
            text("function"),
            mark("<｜tool▁sep｜>"),
            text(format!("{}\n```json\n", function.name)),
            json,
            text("\n```"),
        ],
        false => vec![text(function.name), mark("<｜tool▁sep｜>"), json],
    });
    pieces.push(mark("<｜tool▁call▁end｜>"));
    all(pieces)
}

/// The grammar of Cohere's calls: `{"tool_call_id": "0", "tool_name": "f", "parameters": {...}}`.
fn cohere(function: &Function<'_>) -> Piece {
    let mut pieces = vec![text("{"), Piece::Space];
    pieces.extend(key("tool_call_id"));
    pieces.extend([text("\""), Piece::Pattern("[0-9]{1,4}"), text("\"")]);
    pieces.extend([
        text(","),
        rest_of_object(function, "tool_name", "parameters"),
    ]);
    all(pieces)
}

/// The grammar of GLM's calls: `f<arg_key>a</arg_key><arg_value>1</arg_value>`.
fn keys_and_values(function: &Function<'_>) -> Piece {
    let tags = Tags {
        open: "<arg_key>",
        named: "</arg_key>",
        value: "<arg_value>",
        close: "</arg_value>",
    };
    let name = text(function.name);
    all(vec![
        Piece::Space,
        name,
        Piece::Space,
        tags.parameters(function),
    ])
}

/// The grammar of Qwen 3 Coder's calls: `<function=f><parameter=a>1</parameter></function>`.
fn tagged(function: &Function<'_>) -> Piece {
    let tags = Tags {
        open: "<parameter=",
        named: ">",
        value: "",
        close: "</parameter>",
    };
    all(vec![
        Piece::Space,
        text(format!("<function={}>", function.name)),
        Piece::Space,
        tags.parameters(function),
        text("</function>"),
    ])
}

fn of_headers(headers: Headers, functions: &[Function<'_>], more: bool) -> Shape {
    match headers {
        Headers::Channels => {
            let block = any(functions, |function| {
                all(vec![
                    text(function.name),
                    Piece::Space,
                    Piece::Optional(Box::new(mark("<|channel|>commentary"))),
                    Piece::Space,
                    Piece::Optional(Box::new(mark("<|constrain|>"))),
                    Piece::Optional(Box::new(text("json"))),
                    mark("<|message|>"),
                    Piece::Json(function.schema.clone()),
                ])
            });
            Shape {
                open: "to=functions.".to_owned(),
                block,
                between: None,
                at_start: false,
                then_ends: true,
            }
        }
        Headers::Recipients => Shape {
            open: "<atem:function_calls>".to_owned(),
            block: invokes(functions, "atem:", "</atem:function_calls>", more),
            between: None,
            at_start: false,
            then_ends: true,
        },
    }
}

/// The grammar of `<invoke name="f"><parameter name="a">1</parameter></invoke>`, with a prefix in
/// each tag.
fn invokes(functions: &[Function<'_>], prefix: &str, close: &str, more: bool) -> Piece {
    let says_text = prefix == "｜DSML｜";
    let one = any(functions, |function| {
        let parameter = format!("<{prefix}parameter name=\"");
        let end = format!("</{prefix}parameter>");
        let each = function.parameters(|name, is_text| {
            let attribute = match (says_text, is_text) {
                (false, _) => "",
                (true, true) => " string=\"true\"",
                (true, false) => " string=\"false\"",
            };
            (
                mark(format!("{parameter}{name}\"{attribute}>")),
                end.clone(),
            )
        });
        all(vec![
            mark(format!("<{prefix}invoke name=\"{}\">", function.name)),
            Piece::Space,
            each,
            mark(format!("</{prefix}invoke>")),
        ])
    });
    all(vec![
        Piece::Space,
        several(one, Piece::Space, more),
        Piece::Space,
        mark(close),
    ])
}

/// The texts around a parameter's name and its value.
struct Tags {
    open: &'static str,
    named: &'static str,
    value: &'static str,
    close: &'static str,
}

impl Tags {
    fn parameters(&self, function: &Function<'_>) -> Piece {
        function.parameters(|name, _| {
            let mut pieces = vec![text(format!("{}{name}{}", self.open, self.named))];
            if !self.value.is_empty() {
                pieces.extend([Piece::Space, text(self.value)]);
            }
            (all(pieces), self.close.to_owned())
        })
    }
}

impl Function<'_> {
    /// The parameters of the function in the order of the schema, each behind what `around` has in
    /// front of it and up to what it has behind. A text is constrained only to listed values:
    /// others stand as they are up to the closing tag.
    fn parameters(&self, around: impl Fn(&str, bool) -> (Piece, String)) -> Piece {
        let none = Map::new();
        let properties = self.schema["properties"].as_object().unwrap_or(&none);
        let described = [super::described(self.name, None, &self.schema)];
        let kinds = Parameters::of(self.name, &described);
        let mut pieces = Vec::new();
        for (name, schema) in properties {
            let is_text = kinds.is_some_and(|kinds| kinds.may_be_text(name));
            let (before, after) = around(name, is_text);
            let value = match (is_text, self.listed(schema)) {
                (false, _) => {
                    let value = Piece::Json(self.with_definitions(schema));
                    all(vec![Piece::Space, value, Piece::Space, mark(after)])
                }
                (true, Some(words)) => {
                    // Other space would be the value's.
                    let line = || Piece::Optional(Box::new(text("\n")));
                    let words = words.into_iter().map(text).collect();
                    all(vec![line(), Piece::Any(words), line(), mark(after)])
                }
                (true, None) => Piece::Until(after),
            };
            let one = all(vec![before, value, Piece::Space]);
            let mut required = self.schema["required"].as_array().into_iter().flatten();
            pieces.push(match required.any(|needed| needed == name) {
                true => one,
                false => Piece::Optional(Box::new(one)),
            });
        }
        all(pieces)
    }

    /// The strings that a parameter's schema lists, if it allows no others.
    fn listed(&self, schema: &Value) -> Option<Vec<String>> {
        let place = schema["$ref"]
            .as_str()
            .and_then(|place| place.strip_prefix('#'));
        let schema = place
            .and_then(|place| self.schema.pointer(place))
            .unwrap_or(schema);
        let values = match (schema.get("const"), &schema["enum"]) {
            (Some(one), _) => vec![one.clone()],
            (None, Value::Array(list)) => list.clone(),
            _ => return None,
        };
        values
            .iter()
            .map(|value| value.as_str().map(str::to_owned))
            .collect()
    }

    /// A parameter's schema as a document of its own, with the definitions that it refers to.
    fn with_definitions(&self, schema: &Value) -> Value {
        let Value::Object(members) = schema else {
            return schema.clone();
        };
        let mut members = members.clone();
        for name in ["$defs", "definitions"] {
            if let Some(definitions) = self.schema.get(name) {
                members.entry(name).or_insert_with(|| definitions.clone());
            }
        }
        members.into()
    }
}

/// The schema of a tool's arguments; always an object.
pub fn arguments_of(function: &Value, is_held: bool) -> Value {
    match &function["parameters"] {
        Value::Object(schema) if is_held && !schema.is_empty() => {
            let mut schema = schema.clone();
            if schema.get("type").is_none_or(Value::is_null) {
                schema.insert("type".to_owned(), "object".into());
            }
            schema.into()
        }
        _ => json!({"type": "object"}),
    }
}
