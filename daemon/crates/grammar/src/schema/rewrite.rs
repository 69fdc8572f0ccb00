//! A schema as `llguidance` takes it: keywords that it enforces, and references by name.
//!
//! ```text
//! schema -> each keyword: copied, put in other words (objects, arrays, conditions), left out,
//!           or rejected with its place
//!        -> each reference: #/$defs/sN, rewritten once
//! ```

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::conditions;
use super::document::{Document, Place};
use super::keywords::{self, FORMATS, Treatment};
use super::pattern;
use super::rewriter::{EXACT_MAX, Outcome, Rewriter, Written, list, refused, text, whole_number};
use crate::limits;

/// A document as one schema, whose references are to its `$defs`.
pub(crate) fn rewritten(schema: &Value) -> Outcome<Value> {
    let mut rewriter = Rewriter {
        document: Document::new(schema),
        names: HashMap::new(),
        queue: Vec::new(),
        left: limits::SCHEMAS_WRITTEN_MAX,
        unique_left: limits::UNIQUE_MAX_BYTES,
    };
    let root = rewriter.document.root();
    let mut whole = rewriter.schema(&root)?;
    let mut definitions = Map::new();
    while let Some((name, place)) = rewriter.queue.pop() {
        let definition = rewriter.schema(&place)?;
        definitions.insert(name, definition);
    }
    if !definitions.is_empty() {
        whole["$defs"] = definitions.into();
    }
    Ok(whole)
}

impl<'s> Rewriter<'s> {
    /// One schema.
    pub(super) fn schema(&mut self, place: &Place<'s>) -> Outcome<Value> {
        self.left = self.left.checked_sub(1).ok_or_else(|| {
            refused(
                place,
                "",
                "with what it stands for the schema is too large; give a smaller one",
            )
        })?;
        let members = match place.value {
            Value::Bool(is_any) => return Ok((*is_any).into()),
            Value::Object(members) => members,
            // PHP writes an empty object so.
            Value::Array(list) if list.is_empty() => return Ok(true.into()),
            other => {
                let why = format!("{other} is no schema; give an object, or true or false");
                return Err(refused(place, "", &why));
            }
        };
        if self.document.ref_stands_alone
            && let Some(reference) = members.get("$ref").filter(|said| !said.is_null())
        {
            return self.reference(place, "$ref", reference);
        }
        let mut written = Written::default();
        for (key, value) in members {
            let is_known =
                keywords::known(key).is_some_and(|known| known.treatment != Treatment::Annotation);
            if is_known && (!value.is_null() || key == "const") {
                self.keyword(place, members, key, &place.below(key, value), &mut written)?;
            }
        }
        super::objects::finish(self, place, &mut written)?;
        super::arrays::finish(self, place, &mut written)?;
        let whole = written.whole();
        let allows_null = members.get("nullable") == Some(&true.into());
        Ok(match allows_null && whole != json!({}) {
            true => json!({"anyOf": [whole, {"type": "null"}]}),
            false => whole,
        })
    }

    fn keyword(
        &mut self,
        place: &Place<'s>,
        members: &'s Map<String, Value>,
        key: &str,
        said: &Place<'s>,
        written: &mut Written,
    ) -> Outcome<()> {
        let value = said.value;
        if assertion(place, members, key, value, written)? {
            return Ok(());
        }
        match key {
            "$ref" | "$dynamicRef" | "$recursiveRef" => {
                let reference = self.reference(place, key, value)?;
                match reference {
                    Value::Object(members) => written.put("$ref", members["$ref"].clone()),
                    other => written.all.push(other),
                }
            }
            "allOf" | "anyOf" | "oneOf" => {
                let schemas = self.schemas(said)?;
                if schemas.is_empty() {
                    return Err(refused(place, key, "it is empty; give at least one schema"));
                }
                match key == "oneOf" && conditions::are_required_alone(&schemas) {
                    true => written.all.push(conditions::exactly_one(&schemas)),
                    false => written.put(key, schemas.into()),
                }
            }
            "not" => {
                let inner = self.schema(said)?;
                let other = conditions::negation(place, key, &inner)?;
                written.all.push(other);
            }
            "if" => {
                if let Some(either) = conditions::if_then_else(self, place, members)? {
                    written.all.push(either);
                }
            }
            _ => {
                super::objects::keyword(self, place, key, said, written)?;
                super::arrays::keyword(self, place, members, key, said, written)?;
            }
        }
        Ok(())
    }

