//! Filters of lists and dicts.

use std::rc::Rc;

use super::{apply as apply_filter, bounded, member};
use crate::args::{self, Args};
use crate::ast::Operator;
use crate::compare;
use crate::fault::{R, fail};
use crate::is_tests;
use crate::operators::{self, sized};
use crate::repr;
use crate::run::Run;
use crate::value::{Key, Text, Value};

const GENERATOR: &str = "generator";

/// Applies a filter of lists.
pub(super) fn apply(run: &Run<'_>, name: &str, value: &Value, args: Args) -> R<Value> {
    match name {
        "first" | "last" | "random" | "list" | "reverse" | "items" => {
            args.none(name)?;
            plain(run, name, value)
        }
        "batch" => batch(value, args),
        "slice" => slice(value, args),
        "groupby" => group_by(run, value, args),
        "sort" => sort(run, value, args),
        "sum" => sum(run, value, args),
        "unique" => unique(run, value, args),
        "min" | "max" => extreme(run, name, value, args),
        "map" => map(run, value, args),
        "join" => join(run, value, args),
        "dictsort" => dict_sort(value, args),
        _ => select(run, name, value, args),
    }
}

fn plain(run: &Run<'_>, name: &str, value: &Value) -> R<Value> {
    let empty = |what: &str| Value::undefined(format!("No {what} item, sequence was empty."));
    match name {
        "list" => Ok(Value::list(value.items()?)),
        "first" => match value {
            Value::Iter(items) => {
                let first = items.borrow_mut().rest.next();
                Ok(first.unwrap_or_else(|| empty("first")))
            }
            other => {
                let first = other.items()?.into_iter().next();
                Ok(first.unwrap_or_else(|| empty("first")))
            }
        },
        "last" => match value {
            Value::Iter(_) | Value::Loop(_) => {
                fail(format!("'{}' object is not reversible", value.type_name()))
            }
            other => Ok(other.items()?.pop().unwrap_or_else(|| empty("last"))),
        },
        "random" => {
            let items = value.items()?;
            let seed = run.seed.get();
            // A generator of Vigna's, one step.
            let next = seed ^ seed << 13;
            let next = next ^ next >> 7;
            let next = next ^ next << 17;
            run.seed.set(next);
            match items.len() {
                0 => Ok(empty("random")),
                n => Ok(items[(next % n as u64) as usize].clone()),
            }
        }
        "items" => match value {
            Value::Undefined(_) => Ok(Value::iter(Vec::new(), GENERATOR)),
            Value::Dict(dict) => {
                let dict = dict.borrow();
                let pairs = dict.iter();
                let pairs = pairs.map(|(key, value)| Value::tuple([key.clone(), value.clone()]));
                Ok(Value::iter(pairs.collect(), GENERATOR))
            }
            _ => fail("Can only get item pairs from a mapping."),
        },
        _ => match value {
            Value::Str(text) => Ok(Value::Str(Text {
                text: text.text.chars().rev().collect::<String>().into(),
                safe: text.safe,
            })),
            other => {
                let mut items = other.items()?;
                items.reverse();
                Ok(match other {
                    Value::List(_) => Value::iter(items, "list_reverseiterator"),
                    Value::Dict(_) => Value::iter(items, "dict_reversekeyiterator"),
                    Value::Tuple(_) => Value::iter(items, "reversed"),
                    Value::Range(_) => Value::iter(items, "range_iterator"),
                    _ => Value::list(items),
                })
            }
        },
    }
}

fn batch(value: &Value, args: Args) -> R<Value> {
    let [n, fill] = args.bind("batch", ["linecount", "fill_with"], 1)?;
    let n = args::int(&n.unwrap_or(Value::None))?;
    let mut rows: Vec<Vec<Value>> = Vec::new();
    for item in value.items()? {
        match rows.last_mut() {
            Some(row) if row.len() as i128 != n => row.push(item),
            _ => rows.push(vec![item]),
        }
    }
    if let (Some(fill), Some(row)) = (args::some(fill), rows.last_mut()) {
        let wanted = usize::try_from(n).unwrap_or(0);
        sized(wanted)?;
        row.resize(wanted.max(row.len()), fill);
    }
    let rows = rows.into_iter().map(Value::list);
    Ok(Value::iter(rows.collect(), GENERATOR))
}

fn slice(value: &Value, args: Args) -> R<Value> {
    let [slices, fill] = args.bind("slice", ["slices", "fill_with"], 1)?;
    let slices = args::int(&slices.unwrap_or(Value::None))?;
    if slices == 0 {
        return fail("integer division or modulo by zero");
    }
    let slices = usize::try_from(slices).unwrap_or(0);
    sized(slices)?;
    let items = value.items()?;
    let mut rows = Vec::with_capacity(slices);
    let mut rest = items.as_slice();
    for at in 0..slices {
        let has_more = at < items.len() % slices;
        let n = items.len() / slices + usize::from(has_more);
        let (row, behind) = rest.split_at(n);
        let mut row = row.to_vec();
        rest = behind;
        if let Some(fill) = fill.as_ref().filter(|fill| !fill.is_none() && !has_more) {
            row.push(fill.clone());
        }
        rows.push(Value::list(row));
    }
    Ok(Value::iter(rows, GENERATOR))
}

