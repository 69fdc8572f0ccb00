//! Arithmetic.

use std::rc::Rc;

use crate::ast::Operator;
use crate::fault::{Fault, R, fail};
use crate::printf;
use crate::repr;
use crate::value::{Text, Value};

/// Bytes of a text, or items of a list, that one operation may make.
pub(crate) const SIZE_MAX: usize = 64 << 20;

/// A number that does not fit is refused: Python's have no bound.
fn wide<T>(result: Option<T>) -> R<T> {
    result.ok_or_else(|| Fault::new("a whole number takes more than 128 bits"))
}

/// `a OP b`.
///
/// # Errors
///
/// If the values have no such operation, or its result is too large.
pub(crate) fn binary(operator: Operator, a: &Value, b: &Value) -> R<Value> {
    let formats = operator == Operator::Mod && a.as_str().is_some();
    for value in [a, b] {
        if let Value::Undefined(why) = value
            && !formats
        {
            return fail(&**why);
        }
    }
    let found = match operator {
        Operator::Add => add(a, b)?,
        Operator::Mul => mul(a, b)?,
        Operator::Mod => match a {
            Value::Str(text) => Some(Value::Str(Text {
                text: printf::printf(&text.text, b)?.into(),
                safe: text.safe,
            })),
            _ => numbers(operator, a, b)?,
        },
        _ => numbers(operator, a, b)?,
    };
    match found {
        Some(value) => Ok(value),
        None => fail(format!(
            "unsupported operand type(s) for {}: '{}' and '{}'",
            operator.sign(),
            a.type_name(),
            b.type_name()
        )),
    }
}

fn add(a: &Value, b: &Value) -> R<Option<Value>> {
    Ok(Some(match (a, b) {
        // Jinja would escape what is added to a text that is safe; no known template means that.
        (Value::Str(a), Value::Str(b)) => {
            let mut text = String::with_capacity(a.text.len() + b.text.len());
            text.push_str(&a.text);
            text.push_str(&b.text);
            sized(text.len())?;
            Value::Str(Text {
                text: text.into(),
                safe: a.safe && b.safe,
            })
        }
        (Value::Str(_), other) => {
            return fail(format!(
                "can only concatenate str (not \"{}\") to str",
                other.type_name()
            ));
        }
        (Value::List(a), Value::List(b)) => {
            let mut items = a.borrow().clone();
            sized(items.len() + b.borrow().len())?;
            items.extend(b.borrow().iter().cloned());
            Value::list(items)
        }
        (Value::List(_), other) => {
            return fail(format!(
                "can only concatenate list (not \"{}\") to list",
                other.type_name()
            ));
        }
        (Value::Tuple(a) | Value::Group(a), Value::Tuple(b) | Value::Group(b)) => {
            Value::tuple([&**a, &**b].concat())
        }
        (Value::Bytes(a), Value::Bytes(b)) => Value::Bytes([&**a, &**b].concat().into()),
        _ => return numbers(Operator::Add, a, b),
    }))
}

fn mul(a: &Value, b: &Value) -> R<Option<Value>> {
    let times = |n: i128, len: usize| -> R<usize> {
        let n = usize::try_from(n.max(0)).unwrap_or(usize::MAX);
        sized(len.saturating_mul(n))?;
        Ok(n)
    };
    Ok(Some(match (a, b) {
        (Value::Str(text), n) | (n, Value::Str(text)) if n.as_int().is_some() => {
            let n = times(n.as_int().unwrap_or(0), text.text.len())?;
            Value::Str(Text {
                text: text
                    .text
                    .repeat(if text.text.is_empty() { 0 } else { n })
                    .into(),
                safe: text.safe,
            })
        }
        (Value::List(list), n) | (n, Value::List(list)) if n.as_int().is_some() => {
            let items = list.borrow();
            let n = times(n.as_int().unwrap_or(0), items.len())?;
            Value::list(repeated(&items, n))
        }
        (Value::Tuple(items), n) | (n, Value::Tuple(items)) if n.as_int().is_some() => {
            let n = times(n.as_int().unwrap_or(0), items.len())?;
            Value::tuple(repeated(items, n))
        }
        _ => return numbers(Operator::Mul, a, b),
    }))
}

fn repeated(items: &[Value], n: usize) -> Vec<Value> {
    let mut out = Vec::with_capacity(items.len() * n);
    for _ in 0..if items.is_empty() { 0 } else { n } {
        out.extend_from_slice(items);
    }
    out
}

/// Refuses what is too large.
///
/// # Errors
///
/// If `size` is above [`SIZE_MAX`].
pub(crate) fn sized(size: usize) -> R<()> {
    match size > SIZE_MAX {
        true => fail(format!(
            "a value would have more than {SIZE_MAX} bytes or items"
        )),
        false => Ok(()),
    }
}

fn numbers(operator: Operator, a: &Value, b: &Value) -> R<Option<Value>> {
    match (a.as_int(), b.as_int()) {
        (Some(a), Some(b)) => ints(operator, a, b).map(Some),
        _ => match (a.as_float(), b.as_float()) {
            (Some(a), Some(b)) => floats(operator, a, b).map(Some),
            _ => Ok(None),
        },
    }
}

