//! Members of values, and calls.

use std::rc::Rc;

use crate::args::{self, Args};
use crate::compare;
use crate::fault::{Fault, R, fail};
use crate::methods;
use crate::objects::{Bound, Cycler, Function, Joiner, Loop};
use crate::repr;
use crate::run::Run;
use crate::value::{Dict, Range, Text, Value};

/// Numbers that a range may have, as in Jinja's sandbox.
const RANGE_MAX: usize = 100_000;

/// The largest step of a slice and of a range that is made of slices.
const STEP_MAX: i128 = 1 << 62;

/// `value.name`.
///
/// # Errors
///
/// If the value is undefined.
pub(crate) fn attribute(run: &Run<'_>, value: &Value, name: &Rc<str>) -> R<Value> {
    if let Value::Undefined(why) = value {
        return fail(&**why);
    }
    if let Some(found) = own_attribute(run, value, name)? {
        return Ok(found);
    }
    if let Some(private) = private(value, name) {
        return Ok(private);
    }
    if let Value::Dict(dict) = value
        && let Some(found) = dict.borrow().get(&Value::text(Rc::clone(name)))?
    {
        return Ok(found);
    }
    Ok(no_attribute(value, name))
}

/// `value[key]`.
///
/// # Errors
///
/// As [`attribute`].
pub(crate) fn item(run: &Run<'_>, value: &Value, key: &Value) -> R<Value> {
    if let Value::Undefined(why) = value {
        return fail(&**why);
    }
    let found = match value {
        Value::Dict(dict) => dict.borrow().get(key).unwrap_or(None),
        other => key.as_int().and_then(|at| element(other, at)),
    };
    if let Some(found) = found {
        return Ok(found);
    }
    let Value::Str(name) = key else {
        return Ok(Value::undefined(format!(
            "{} has no element {}",
            kind_of(value),
            repr::repr(key)?
        )));
    };
    if let Some(found) = own_attribute(run, value, &name.text)? {
        return Ok(found);
    }
    if let Some(private) = private(value, &name.text) {
        return Ok(private);
    }
    Ok(no_attribute(value, &name.text))
}

fn kind_of(value: &Value) -> String {
    match value {
        Value::None => "None".to_owned(),
        other => format!("{} object", other.type_name()),
    }
}

fn no_attribute(value: &Value, name: &str) -> Value {
    let kind = match value {
        Value::None => "'None'".to_owned(),
        other => format!("'{} object'", other.type_name()),
    };
    Value::undefined(format!("{kind} has no attribute '{name}'"))
}

/// What Jinja's sandbox gives for names of Python's own.
fn private(value: &Value, name: &str) -> Option<Value> {
    (name.starts_with("__") && name.ends_with("__")).then(|| {
        let kind = value.type_name();
        Value::undefined(format!(
            "access to attribute '{name}' of '{kind}' object is unsafe."
        ))
    })
}

/// The item at a place, which counts from the end where it is negative.
pub(crate) fn element(value: &Value, at: i128) -> Option<Value> {
    let place = |len: usize| -> Option<usize> {
        let at = if at < 0 { at + len as i128 } else { at };
        usize::try_from(at).ok().filter(|at| *at < len)
    };
    match value {
        Value::List(list) => {
            let list = list.borrow();
            place(list.len()).map(|at| list[at].clone())
        }
        Value::Tuple(items) | Value::Group(items) => place(items.len()).map(|at| items[at].clone()),
        Value::Str(text) => {
            let at = place(value.len()?)?;
            let c = match text.text.is_ascii() {
                true => char::from(text.text.as_bytes()[at]),
                false => text.text.chars().nth(at)?,
            };
            Some(Value::Str(Text {
                text: Rc::from(&*c.encode_utf8(&mut [0; 4])),
                safe: text.safe,
            }))
        }
        Value::Bytes(bytes) => place(bytes.len()).map(|at| Value::Int(bytes[at].into())),
        Value::Range(range) => place(range.len()).map(|at| Value::Int(range.get(at))),
        _ => None,
    }
}

