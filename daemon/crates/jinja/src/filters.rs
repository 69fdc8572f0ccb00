//! Filters.

mod lists;
mod numbers;
mod pretty;
mod texts;
mod wrap;

use std::rc::Rc;

use crate::access;
use crate::args::{self, Args};
use crate::fault::{R, fail};
use crate::html;
use crate::json;
use crate::operators::sized;
use crate::printf;
use crate::repr;
use crate::run::Run;
use crate::value::{Dict, Value};

/// The names of all filters.
pub(crate) const NAMES: [&str; 53] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "filesizeformat",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "pprint",
    "random",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "striptags",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "wordcount",
    "wordwrap",
    "xmlattr",
];

/// Whether there is a filter of this name.
pub(crate) fn is_known(name: &str) -> bool {
    NAMES.contains(&name)
}

/// Applies a filter.
///
/// # Errors
///
/// If there is no such filter, or it cannot be applied to this value or with these arguments.
pub(crate) fn apply(run: &Run<'_>, name: &str, value: Value, args: Args) -> R<Value> {
    run.step()?;
    match name {
        "batch" | "slice" | "first" | "last" | "random" | "groupby" | "list" | "reverse"
        | "sort" | "sum" | "unique" | "min" | "max" | "map" | "select" | "reject"
        | "selectattr" | "rejectattr" | "join" | "items" | "dictsort" => {
            lists::apply(run, name, &value, args)
        }
        "abs" | "int" | "float" | "round" | "filesizeformat" => numbers::apply(name, &value, args),
        "capitalize" | "center" | "indent" | "lower" | "replace" | "title" | "trim"
        | "truncate" | "upper" | "wordcount" => texts::apply(name, &value, args),
        "wordwrap" => wrap::word_wrap(&value, args),
        "pprint" => {
            let [_] = args.bind(name, ["verbose"], 0)?;
            pretty::pretty(&value).map(Value::from)
        }
        "tojson" => json::to_json(run.host, &value, args).map(Value::from),
        "default" | "d" => {
            let [default, boolean] = args.bind(name, ["default_value", "boolean"], 0)?;
            let is_missing =
                value.is_undefined() || args::flag(boolean.as_ref()) && !value.is_true();
            Ok(match is_missing {
                true => default.unwrap_or_else(|| Value::text("")),
                false => value,
            })
        }
        "attr" => {
            let given = args.only(name, 1, 1)?;
            let name: Rc<str> = args::text(&given[0])?.into();
            match &value {
                Value::Dict(_) => {
                    let bare = Value::dict(Dict::default());
                    match access::attribute(run, &bare, &name)? {
                        Value::Bound(_) => access::attribute(run, &value, &name),
                        missing => Ok(missing),
                    }
                }
                other => access::attribute(run, other, &name),
            }
        }
        "format" => {
            let text = repr::text(&value)?;
            if args.named.is_empty() {
                return printf::printf(&text, &Value::tuple(args.positional)).map(Value::from);
            }
            if !args.positional.is_empty() {
                return fail("can't handle positional and keyword arguments at the same time");
            }
            let mut members = Dict::default();
            for (name, value) in args.named {
                members.insert_str(&name, value);
            }
            printf::printf(&text, &Value::dict(members)).map(Value::from)
        }
        "xmlattr" => {
            let [spaced] = args.bind(name, ["autospace"], 0)?;
            let spaced = spaced.is_none_or(|spaced| spaced.is_true());
            html::attributes(run.host, &value, spaced).map(|text| run.markup(text))
        }
        _ => {
            args.none(name)?;
            plain(run, name, value)
        }
    }
}

/// A filter without arguments.
fn plain(run: &Run<'_>, name: &str, value: Value) -> R<Value> {
    match name {
        "length" | "count" => match value.len() {
            Some(n) => Ok(Value::count(n)),
            None => match &value {
                Value::Loop(it) => run.loop_length(it).map(Value::Int),
                other => fail(format!(
                    "object of type '{}' has no len()",
                    other.type_name()
                )),
            },
        },
        "string" => Ok(match value {
            Value::Str(_) => value,
            other => Value::text(repr::text(&other)?),
        }),
        "safe" => Ok(Value::safe(repr::text(&value)?)),
        "escape" | "e" => html::escape(run.host, &value),
        "forceescape" => Ok(Value::safe(html::escaped(run.host, &repr::text(&value)?))),
        "striptags" => Ok(Value::from(html::strip_tags(&repr::text(&value)?))),
        "urlencode" => html::url_encode(&value),
        _ => fail(format!("No filter named '{name}'.")),
    }
}

/// The member of an item that filters go by: names with dots between them, or a number.
pub(crate) fn member(run: &Run<'_>, item: &Value, attribute: &Value) -> R<Value> {
    let Value::Str(path) = attribute else {
        return access::item(run, item, attribute);
    };
    let mut item = item.clone();
    for part in path.text.split('.') {
        let is_number = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        let key = match part.parse() {
            Ok(at) if is_number => Value::Int(at),
            _ => Value::text(part),
        };
        item = access::item(run, &item, &key)?;
    }
    Ok(item)
}

/// A list of so many items, within what a value may have.
pub(crate) fn bounded(items: Vec<Value>) -> R<Vec<Value>> {
    sized(items.len())?;
    Ok(items)
}
