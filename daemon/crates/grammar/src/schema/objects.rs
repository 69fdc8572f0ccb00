//! Keywords of objects, in the words that are enforced: `properties`, `patternProperties`,
//! `additionalProperties`, `required`.

use serde_json::{Map, Value, json};

use super::conditions::with_property;
use super::document::Place;
use super::names::names_of;
use super::negate::any_of;
use super::pattern;
use super::rewriter::{Outcome, Rewriter, Written, list, refused, text, whole_number};

/// Maximum number of choices that stand for one keyword.
const CHOICES_MAX: usize = 64;
/// Maximum number of properties on which others depend, in one schema: each doubles the choices.
const DEPENDENT_MAX: usize = 6;
/// Keywords beside which other properties may be evaluated in ways that are not followed.
const NOT_FOLLOWED: [&str; 4] = ["if", "dependentSchemas", "dependencies", "not"];

/// Writes a keyword that says something by itself.
pub(super) fn keyword<'s>(
    rewriter: &mut Rewriter<'s>,
    place: &Place<'s>,
    key: &str,
    said: &Place<'s>,
    written: &mut Written,
) -> Outcome<()> {
    match key {
        "properties" | "patternProperties" => {
            let schemas = rewriter.named_schemas(said)?;
            if key == "patternProperties" {
                for name in schemas.keys() {
                    match pattern::taken_apart(name)
                        .map_err(|why| refused(said, name, &why))?
                        .as_slice()
                    {
                        [_] => {}
                        _ => {
                            let why = "a look-ahead cannot be enforced there; write the pattern without it";
                            return Err(refused(said, name, why));
                        }
                    }
                }
            }
            written.put(key, schemas.into());
        }
        "additionalProperties" => {
            let schema = rewriter.schema(said)?;
            written.put(key, schema);
        }
        "required" if !said.value.is_boolean() => {
            let names = names(place, key, said.value)?;
            written.put(key, json!(names));
        }
        "dependentRequired" | "dependentSchemas" | "dependencies" => {
            dependent(rewriter, place, key, said, written)?;
        }
        _ => {}
    }
    Ok(())
}

/// A list of names, each once.
fn names<'v>(place: &Place<'_>, key: &str, value: &'v Value) -> Outcome<Vec<&'v str>> {
    let mut names = Vec::new();
    for name in list(place, key, value)? {
        let name = text(place, key, name)?;
        if !names.contains(&name) {
            names.push(name);
        }
    }
    Ok(names)
}

fn dependent<'s>(
    rewriter: &mut Rewriter<'s>,
    place: &Place<'s>,
    key: &str,
    said: &Place<'s>,
    written: &mut Written,
) -> Outcome<()> {
    let Value::Object(members) = said.value else {
        let why = format!(
            "{} is no object; give what depends on a property by its name",
            said.value
        );
        return Err(refused(place, key, &why));
    };
    let mut each = Vec::new();
    for (name, on) in members {
        let then = match on {
            Value::Array(list) if list.is_empty() => continue,
            Value::Array(_) if key != "dependentSchemas" => {
                json!({"required": names(said, name, on)?})
            }
            _ => rewriter.schema(&said.below(name, on))?,
        };
        if then != true && then != json!({}) {
            each.push(with_property(name, then));
        }
    }
    if each.len() > DEPENDENT_MAX {
        let why = format!(
            "{} properties on which others depend; at most {DEPENDENT_MAX} can be enforced",
            each.len()
        );
        return Err(refused(place, key, &why));
    }
    written.all.extend(each);
    Ok(())
}

/// Writes the keywords that depend on others.
pub(super) fn finish<'s>(
    rewriter: &mut Rewriter<'s>,
    place: &Place<'s>,
    written: &mut Written,
) -> Outcome<()> {
    let get = |key: &str| place.value.get(key).filter(|value| !value.is_null());
    if let Some(said) = get("propertyNames") {
        property_names(
            rewriter,
            place,
            &place.below("propertyNames", said),
            written,
        )?;
    }
    let count = |key: &str| get(key).map(|n| whole_number(place, key, n)).transpose();
    let (least, most) = (count("minProperties")?, count("maxProperties")?);
    if least.is_some() || most.is_some() {
        numbers(place, least.unwrap_or(0), most, written)?;
    }
    if let Some(said) = get("unevaluatedProperties") {
        let others = rewriter.schema(&place.below("unevaluatedProperties", said))?;
        unevaluated(rewriter, place, others, written)?;
    }
    Ok(())
}