/// What a value itself has by a name: a method, or a member that is no item.
fn own_attribute(run: &Run<'_>, value: &Value, name: &Rc<str>) -> R<Option<Value>> {
    let found = match value {
        Value::Namespace(members) => return Ok(members.borrow().get_str(name)),
        Value::Loop(it) => return loop_attribute(run, it, name),
        Value::Cycler(it) => match &**name {
            "current" => Some(it.current()),
            "pos" => Some(Value::count(it.at.get())),
            "items" => Some(Value::tuple(it.items.clone())),
            _ => None,
        },
        Value::Joiner(it) => match &**name {
            "sep" => Some(it.separator.clone()),
            "used" => Some(Value::Bool(it.used.get())),
            _ => None,
        },
        Value::Macro(it) => {
            let node = &it.node;
            match &**name {
                "name" => Some(match &node.name {
                    Some(name) => Value::text(Rc::clone(name)),
                    None => Value::None,
                }),
                "arguments" => {
                    let names = node.parameters.iter();
                    let names = names.map(|(_, name, _)| Value::text(Rc::clone(name)));
                    Some(Value::tuple(names.collect::<Vec<_>>()))
                }
                "catch_kwargs" => Some(node.reads.kwargs.into()),
                "catch_varargs" => Some(node.reads.varargs.into()),
                "caller" => Some(node.reads.caller.into()),
                _ => None,
            }
        }
        Value::Group(items) => match &**name {
            "grouper" => items.first().cloned(),
            "list" => items.get(1).cloned(),
            _ => None,
        },
        Value::Range(range) => match &**name {
            "start" => Some(Value::Int(range.start)),
            "stop" => Some(Value::Int(range.stop)),
            "step" => Some(Value::Int(range.step)),
            _ => None,
        },
        Value::Int(_) | Value::Bool(_) => match &**name {
            "real" | "numerator" => value.as_int().map(Value::Int),
            "imag" => Some(Value::Int(0)),
            "denominator" => Some(Value::Int(1)),
            _ => None,
        },
        Value::Float(x) => match &**name {
            "real" => Some(Value::Float(*x)),
            "imag" => Some(Value::Float(0.0)),
            _ => None,
        },
        _ => None,
    };
    if found.is_some() || !methods::has(value, name) {
        return Ok(found);
    }
    Ok(Some(Value::Bound(Rc::new(Bound {
        of: value.clone(),
        name: Rc::clone(name),
    }))))
}

fn loop_attribute(run: &Run<'_>, it: &Rc<Loop>, name: &Rc<str>) -> R<Option<Value>> {
    let index0 = i128::from(it.index0.get());
    let or_undefined =
        |item: Option<Value>, why: &str| item.unwrap_or_else(|| Value::undefined(why));
    Ok(Some(match &**name {
        "index" => Value::Int(index0 + 1),
        "index0" => Value::Int(index0),
        "length" => Value::Int(run.loop_length(it)?),
        "revindex" => Value::Int(run.loop_length(it)? - index0),
        "revindex0" => Value::Int(run.loop_length(it)? - index0 - 1),
        "first" => Value::Bool(index0 == 0),
        "last" => Value::Bool(run.peek(it)?.is_none()),
        "depth" => Value::Int(i128::from(it.depth0) + 1),
        "depth0" => Value::Int(i128::from(it.depth0)),
        "previtem" => {
            let before = it.before.borrow().clone().filter(|_| index0 > 0);
            or_undefined(before, "there is no previous item")
        }
        "nextitem" => or_undefined(run.peek(it)?, "there is no next item"),
        "cycle" | "changed" => Value::Bound(Rc::new(Bound {
            of: Value::Loop(Rc::clone(it)),
            name: Rc::clone(name),
        })),
        _ => return Ok(None),
    }))
}

