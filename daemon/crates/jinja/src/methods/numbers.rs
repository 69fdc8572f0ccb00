//! Methods of numbers.

use crate::args::{self, Args};
use crate::fault::{R, fail};
use crate::value::Value;

/// A method of a whole number.
pub(super) fn int(n: i128, name: &str, mut args: Args) -> R<Value> {
    let size = n.unsigned_abs();
    Ok(match name {
        "to_bytes" => {
            let signed = args::flag(args.take("signed").as_ref());
            let [length, order] = args.bind("to_bytes", ["length", "byteorder"], 0)?;
            let length = length.as_ref().map_or(Ok(1), args::size)?;
            let order = order.as_ref().map_or(Ok("big"), args::text)?.to_owned();
            return to_bytes(n, length, &order, signed);
        }
        "from_bytes" => {
            let signed = args::flag(args.take("signed").as_ref());
            let [bytes, order] = args.bind("from_bytes", ["bytes", "byteorder"], 1)?;
            let order = order.as_ref().map_or(Ok("big"), args::text)?.to_owned();
            let bytes = bytes.unwrap_or(Value::None).items()?;
            let bytes: Vec<i128> = bytes.iter().map(args::int).collect::<R<_>>()?;
            return from_bytes(bytes, &order, signed);
        }
        _ => {
            args.none(name)?;
            match name {
                "bit_length" => Value::Int(i128::from(u128::BITS - size.leading_zeros())),
                "bit_count" => Value::Int(i128::from(size.count_ones())),
                "as_integer_ratio" => Value::tuple([Value::Int(n), Value::Int(1)]),
                "is_integer" => Value::Bool(true),
                _ => Value::Int(n),
            }
        }
    })
}

fn to_bytes(n: i128, length: usize, order: &str, signed: bool) -> R<Value> {
    let fits =
        |bits: u32, size: u128| length * 8 >= (u128::BITS - size.leading_zeros() + bits) as usize;
    let is_whole = match (n < 0, signed) {
        (true, false) => return fail("can't convert negative int to unsigned"),
        (true, true) => fits(1, (n + 1).unsigned_abs()),
        (false, _) => fits(u32::from(signed), n.unsigned_abs()),
    };
    if !is_whole || length > 1024 {
        return fail("int too big to convert");
    }
    let fill = if n < 0 { 0xff } else { 0 };
    let little = n.to_le_bytes();
    let mut bytes: Vec<u8> = (0..length)
        .map(|at| *little.get(at).unwrap_or(&fill))
        .collect();
    match order {
        "little" => {}
        "big" => bytes.reverse(),
        _ => return fail("byteorder must be either 'little' or 'big'"),
    }
    Ok(Value::Bytes(bytes.into()))
}

fn from_bytes(mut bytes: Vec<i128>, order: &str, signed: bool) -> R<Value> {
    match order {
        "little" => bytes.reverse(),
        "big" => {}
        _ => return fail("byteorder must be either 'little' or 'big'"),
    }
    if bytes.len() > 15 {
        return fail("a whole number takes more than 120 bits");
    }
    let whole = bytes.iter().fold(0, |n, byte| n << 8 | (byte & 0xff));
    let is_negative = signed && bytes.first().is_some_and(|byte| byte & 0x80 != 0);
    let bits = bytes.len() as u32 * 8;
    Ok(Value::Int(if is_negative {
        whole - (1 << bits)
    } else {
        whole
    }))
}

/// A method of a real number.
pub(super) fn float(x: f64, name: &str, args: Args) -> R<Value> {
    if name == "fromhex" {
        return fail("float.fromhex() is not supported");
    }
    args.none(name)?;
    Ok(match name {
        "is_integer" => Value::Bool(x.is_finite() && x.fract() == 0.0),
        "conjugate" => Value::Float(x),
        "hex" => Value::from(hex(x)),
        _ => return ratio(x),
    })
}

/// Two whole numbers whose quotient is the number.
fn ratio(x: f64) -> R<Value> {
    if !x.is_finite() {
        return fail(format!(
            "cannot convert {} to integer ratio",
            if x.is_nan() { "NaN" } else { "Infinity" }
        ));
    }
    let (mut numerator, mut power) = (x, 0_u32);
    while numerator.fract() != 0.0 {
        numerator *= 2.0;
        power += 1;
    }
    if power > 126 || numerator.abs() >= 1e38 {
        return fail("a whole number takes more than 128 bits");
    }
    Ok(Value::tuple([
        Value::Int(numerator as i128),
        Value::Int(1 << power),
    ]))
}

/// The number in base 16, as C's `%a` with all of its digits.
fn hex(x: f64) -> String {
    let sign = if x.is_sign_negative() { "-" } else { "" };
    if x.is_nan() {
        return "nan".to_owned();
    }
    if x.is_infinite() {
        return format!("{sign}inf");
    }
    let bits = x.to_bits();
    let fraction = bits & ((1 << 52) - 1);
    let exponent = (bits >> 52 & 0x7ff) as i64;
    match (exponent, fraction) {
        (0, 0) => format!("{sign}0x0.0p+0"),
        (0, _) => format!("{sign}0x0.{fraction:013x}p-1022"),
        _ => format!("{sign}0x1.{fraction:013x}p{:+}", exponent - 1023),
    }
}