/// A text in small letters; others as they are.
fn folded(value: Value) -> Value {
    match &value {
        Value::Str(text) => Value::text(text.text.to_lowercase()),
        _ => value,
    }
}

/// What items are ordered by: a member, or several with commas between them.
fn key_of(run: &Run<'_>, item: &Value, attribute: Option<&Value>, cased: bool) -> R<Value> {
    let fold = |value: Value| if cased { value } else { folded(value) };
    match attribute {
        None => Ok(fold(item.clone())),
        Some(attribute) => Ok(fold(member(run, item, attribute)?)),
    }
}

fn sort(run: &Run<'_>, value: &Value, args: Args) -> R<Value> {
    let names = ["reverse", "case_sensitive", "attribute"];
    let [reverse, cased, attribute] = args.bind("sort", names, 0)?;
    let cased = args::flag(cased.as_ref());
    let paths: Vec<Option<Value>> = match args::some(attribute) {
        None => vec![None],
        Some(Value::Str(text)) => text
            .text
            .split(',')
            .map(|path| Some(Value::text(path)))
            .collect(),
        Some(other) => vec![Some(other)],
    };
    let mut keyed = Vec::new();
    for item in value.items()? {
        let keys = paths
            .iter()
            .map(|path| key_of(run, &item, path.as_ref(), cased));
        keyed.push((Value::list(keys.collect::<R<_>>()?), item));
    }
    compare::sort_by_keys(&mut keyed, args::flag(reverse.as_ref()))?;
    Ok(Value::list(
        keyed.into_iter().map(|(_, item)| item).collect(),
    ))
}

fn dict_sort(value: &Value, args: Args) -> R<Value> {
    let names = ["case_sensitive", "by", "reverse"];
    let [cased, by, reverse] = args.bind("dictsort", names, 0)?;
    let Value::Dict(dict) = value else {
        return match value {
            Value::Undefined(why) => fail(&**why),
            other => fail(format!(
                "'{}' object has no attribute 'items'",
                other.type_name()
            )),
        };
    };
    let place = match by.as_ref().map_or(Ok("key"), args::text)? {
        "key" => 0,
        "value" => 1,
        _ => return fail("You can only sort by either \"key\" or \"value\""),
    };
    let cased = args::flag(cased.as_ref());
    let mut keyed = Vec::new();
    for (key, member) in dict.borrow().iter() {
        let by = if place == 0 { key } else { member };
        let by = if cased {
            by.clone()
        } else {
            folded(by.clone())
        };
        keyed.push((by, Value::tuple([key.clone(), member.clone()])));
    }
    compare::sort_by_keys(&mut keyed, args::flag(reverse.as_ref()))?;
    Ok(Value::list(
        keyed.into_iter().map(|(_, pair)| pair).collect(),
    ))
}

fn group_by(run: &Run<'_>, value: &Value, args: Args) -> R<Value> {
    let names = ["attribute", "default", "case_sensitive"];
    let [attribute, default, cased] = args.bind("groupby", names, 1)?;
    let attribute = attribute.unwrap_or(Value::None);
    let cased = args::flag(cased.as_ref());
    let real = |item: &Value| -> R<Value> {
        let found = member(run, item, &attribute)?;
        Ok(match (&default, found.is_undefined()) {
            (Some(default), true) => default.clone(),
            _ => found,
        })
    };
    let mut keyed = Vec::new();
    for item in value.items()? {
        let key = real(&item)?;
        keyed.push((if cased { key } else { folded(key) }, item));
    }
    compare::sort_by_keys(&mut keyed, false)?;
    let mut groups: Vec<(Value, Vec<Value>)> = Vec::new();
    for (key, item) in keyed {
        match groups.last_mut() {
            Some((last, items)) if compare::equal(last, &key)? => items.push(item),
            _ => groups.push((key, vec![item])),
        }
    }
    let mut out = Vec::with_capacity(groups.len());
    for (key, items) in groups {
        let key = if cased { key } else { real(&items[0])? };
        out.push(Value::Group(Rc::from([key, Value::list(items)])));
    }
    Ok(Value::list(out))
}