/// Writes `propertyNames`: which names are none, and what the schemas of others are.
fn property_names<'s>(
    rewriter: &mut Rewriter<'s>,
    place: &Place<'s>,
    said: &Place<'s>,
    written: &mut Written,
) -> Outcome<()> {
    const KEY: &str = "propertyNames";
    let said = rewriter.followed(said)?;
    let schema = rewriter.schema(&said)?;
    let described = names_of(&schema).map_err(|of| {
        let why = format!("{of} cannot be enforced for names; give enum, pattern or lengths");
        refused(place, KEY, &why)
    })?;
    let Some(described) = described else {
        // No name is one: an object without members.
        written.put("maxProperties", 0.into());
        return Ok(());
    };
    if described.is_open() {
        return Ok(());
    }
    let slow = || {
        let why = "whether it describes the names in properties takes too long to find";
        refused(place, KEY, why)
    };
    let mut properties = match written.members.get("properties") {
        Some(Value::Object(members)) => members.clone(),
        _ => Map::new(),
    };
    for (name, schema) in &mut properties {
        if !described.describe(name).ok_or_else(slow)? {
            *schema = false.into();
        }
    }
    let others = written
        .members
        .get("additionalProperties")
        .cloned()
        .unwrap_or(true.into());
    let own = written.members.get("patternProperties");
    let own = own.and_then(Value::as_object);
    let own = own.filter(|own| !own.is_empty()).cloned();
    let (patterns, rest) = match (&described.listed, own) {
        (None, Some(_)) => {
            let why = "it cannot be enforced beside patternProperties; leave one of them out";
            return Err(refused(place, KEY, why));
        }
        (None, None) => {
            let of_others = described.of_others(others, !properties.is_empty());
            of_others.ok_or_else(|| {
                let why = "several patterns of names cannot be enforced; give one";
                refused(place, KEY, why)
            })?
        }
        (Some(listed), own) => {
            for name in listed {
                if properties.contains_key(name) || !described.describe(name).ok_or_else(slow)? {
                    continue;
                }
                let by_pattern = own
                    .iter()
                    .flatten()
                    .find(|(one, _)| pattern::matches(one, name) == Some(true));
                let schema = by_pattern.map_or(&others, |(_, schema)| schema);
                properties.insert(name.clone(), schema.clone());
            }
            (Map::new(), false.into())
        }
    };
    let said = [
        ("properties", properties.into()),
        ("patternProperties", patterns.into()),
        ("additionalProperties", rest),
    ];
    let said = said.map(|(key, value): (&str, Value)| (key.to_owned(), value));
    written.members.extend(said);
    Ok(())
}