/// `value[begin:end:step]`. Unlike an item, a slice that a value has not is an error.
///
/// # Errors
///
/// If the value is undefined or has no slices, a place is no whole number, or the step is 0.
pub(crate) fn slice(value: &Value, places: &[Value; 3]) -> R<Value> {
    if let Value::Undefined(why) = value {
        return fail(&**why);
    }
    let missing = || {
        let kind = value.type_name();
        fail(format!("'{kind}' object is not subscriptable by a slice"))
    };
    let is_place = |place: &Value| place.is_none() || place.as_int().is_some();
    let has_slices = !matches!(value, Value::Dict(_) | Value::View(..));
    let Some(len) = value.len().filter(|_| has_slices) else {
        return missing();
    };
    if !places.iter().all(is_place) {
        return fail("slice indices must be integers or None or have an __index__ method");
    }
    let [begin, end, step] = [0, 1, 2].map(|at| places[at].as_int());
    let step = step.unwrap_or(1);
    if step == 0 {
        return fail("slice step cannot be zero");
    }
    let at = places_of(len as i128, begin, end, step);
    Ok(match value {
        Value::Str(text) => {
            let sliced: String = if step == 1 && text.text.is_ascii() {
                let from = at.start.min(len as i128) as usize;
                text.text[from..from + at.len()].to_owned()
            } else {
                let chars: Vec<char> = text.text.chars().collect();
                (0..at.len()).map(|n| chars[at.get(n) as usize]).collect()
            };
            Value::Str(Text {
                text: sliced.into(),
                safe: text.safe,
            })
        }
        Value::List(list) => {
            let list = list.borrow();
            Value::list(
                (0..at.len())
                    .map(|n| list[at.get(n) as usize].clone())
                    .collect(),
            )
        }
        Value::Tuple(items) | Value::Group(items) => {
            let each = (0..at.len()).map(|n| items[at.get(n) as usize].clone());
            Value::tuple(each.collect::<Vec<_>>())
        }
        Value::Bytes(bytes) => {
            Value::Bytes((0..at.len()).map(|n| bytes[at.get(n) as usize]).collect())
        }
        Value::Range(range) => Value::Range(Range {
            start: range.start + range.step * at.start,
            stop: range.start + range.step * at.stop,
            step: (range.step * at.step).clamp(-STEP_MAX, STEP_MAX),
        }),
        _ => return missing(),
    })
}

/// The places that a slice takes of `len` items.
fn places_of(len: i128, begin: Option<i128>, end: Option<i128>, step: i128) -> Range {
    let (least, most) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let clamp = |at: i128| {
        let at = if at < 0 { at.saturating_add(len) } else { at };
        at.clamp(least, most)
    };
    let (first, last) = if step > 0 { (0, len) } else { (len - 1, -1) };
    Range {
        start: begin.map_or(first, clamp),
        stop: end.map_or(last, clamp),
        // Beyond any length, and far from the bounds of a product.
        step: step.clamp(-STEP_MAX, STEP_MAX),
    }
}

/// Calls a value.
///
/// # Errors
///
/// If it cannot be called, or not with these arguments; and those of the call.
pub(crate) fn call(run: &Run<'_>, value: &Value, args: Args) -> R<Value> {
    match value {
        Value::Undefined(why) => fail(&**why),
        Value::Macro(it) => run.call_macro(it, args),
        Value::Bound(it) => match &it.of {
            Value::Loop(of) => loop_method(of, &it.name, args),
            of => methods::call(run, of, &it.name, args),
        },
        Value::Function(function) => function_call(run, *function, args),
        Value::Loop(it) => {
            let items = args.only("loop", 1, 1)?;
            run.recurse(it, &items[0])
        }
        Value::Joiner(it) => {
            args.none("joiner")?;
            match it.used.replace(true) {
                true => Ok(it.separator.clone()),
                false => Ok(Value::text("")),
            }
        }
        other => fail(format!("'{}' object is not callable", other.type_name())),
    }
}