fn ints(operator: Operator, a: i128, b: i128) -> R<Value> {
    let division = |words: &str| if b == 0 { fail(words) } else { Ok(()) };
    Ok(match operator {
        Operator::Add => Value::Int(wide(a.checked_add(b))?),
        Operator::Sub => Value::Int(wide(a.checked_sub(b))?),
        Operator::Mul => Value::Int(wide(a.checked_mul(b))?),
        Operator::Div => {
            division("division by zero")?;
            Value::Float(quotient(a, b))
        }
        Operator::FloorDiv => {
            division("integer division or modulo by zero")?;
            let quotient = wide(a.checked_div(b))?;
            Value::Int(quotient - i128::from(a % b != 0 && (a < 0) != (b < 0)))
        }
        Operator::Mod => {
            division("integer modulo by zero")?;
            let rest = wide(a.checked_rem(b))?;
            Value::Int(if rest != 0 && (rest < 0) != (b < 0) {
                rest + b
            } else {
                rest
            })
        }
        Operator::Pow => match u32::try_from(b) {
            Ok(n) => Value::Int(wide(a.checked_pow(n))?),
            Err(_) if b > 0 && (-1..=1).contains(&a) => Value::Int(match (a, b % 2) {
                (-1, 0) => 1,
                _ => a,
            }),
            Err(_) if b > 0 => return wide(None),
            Err(_) if a == 0 => return fail("zero to a negative power"),
            Err(_) => Value::Float((a as f64).powf(b as f64)),
        },
    })
}

/// `a / b`, rounded once: a number above 2^53 is not rounded before.
fn quotient(a: i128, b: i128) -> f64 {
    let (n, d) = (a.unsigned_abs(), b.unsigned_abs());
    if n.max(d) < 1 << 53 {
        return a as f64 / b as f64;
    }
    // At least 55 bits of the quotient, the last of which says whether more would follow.
    let bits = |x: u128| 128 - x.leading_zeros() as i32;
    let shift = 55 - (bits(n) - bits(d));
    let (mut whole, mut rest) = match shift < 0 {
        true => (n / d, n % d),
        false => (0, 0),
    };
    if shift >= 0 {
        // One bit after the other, since the shifted number may have more than 128.
        for at in (0..bits(n) + shift).rev() {
            let bit = if at >= shift {
                n >> (at - shift) & 1
            } else {
                0
            };
            rest = rest << 1 | bit;
            whole <<= 1;
            if rest >= d {
                rest -= d;
                whole |= 1;
            }
        }
    }
    let whole = whole | u128::from(rest != 0);
    let size = whole as f64 * 2_f64.powi(-shift.max(0));
    if (a < 0) == (b < 0) { size } else { -size }
}

fn floats(operator: Operator, a: f64, b: f64) -> R<Value> {
    Ok(Value::Float(match operator {
        Operator::Add => a + b,
        Operator::Sub => a - b,
        Operator::Mul => a * b,
        Operator::Div | Operator::FloorDiv | Operator::Mod if b == 0.0 => {
            return fail(match operator {
                Operator::Div => "division by zero",
                Operator::FloorDiv => "float floor division by zero",
                _ => "float modulo",
            });
        }
        Operator::Div => a / b,
        Operator::FloorDiv => {
            // As CPython, to the same digits where the division is rounded.
            let rest = a % b;
            let borrows = rest != 0.0 && (rest < 0.0) != (b < 0.0);
            let whole = (a - rest) / b - f64::from(borrows);
            let floor = whole.floor();
            let quotient = floor + f64::from(whole - floor > 0.5);
            match quotient == 0.0 {
                true => 0.0_f64.copysign(a / b),
                false => quotient,
            }
        }
        Operator::Mod => modulo(a, b),
        Operator::Pow if a == 0.0 && b < 0.0 => return fail("zero to a negative power"),
        Operator::Pow => {
            let power = a.powf(b);
            if power.is_nan() && !a.is_nan() && !b.is_nan() {
                return fail("complex numbers are not supported");
            }
            if power.is_infinite() && a.is_finite() && b.is_finite() {
                return fail("(34, 'Numerical result out of range')");
            }
            power
        }
    }))
}

fn modulo(a: f64, b: f64) -> f64 {
    let rest = a % b;
    if rest != 0.0 && (rest < 0.0) != (b < 0.0) {
        rest + b
    } else if rest == 0.0 {
        0.0_f64.copysign(b)
    } else {
        rest
    }
}

/// `-a`, or `+a`.
///
/// # Errors
///
/// If the value is no number.
pub(crate) fn unary(negative: bool, a: &Value) -> R<Value> {
    match a {
        Value::Undefined(why) => fail(&**why),
        Value::Float(x) => Ok(Value::Float(if negative { -x } else { *x })),
        other => match other.as_int() {
            Some(n) if negative => Ok(Value::Int(wide(n.checked_neg())?)),
            Some(n) => Ok(Value::Int(n)),
            None => fail(format!(
                "bad operand type for unary {}: '{}'",
                if negative { '-' } else { '+' },
                other.type_name()
            )),
        },
    }
}

/// `a ~ b ~ ...`.
///
/// # Errors
///
/// If lists are nested too deeply.
pub(crate) fn concat(values: &[Value]) -> R<Value> {
    let mut out = String::new();
    for value in values {
        repr::push_text(value, &mut out)?;
        sized(out.len())?;
    }
    Ok(Value::Str(Text {
        text: Rc::from(out),
        safe: false,
    }))
}