/// Bounds of how many properties there are, beside the required ones: choices of optional ones.
fn numbers(place: &Place<'_>, least: u64, most: Option<u64>, written: &mut Written) -> Outcome<()> {
    let properties = written.members.get("properties").and_then(Value::as_object);
    let required = written.members.get("required").and_then(Value::as_array);
    let required: Vec<&str> = required
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let may_be = |(name, schema): (&String, &Value)| {
        (!required.contains(&name.as_str()) && *schema != false).then(|| name.clone())
    };
    let optional: Vec<String> = properties
        .into_iter()
        .flatten()
        .filter_map(may_be)
        .collect();
    let is_closed = written.members.get("additionalProperties") == Some(&false.into())
        && written
            .members
            .get("patternProperties")
            .is_none_or(|own| *own == json!({}));
    let n_required = required.len() as u64;
    let most = most.filter(|&most| !is_closed || most < n_required + optional.len() as u64);
    if least <= n_required && most.is_none() {
        return Ok(());
    }
    let mut bounds = Map::new();
    bounds.insert("minProperties".to_owned(), least.into());
    bounds.extend(most.map(|most| ("maxProperties".to_owned(), most.into())));
    if optional.is_empty() {
        bounds.into_iter().for_each(|(key, n)| written.put(&key, n));
        return Ok(());
    }
    let missing = least.saturating_sub(n_required) as usize;
    let room = most.map(|most| most.saturating_sub(n_required) as usize);
    let Some(choices) = choices(optional.len(), missing, room, is_closed) else {
        let key = if least > n_required {
            "minProperties"
        } else {
            "maxProperties"
        };
        let why = format!(
            "it cannot be enforced beside {} optional properties; require some of them, or leave it out",
            optional.len()
        );
        return Err(refused(place, key, &why));
    };
    let choice = |(present, is_exact): (u64, bool)| {
        chosen(&required, &optional, present, is_exact.then_some(&bounds))
    };
    let mut any: Vec<Value> = choices.into_iter().map(choice).collect();
    let others: Vec<_> = super::negate::TYPES
        .into_iter()
        .filter(|name| *name != "object")
        .collect();
    any.push(json!({"type": others}));
    written.all.push(any_of(any));
    Ok(())
}

/// An object with the required properties and the optional ones that are present, a bit each; with
/// `bounds` it has none of the others.
fn chosen(
    required: &[&str],
    optional: &[String],
    present: u64,
    bounds: Option<&Map<String, Value>>,
) -> Value {
    let is_there = |at: usize| present & (1 << at) != 0;
    let (there, absent): (Vec<_>, Vec<_>) = optional
        .iter()
        .enumerate()
        .partition(|(at, _)| is_there(*at));
    let there = there.iter().map(|(_, name)| name.as_str());
    let all: Vec<&str> = required.iter().copied().chain(there).collect();
    let mut members = Map::new();
    members.insert("required".to_owned(), json!(all));
    if let Some(bounds) = bounds {
        let absent: Map<_, _> = absent
            .into_iter()
            .map(|(_, name)| (name.clone(), false.into()))
            .collect();
        members.insert("properties".to_owned(), absent.into());
        members.extend(bounds.clone());
    }
    members.insert("type".to_owned(), "object".into());
    members.into()
}

/// Which of `n` optional properties are there, a bit each, and whether no others are. Nothing where
/// that takes too many choices.
fn choices(
    n: usize,
    missing: usize,
    room: Option<usize>,
    is_closed: bool,
) -> Option<Vec<(u64, bool)>> {
    if n > 63 {
        return None;
    }
    let mut choices = Vec::new();
    // With room for any number, those beside the ones that are needed stay optional.
    let sizes = match room {
        None => 0..=missing.min(n),
        Some(room) => 0..=room.min(n),
    };
    for size in sizes {
        let is_exact = room.is_some() || size < missing;
        if is_exact && is_closed && size < missing {
            continue;
        }
        for present in subsets(n, size) {
            choices.push((present, is_exact));
            if choices.len() > CHOICES_MAX {
                return None;
            }
        }
    }
    Some(choices)
}

/// All subsets of a size, a bit each, up to one more than may be.
fn subsets(n: usize, size: usize) -> Vec<u64> {
    let mut subsets = vec![(0_u64, 0_usize)];
    for _ in 0..size {
        let longer = subsets
            .iter()
            .flat_map(|&(set, from)| (from..n).map(move |at| (set | 1 << at, at + 1)));
        subsets = longer.take(CHOICES_MAX + 1).collect();
    }
    subsets.into_iter().map(|(set, _)| set).collect()
}

/// The names that a schema evaluates, and their patterns.
#[derive(Debug, Default, Clone)]
struct Evaluated {
    names: Map<String, Value>,
    patterns: Map<String, Value>,
    /// Whether all other members are allowed, too.
    all: bool,
}

impl Evaluated {
    fn add(&mut self, other: Self) {
        self.names.extend(other.names);
        self.patterns.extend(other.patterns);
        self.all |= other.all;
    }

