//! Equality, order and membership.

use std::cmp::Ordering;
use std::rc::Rc;

use crate::fault::{Fault, R, fail};
use crate::value::{Value, ViewKind};

/// Levels of lists in lists that are compared, shown and serialized.
pub(crate) const LEVELS_MAX: usize = 900;

/// `==`.
///
/// # Errors
///
/// If lists are nested too deeply.
pub(crate) fn equal(a: &Value, b: &Value) -> R<bool> {
    equal_at(a, b, 0)
}

fn equal_at(a: &Value, b: &Value, level: usize) -> R<bool> {
    if level > LEVELS_MAX {
        return Err(Fault::Depth);
    }
    let all = |a: &[Value], b: &[Value]| -> R<bool> {
        if a.len() != b.len() {
            return Ok(false);
        }
        for (a, b) in a.iter().zip(b) {
            if !equal_at(a, b, level + 1)? {
                return Ok(false);
            }
        }
        Ok(true)
    };
    Ok(match (a, b) {
        (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => true,
        (Value::Str(a), Value::Str(b)) => a.text == b.text,
        (Value::Bytes(a), Value::Bytes(b)) => a == b,
        (Value::List(a), Value::List(b)) => Rc::ptr_eq(a, b) || all(&a.borrow(), &b.borrow())?,
        (Value::Tuple(a) | Value::Group(a), Value::Tuple(b) | Value::Group(b)) => all(a, b)?,
        (Value::Dict(a), Value::Dict(b)) => {
            if Rc::ptr_eq(a, b) {
                return Ok(true);
            }
            let (a, b) = (a.borrow(), b.borrow());
            if a.len() != b.len() {
                return Ok(false);
            }
            for (key, value) in a.iter() {
                match b.get(key)? {
                    Some(other) if equal_at(value, &other, level + 1)? => {}
                    _ => return Ok(false),
                }
            }
            true
        }
        (Value::Range(a), Value::Range(b)) => {
            let n = a.len();
            n == b.len() && (n == 0 || a.start == b.start && (n == 1 || a.step == b.step))
        }
        (Value::View(_, kind), Value::View(_, other)) if *kind != ViewKind::Values => {
            *other != ViewKind::Values && a.len() == b.len() && {
                let b = b.items()?;
                for item in a.items()? {
                    if !contains_in(&b, &item)? {
                        return Ok(false);
                    }
                }
                true
            }
        }
        _ => match (number(a), number(b)) {
            (Some(a), Some(b)) => a.compare(&b) == Some(Ordering::Equal),
            _ => is_same(a, b),
        },
    })
}

/// `is`, for objects that are one.
pub(crate) fn is_same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::None, Value::None) => true,
        (Value::Bool(a), Value::Bool(b)) => a == b,
        (Value::Int(a), Value::Int(b)) => a == b && (-5..=256).contains(a),
        (Value::Str(a), Value::Str(b)) => Rc::ptr_eq(&a.text, &b.text),
        (Value::List(a), Value::List(b)) => Rc::ptr_eq(a, b),
        (Value::Tuple(a), Value::Tuple(b)) => Rc::ptr_eq(a, b),
        (Value::Dict(a), Value::Dict(b)) => Rc::ptr_eq(a, b),
        (Value::Namespace(a), Value::Namespace(b)) => Rc::ptr_eq(a, b),
        (Value::Macro(a), Value::Macro(b)) => Rc::ptr_eq(a, b),
        (Value::Loop(a), Value::Loop(b)) => Rc::ptr_eq(a, b),
        (Value::Cycler(a), Value::Cycler(b)) => Rc::ptr_eq(a, b),
        (Value::Joiner(a), Value::Joiner(b)) => Rc::ptr_eq(a, b),
        (Value::Iter(a), Value::Iter(b)) => Rc::ptr_eq(a, b),
        (Value::Function(a), Value::Function(b)) => a == b,
        _ => false,
    }
}

/// A number, for comparisons of whole ones with others.
enum Number {
    Int(i128),
    Float(f64),
}

fn number(value: &Value) -> Option<Number> {
    match value {
        Value::Float(x) => Some(Number::Float(*x)),
        other => other.as_int().map(Number::Int),
    }
}