fn loop_method(it: &Loop, name: &str, args: Args) -> R<Value> {
    let items = args.only(name, 0, usize::MAX)?;
    if name == "cycle" {
        let at = usize::try_from(it.index0.get()).unwrap_or(0);
        return match items.len() {
            0 => fail("no items for cycling given"),
            n => Ok(items[at % n].clone()),
        };
    }
    let mut last = it.changed.borrow_mut();
    let is_same = match &*last {
        Some(last) => compare::equal(&Value::tuple(last.clone()), &Value::tuple(items.clone()))?,
        None => false,
    };
    *last = Some(items);
    Ok(Value::Bool(!is_same))
}

fn function_call(run: &Run<'_>, function: Function, mut args: Args) -> R<Value> {
    match function {
        Function::Range => range(args),
        Function::Dict => dict_of(args).map(Value::dict),
        Function::Namespace => {
            let members = dict_of(args)?;
            Ok(Value::Namespace(Rc::new(members.into())))
        }
        Function::Cycler => Cycler::of(args.only("cycler", 0, usize::MAX)?),
        Function::Joiner => {
            let [separator] = args.bind("joiner", ["sep"], 0)?;
            Ok(Value::Joiner(Rc::new(Joiner {
                separator: separator.unwrap_or_else(|| Value::text(", ")),
                used: false.into(),
            })))
        }
        Function::RaiseException => {
            let message = args.take("message");
            let message = message.or_else(|| args.positional.first().cloned());
            let text = repr::text(&message.unwrap_or(Value::None))?;
            Err(Fault::Raised(text.to_string()))
        }
        Function::StrftimeNow => {
            let [format] = args.bind("strftime_now", ["format"], 1)?;
            let format = format.unwrap_or(Value::None);
            let text = (run.host.strftime)(args::text(&format)?);
            text.map(Value::text).map_err(Fault::new)
        }
    }
}

fn range(args: Args) -> R<Value> {
    let bounds = args.only("range", 1, 3)?;
    let bounds: Vec<i128> = bounds.iter().map(args::int).collect::<R<_>>()?;
    let (start, stop, step) = match *bounds.as_slice() {
        [stop] => (0, stop, 1),
        [start, stop] => (start, stop, 1),
        [start, stop, step, ..] => (start, stop, step),
        [] => (0, 0, 1),
    };
    if step == 0 {
        return fail("range() arg 3 must not be zero");
    }
    let most = i128::from(i64::MAX);
    if [start, stop, step].iter().any(|n| n.abs() > most) {
        return fail("a bound of a range takes more than 64 bits");
    }
    let range = Range { start, stop, step };
    match range.len() > RANGE_MAX {
        true => fail(format!(
            "Range too big. The sandbox blocks ranges larger than MAX_RANGE ({RANGE_MAX})."
        )),
        false => Ok(Value::Range(range)),
    }
}

/// A dict of another, of pairs, and of names.
pub(crate) fn dict_of(mut args: Args) -> R<Dict> {
    let mut dict = Dict::default();
    let named = std::mem::take(&mut args.named);
    if let [source] = &*args.only("dict", 0, 1)? {
        update(&mut dict, source)?;
    }
    for (name, value) in named {
        dict.insert_str(&name, value);
    }
    Ok(dict)
}

/// Adds the members of a dict, or pairs.
///
/// # Errors
///
/// If `source` is neither.
pub(crate) fn update(dict: &mut Dict, source: &Value) -> R<()> {
    if let Value::Dict(other) = source {
        for (key, value) in other.borrow().iter() {
            dict.insert(key.clone(), value.clone())?;
        }
        return Ok(());
    }
    for pair in source.items()? {
        match &*pair.items()? {
            [key, value] => dict.insert(key.clone(), value.clone())?,
            other => {
                return fail(format!(
                    "dictionary update sequence element has length {}; 2 is required",
                    other.len()
                ));
            }
        }
    }
    Ok(())
}