    /// A schema of the objects that have no others than these, but such.
    fn closed(&self, others: &Value) -> Value {
        match self.all {
            true => true.into(),
            false => json!({
                "properties": self.names,
                "patternProperties": self.patterns,
                "additionalProperties": others,
            }),
        }
    }
}

/// `unevaluatedProperties`, as `additionalProperties` of all that is evaluated.
fn unevaluated<'s>(
    rewriter: &mut Rewriter<'s>,
    place: &Place<'s>,
    others: Value,
    written: &mut Written,
) -> Outcome<()> {
    const KEY: &str = "unevaluatedProperties";
    if others == true || others == json!({}) {
        return Ok(());
    }
    let has = |key: &str| place.value.get(key).is_some_and(|value| !value.is_null());
    let is_branched = has("anyOf") || has("oneOf");
    if let Some(other) = NOT_FOLLOWED
        .into_iter()
        .find(|other| has(other))
        .or_else(|| (has("anyOf") && has("oneOf")).then_some("anyOf and oneOf"))
    {
        let why = format!(
            "it cannot be enforced beside {other}; give additionalProperties in each branch"
        );
        return Err(refused(place, KEY, &why));
    }
    let mut own = Evaluated::default();
    let known = static_of(rewriter, place, 0)?;
    own.add(known);
    if own.all {
        return Ok(());
    }
    if !is_branched {
        if written.all.is_empty() && !has("allOf") && !has("$ref") {
            written.put("additionalProperties", others);
        } else {
            written.all.push(own.closed(&others));
        }
        return Ok(());
    }
    let key = if has("anyOf") { "anyOf" } else { "oneOf" };
    let branches = place.below(key, &place.value[key]);
    let mut closed = Vec::new();
    for (at, branch) in list(place, key, &place.value[key])?.iter().enumerate() {
        let branch = branches.below(&at.to_string(), branch);
        let mut evaluated = own.clone();
        evaluated.add(static_of(rewriter, &branch, 0)?);
        let schema = rewriter.schema(&branch)?;
        closed.push(json!({"allOf": [schema, evaluated.closed(&others)]}));
    }
    written.members.insert(key.to_owned(), closed.into());
    Ok(())
}

/// What a schema evaluates whatever the value is, by itself, its `allOf` and its `$ref`.
fn static_of<'s>(
    rewriter: &mut Rewriter<'s>,
    place: &Place<'s>,
    depth: usize,
) -> Outcome<Evaluated> {
    let mut evaluated = Evaluated::default();
    let Some(members) = place.value.as_object().filter(|_| depth < 32) else {
        return Ok(evaluated);
    };
    for (key, value) in members.iter().filter(|(_, value)| !value.is_null()) {
        match key.as_str() {
            "properties" => {
                let names = value.as_object().into_iter().flat_map(Map::keys);
                evaluated
                    .names
                    .extend(names.map(|name| (name.clone(), true.into())));
            }
            "patternProperties" => {
                let names = value.as_object().into_iter().flat_map(Map::keys);
                evaluated
                    .patterns
                    .extend(names.map(|name| (name.clone(), true.into())));
            }
            "additionalProperties" => evaluated.all = true,
            "unevaluatedProperties" if depth > 0 => evaluated.all = true,
            "allOf" => {
                let all = place.below(key, value);
                for (at, one) in value.as_array().into_iter().flatten().enumerate() {
                    evaluated.add(static_of(
                        rewriter,
                        &all.below(&at.to_string(), one),
                        depth + 1,
                    )?);
                }
            }
            "$ref" => {
                let target = rewriter.referred(place, value)?;
                evaluated.add(static_of(rewriter, &target, depth + 1)?);
            }
            "anyOf" | "oneOf" | "if" | "dependentSchemas" if depth > 0 => {
                let why = format!(
                    "it cannot be enforced above another {key}; give additionalProperties in each branch"
                );
                return Err(refused(place, key, &why));
            }
            _ => {}
        }
    }
    Ok(evaluated)
}