impl Number {
    fn compare(&self, other: &Number) -> Option<Ordering> {
        match (self, other) {
            (Number::Int(a), Number::Int(b)) => Some(a.cmp(b)),
            (Number::Float(a), Number::Float(b)) => a.partial_cmp(b),
            (Number::Int(a), Number::Float(b)) => int_with_float(*a, *b),
            (Number::Float(a), Number::Int(b)) => int_with_float(*b, *a).map(Ordering::reverse),
        }
    }
}

fn int_with_float(a: i128, b: f64) -> Option<Ordering> {
    if b.is_nan() {
        return None;
    }
    if b >= 1e38 {
        return Some(Ordering::Less);
    }
    if b <= -1e38 {
        return Some(Ordering::Greater);
    }
    let whole = b.floor();
    Some(a.cmp(&(whole as i128)).then(match b > whole {
        true => Ordering::Less,
        false => Ordering::Equal,
    }))
}

/// The order of two values; nothing where there is none, as beside NaN.
///
/// # Errors
///
/// If values of these types have no order; `sign` is the operator that the words name.
pub(crate) fn order(a: &Value, b: &Value, sign: &str) -> R<Option<Ordering>> {
    order_at(a, b, sign, 0)
}

fn order_at(a: &Value, b: &Value, sign: &str, level: usize) -> R<Option<Ordering>> {
    if level > LEVELS_MAX {
        return Err(Fault::Depth);
    }
    let each = |a: &[Value], b: &[Value]| -> R<Option<Ordering>> {
        for (a, b) in a.iter().zip(b) {
            if !equal_at(a, b, level + 1)? {
                return order_at(a, b, sign, level + 1);
            }
        }
        Ok(Some(a.len().cmp(&b.len())))
    };
    match (a, b) {
        (Value::Undefined(why), _) | (_, Value::Undefined(why)) => fail(&**why),
        (Value::Str(a), Value::Str(b)) => Ok(Some(a.text.cmp(&b.text))),
        (Value::Bytes(a), Value::Bytes(b)) => Ok(Some(a.cmp(b))),
        (Value::List(a), Value::List(b)) => each(&a.borrow(), &b.borrow()),
        (Value::Tuple(a) | Value::Group(a), Value::Tuple(b) | Value::Group(b)) => each(a, b),
        _ => match (number(a), number(b)) {
            (Some(a), Some(b)) => Ok(a.compare(&b)),
            _ => fail(format!(
                "'{sign}' not supported between instances of '{}' and '{}'",
                a.type_name(),
                b.type_name()
            )),
        },
    }
}

fn contains_in(items: &[Value], value: &Value) -> R<bool> {
    for item in items {
        if is_same(item, value) || equal(item, value)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// `value in container`.
///
/// # Errors
///
/// If the container holds nothing, or nothing of this type.
pub(crate) fn contains(container: &Value, value: &Value) -> R<bool> {
    match container {
        Value::Str(text) => match value {
            Value::Str(part) => Ok(text.text.contains(&*part.text)),
            other => fail(format!(
                "'in <string>' requires string as left operand, not {}",
                other.type_name()
            )),
        },
        Value::Dict(dict) | Value::View(dict, ViewKind::Keys) => {
            Ok(dict.borrow().get(value)?.is_some())
        }
        Value::List(list) => contains_in(&list.borrow(), value),
        Value::Tuple(items) | Value::Group(items) => contains_in(items, value),
        Value::Undefined(_)
        | Value::View(..)
        | Value::Range(_)
        | Value::Bytes(_)
        | Value::Iter(_) => contains_in(&container.items()?, value),
        other => fail(format!(
            "argument of type '{}' is not iterable",
            other.type_name()
        )),
    }
}

/// Sorts by keys, stably.
///
/// # Errors
///
/// If two keys have no order.
pub(crate) fn sort_by_keys(items: &mut [(Value, Value)], reverse: bool) -> R<()> {
    let mut fault = None;
    let mut by = |a: &Value, b: &Value| match order(a, b, "<") {
        Ok(order) => order.unwrap_or(Ordering::Equal),
        Err(found) => {
            fault.get_or_insert(found);
            Ordering::Equal
        }
    };
    if reverse {
        // Equal ones keep their order.
        items.sort_by(|(a, _), (b, _)| by(b, a));
    } else {
        items.sort_by(|(a, _), (b, _)| by(a, b));
    }
    match fault {
        Some(fault) => Err(fault),
        None => Ok(()),
    }
}