    /// A list of schemas.
    pub(super) fn schemas(&mut self, said: &Place<'s>) -> Outcome<Vec<Value>> {
        let Value::Array(list) = said.value else {
            return Err(refused(
                said,
                "",
                &format!("{} is no list; give a list of schemas", said.value),
            ));
        };
        let each = list.iter().enumerate();
        each.map(|(at, one)| self.schema(&said.below(&at.to_string(), one)))
            .collect()
    }

    /// A schema for each name.
    pub(super) fn named_schemas(&mut self, said: &Place<'s>) -> Outcome<Map<String, Value>> {
        let members = match said.value {
            Value::Object(members) => members,
            // PHP writes an empty object so.
            Value::Array(list) if list.is_empty() => return Ok(Map::new()),
            other => {
                let why = format!("{other} is no object; give schemas by name");
                return Err(refused(said, "", &why));
            }
        };
        let each = members.iter();
        each.map(|(name, one)| Ok((name.clone(), self.schema(&said.below(name, one))?)))
            .collect()
    }

    fn reference(&mut self, place: &Place<'s>, key: &str, said: &Value) -> Outcome<Value> {
        let reference = text(place, key, said)?;
        if key == "$dynamicRef" && self.document.is_ambiguous(reference) {
            let why = "several schemas have this $dynamicAnchor; refer to one of them by $ref";
            return Err(refused(place, key, why));
        }
        let target = self.target(place, key, reference)?;
        if let Value::Bool(_) = target.value {
            return Ok(target.value.clone());
        }
        let next = format!("s{}", self.names.len());
        let known = (target.pointer.clone(), target.base.clone());
        let name = self.names.entry(known).or_insert_with(|| {
            self.queue.push((next.clone(), target));
            next
        });
        Ok(json!({"$ref": format!("#/$defs/{name}")}))
    }

