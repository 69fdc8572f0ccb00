//! What all keywords are rewritten with: the state of a document, a schema that is being written,
//! and the values that keywords may have.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::document::{Document, Place, escaped};
use crate::{Error, limits};

/// Up to here all whole numbers are exact.
pub(super) const EXACT_MAX: f64 = (1u64 << 53) as f64;

/// What a keyword is rejected with, behind its place.
pub(super) type Outcome<T> = Result<T, Error>;

/// Rewrites a document.
pub(super) struct Rewriter<'s> {
    pub(super) document: Document<'s>,
    /// Names of the rules for referenced schemas, by pointer and base.
    pub(super) names: HashMap<(String, String), String>,
    /// Schemas that are yet to be rewritten.
    pub(super) queue: Vec<(String, Place<'s>)>,
    /// Schemas that may still be written.
    pub(super) left: usize,
    /// Bytes that lists of different items may still have.
    pub(super) unique_left: usize,
}

/// A schema that is being written.
#[derive(Debug, Default)]
pub(super) struct Written {
    pub(super) members: Map<String, Value>,
    /// Further schemas that have to be satisfied.
    pub(super) all: Vec<Value>,
}

impl Written {
    /// Adds a keyword; a second of one name has to be satisfied, too.
    pub(super) fn put(&mut self, key: &str, value: Value) {
        match self.members.contains_key(key) {
            true => self.all.push(json!({key: value})),
            false => drop(self.members.insert(key.to_owned(), value)),
        }
    }

    /// Returns the keywords and further schemas as one schema.
    pub(super) fn whole(mut self) -> Value {
        if let Some(Value::Array(own)) = self.members.get_mut("allOf") {
            own.append(&mut self.all);
        } else if !self.all.is_empty() {
            self.members.insert("allOf".to_owned(), self.all.into());
        }
        // One of them is the same as its keywords beside the others.
        if let Some(Value::Array(all)) = self.members.get("allOf")
            && let [Value::Object(one)] = all.as_slice()
            && !one
                .keys()
                .any(|key| key != "allOf" && self.members.contains_key(key))
        {
            let one = one.clone();
            self.members.shift_remove("allOf");
            self.members.extend(one);
        }
        self.members.into()
    }
}

/// The error of a keyword that cannot be enforced.
pub(super) fn refused(place: &Place<'_>, key: &str, why: &str) -> Error {
    let at = match key {
        "" => place.pointer.clone(),
        key => format!("{}/{}", place.pointer, escaped(key)),
    };
    crate::size::refused(format!("{at}: {why}"))
}

impl<'s> Rewriter<'s> {
    /// Counts in the lists that `uniqueItems` stands for, of this many bytes together.
    pub(super) fn count_unique(&mut self, place: &Place<'s>, bytes: usize) -> Outcome<()> {
        let left = self.unique_left.checked_sub(bytes);
        self.unique_left = left.ok_or_else(|| {
            let max = limits::UNIQUE_MAX_BYTES;
            let why = format!(
                "the values of such items in every order exceed {max} bytes in all; give fewer or \
                 shorter values, or leave it out here"
            );
            refused(place, "uniqueItems", &why)
        })?;
        Ok(())
    }
}

pub(super) fn list<'v>(place: &Place<'_>, key: &str, value: &'v Value) -> Outcome<&'v [Value]> {
    match value {
        Value::Array(list) => Ok(list),
        // Lua writes an empty list so.
        Value::Object(members) if members.is_empty() => Ok(&[]),
        other => Err(refused(
            place,
            key,
            &format!("{other} is no list; give a list"),
        )),
    }
}

pub(super) fn text<'v>(place: &Place<'_>, key: &str, value: &'v Value) -> Outcome<&'v str> {
    let why = || refused(place, key, &format!("{value} is no text; give a text"));
    value.as_str().ok_or_else(why)
}

/// A number at least 0 without a fraction, as `2` and `2.0`.
pub(super) fn whole_number(place: &Place<'_>, key: &str, value: &Value) -> Outcome<u64> {
    let of_float = || {
        let float = value.as_f64().filter(|n| n.fract() == 0.0)?;
        (0.0..=EXACT_MAX).contains(&float).then_some(float as u64)
    };
    let why = || {
        refused(
            place,
            key,
            &format!("{value} is no whole number of at least 0; give one"),
        )
    };
    value.as_u64().or_else(of_float).ok_or_else(why)
}