fn sum(run: &Run<'_>, value: &Value, args: Args) -> R<Value> {
    let [attribute, start] = args.bind("sum", ["attribute", "start"], 0)?;
    let attribute = args::some(attribute);
    let mut total = start.unwrap_or(Value::Int(0));
    if matches!(total, Value::Str(_)) {
        return fail("sum() can't sum strings [use ''.join(seq) instead]");
    }
    for item in value.items()? {
        let item = match &attribute {
            Some(attribute) => member(run, &item, attribute)?,
            None => item,
        };
        total = operators::binary(Operator::Add, &total, &item)?;
    }
    Ok(total)
}

fn unique(run: &Run<'_>, value: &Value, args: Args) -> R<Value> {
    let [cased, attribute] = args.bind("unique", ["case_sensitive", "attribute"], 0)?;
    let (cased, attribute) = (args::flag(cased.as_ref()), args::some(attribute));
    let mut seen = std::collections::HashSet::new();
    let mut out = Vec::new();
    for item in value.items()? {
        let key = key_of(run, &item, attribute.as_ref(), cased)?;
        if seen.insert(Key::of(&key)?) {
            out.push(item);
        }
    }
    Ok(Value::iter(out, GENERATOR))
}

fn extreme(run: &Run<'_>, name: &str, value: &Value, args: Args) -> R<Value> {
    let [cased, attribute] = args.bind(name, ["case_sensitive", "attribute"], 0)?;
    let (cased, attribute) = (args::flag(cased.as_ref()), args::some(attribute));
    let mut best: Option<(Value, Value)> = None;
    let (sign, wins) = match name {
        "min" => ("<", std::cmp::Ordering::Less),
        _ => (">", std::cmp::Ordering::Greater),
    };
    for item in value.items()? {
        let key = key_of(run, &item, attribute.as_ref(), cased)?;
        let is_better = match &best {
            None => true,
            Some((than, _)) => compare::order(&key, than, sign)? == Some(wins),
        };
        if is_better {
            best = Some((key, item));
        }
    }
    Ok(best.map_or_else(
        || Value::undefined("No aggregated item, sequence was empty."),
        |(_, item)| item,
    ))
}

fn map(run: &Run<'_>, value: &Value, mut args: Args) -> R<Value> {
    if !value.is_true() {
        return Ok(Value::iter(Vec::new(), GENERATOR));
    }
    let attribute = match args.positional.is_empty() {
        true => args.take("attribute"),
        false => None,
    };
    let mut out = Vec::new();
    if let Some(attribute) = attribute {
        let default = args.take("default").filter(|default| !default.is_none());
        if let Some((name, _)) = args.named.first() {
            return fail(format!("Unexpected keyword argument '{name}'"));
        }
        for item in value.items()? {
            let found = member(run, &item, &attribute)?;
            out.push(match (&default, found.is_undefined()) {
                (Some(default), true) => default.clone(),
                _ => found,
            });
        }
        return Ok(Value::iter(out, GENERATOR));
    }
    if args.positional.is_empty() {
        return fail("map requires a filter argument");
    }
    let filter = args.positional.remove(0);
    let filter = args::text(&filter)?;
    for item in bounded(value.items()?)? {
        out.push(apply_filter(run, filter, item, args.clone())?);
    }
    Ok(Value::iter(out, GENERATOR))
}

fn select(run: &Run<'_>, name: &str, value: &Value, mut args: Args) -> R<Value> {
    if !value.is_true() {
        return Ok(Value::iter(Vec::new(), GENERATOR));
    }
    let attribute = match name.ends_with("attr") {
        true if args.positional.is_empty() => {
            return fail("Missing parameter for attribute name");
        }
        true => Some(args.positional.remove(0)),
        false => None,
    };
    let test = match args.positional.is_empty() {
        true => None,
        false => Some(args.positional.remove(0)),
    };
    let wanted = name.starts_with("select");
    let mut out = Vec::new();
    for item in value.items()? {
        run.step()?;
        let tried = match &attribute {
            Some(attribute) => member(run, &item, attribute)?,
            None => item.clone(),
        };
        let holds = match &test {
            None => tried.is_true(),
            Some(test) => is_tests::test(args::text(test)?, &tried, args.clone())?,
        };
        if holds == wanted {
            out.push(item);
        }
    }
    Ok(Value::iter(out, GENERATOR))
}

fn join(run: &Run<'_>, value: &Value, args: Args) -> R<Value> {
    let [by, attribute] = args.bind("join", ["d", "attribute"], 0)?;
    let by = repr::text(&by.unwrap_or_else(|| Value::text("")))?;
    let attribute = args::some(attribute);
    let mut out = String::new();
    for (at, item) in value.items()?.into_iter().enumerate() {
        if at > 0 {
            out.push_str(&by);
        }
        let item = match &attribute {
            Some(attribute) => member(run, &item, attribute)?,
            None => item,
        };
        repr::push_text(&item, &mut out)?;
        sized(out.len())?;
    }
    Ok(Value::from(out))
}