    /// What a reference is to.
    fn target(&self, place: &Place<'s>, key: &str, reference: &str) -> Outcome<Place<'s>> {
        self.document.find(&place.base, reference).ok_or_else(|| {
            let why = format!(
                "there is no schema at {reference} in this document, and nothing else is read; put the schema into $defs"
            );
            refused(place, key, &why)
        })
    }

    /// What the `$ref` of a schema is to.
    pub(super) fn referred(&self, place: &Place<'s>, said: &Value) -> Outcome<Place<'s>> {
        self.target(place, "$ref", text(place, "$ref", said)?)
    }

    /// The schema that stands at the end of references, where it has nothing beside them.
    pub(super) fn followed(&self, place: &Place<'s>) -> Outcome<Place<'s>> {
        let mut place = place.clone();
        for _ in 0..limits::NESTING_MAX {
            let Some(reference) = place.value.get("$ref").and_then(Value::as_str) else {
                break;
            };
            place = self.target(&place, "$ref", reference)?;
        }
        Ok(place)
    }
}

/// Writes a keyword that has no schemas in it; whether it is one.
fn assertion(
    place: &Place<'_>,
    members: &Map<String, Value>,
    key: &str,
    value: &Value,
    written: &mut Written,
) -> Outcome<bool> {
    match key {
        "type" => written.put(key, types(place, value)?),
        "const" => {
            check_exact(place, key, value)?;
            written.put(key, value.clone());
        }
        "enum" => {
            let list = list(place, key, value)?;
            list.iter()
                .try_for_each(|one| check_exact(place, key, one))?;
            written.put(key, value.clone());
        }
        "minimum" | "maximum" => written.put(key, bound(place, key, value)?),
        "exclusiveMinimum" | "exclusiveMaximum" => exclusive(place, members, key, value, written)?,
        "multipleOf" => {
            let factor = number(place, key, value)?;
            if factor.as_f64().is_none_or(|factor| factor <= 0.0) {
                return Err(refused(
                    place,
                    key,
                    &format!("{value} is not above 0; give a positive number"),
                ));
            }
            written.put(key, factor);
        }
        "minLength" | "maxLength" | "minItems" | "maxItems" => {
            let n = whole_number(place, key, value)?;
            written.put(key, n.into());
        }
        "pattern" => {
            let patterns = pattern::taken_apart(text(place, key, value)?);
            let format = members.get("format").and_then(Value::as_str);
            match (patterns, format.filter(|name| FORMATS.contains(name))) {
                (Ok(patterns), _) => {
                    patterns
                        .into_iter()
                        .for_each(|one| written.put(key, one.into()));
                }
                // Generators write both for the same texts.
                (Err(_), Some(name)) => written.put("format", name.into()),
                (Err(why), None) => return Err(refused(place, key, &why)),
            }
        }
        "format" => {
            let name = text(place, key, value)?;
            let described = members.get("pattern").and_then(Value::as_str);
            let is_described = described.is_some_and(pattern::is_whole);
            if FORMATS.contains(&name) && !is_described && !written.members.contains_key(key) {
                written.put(key, name.into());
            }
        }
        _ => return Ok(false),
    }
    Ok(true)
}

fn types(place: &Place<'_>, value: &Value) -> Outcome<Value> {
    let names = match value {
        Value::Array(list) => list.as_slice(),
        one => std::slice::from_ref(one),
    };
    let mut known: Vec<&str> = Vec::new();
    for name in names {
        let is_type = |name: &&str| super::negate::TYPES.contains(name) || *name == "integer";
        let Some(name) = name.as_str().filter(is_type) else {
            let why = format!(
                "{name} is no type; give null, boolean, number, integer, string, array or object"
            );
            return Err(refused(place, "type", &why));
        };
        if !known.contains(&name) {
            known.push(name);
        }
    }
    if known.contains(&"number") {
        known.retain(|name| *name != "integer");
    }
    match known.as_slice() {
        [] => Err(refused(
            place,
            "type",
            "it is empty; give at least one type",
        )),
        [one] => Ok((*one).into()),
        _ => Ok(json!(known)),
    }
}

/// Bounds of draft 4 say with `true` that another bound is exclusive.
fn exclusive(
    place: &Place<'_>,
    members: &Map<String, Value>,
    key: &str,
    value: &Value,
    written: &mut Written,
) -> Outcome<()> {
    let bound = match value {
        Value::Bool(false) => return Ok(()),
        Value::Bool(true) => {
            let beside = if key == "exclusiveMinimum" {
                "minimum"
            } else {
                "maximum"
            };
            match members.get(beside) {
                Some(bound) => bound,
                None => return Ok(()),
            }
        }
        bound => bound,
    };
    written.put(key, self::bound(place, key, bound)?);
    Ok(())
}

/// A bound of numbers. One that leaves all up to 2^53 is that: numbers beyond are not exact.
fn bound(place: &Place<'_>, key: &str, value: &Value) -> Outcome<Value> {
    let is_least = key.ends_with("inimum");
    let number = number_of(place, key, value)?;
    let is_below = number.as_f64().is_some_and(|number| number < 0.0);
    match is_exact(number) {
        false if is_least && is_below => Ok((-EXACT_MAX as i64).into()),
        false if !is_least && !is_below => Ok((EXACT_MAX as i64).into()),
        _ => self::number(place, key, value),
    }
}

fn number_of<'v>(place: &Place<'_>, key: &str, value: &'v Value) -> Outcome<&'v Value> {
    let why = || refused(place, key, &format!("{value} is no number; give a number"));
    value.is_number().then_some(value).ok_or_else(why)
}

/// Whether a number is one that is not rounded: beyond 2^53 whole numbers are.
fn is_exact(number: &Value) -> bool {
    let whole = || {
        number
            .as_i64()
            .map(|whole| whole.unsigned_abs() <= EXACT_MAX as u64)
    };
    let float = number.as_f64().is_none_or(|float| float.abs() <= EXACT_MAX);
    whole().unwrap_or(float)
}

fn number(place: &Place<'_>, key: &str, value: &Value) -> Outcome<Value> {
    check_exact(place, key, number_of(place, key, value)?)?;
    Ok(value.clone())
}

/// Refuses numbers that texts are not held to: beyond 2^53 they are rounded.
fn check_exact(place: &Place<'_>, key: &str, value: &Value) -> Outcome<()> {
    if !is_exact(value) {
        let why = format!(
            "{value} is beyond 2^53, up to which numbers are exact; leave it out, or give a smaller one"
        );
        return Err(refused(place, key, &why));
    }
    match value {
        Value::Array(list) => list.iter().try_for_each(|one| check_exact(place, key, one)),
        Value::Object(members) => members
            .values()
            .try_for_each(|one| check_exact(place, key, one)),
        _ => Ok(()),
    }
}
