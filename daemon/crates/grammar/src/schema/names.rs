//! What `propertyNames` says of names, as patterns and lengths.

use serde_json::{Map, Value};

use super::document::types_of;
use super::pattern;

/// What `propertyNames` says of names.
#[derive(Debug, Default)]
pub(super) struct Names {
    pub(super) listed: Option<Vec<String>>,
    patterns: Vec<String>,
    lengths: (u64, Option<u64>),
}

impl Names {
    /// Whether every name is described.
    pub(super) fn is_open(&self) -> bool {
        self.listed.is_none() && self.patterns.is_empty() && self.lengths == (0, None)
    }

    /// Whether the pattern matches this name; `None` if that takes too long to find out.
    pub(super) fn describe(&self, name: &str) -> Option<bool> {
        let length = name.chars().count() as u64;
        let (least, most) = self.lengths;
        let fits = length >= least && most.is_none_or(|most| length <= most);
        let is_listed = self
            .listed
            .as_ref()
            .is_none_or(|listed| listed.iter().any(|one| one == name));
        let matches: Option<Vec<bool>> = self
            .patterns
            .iter()
            .map(|one| pattern::matches(one, name))
            .collect();
        Some(fits && is_listed && matches?.into_iter().all(|is| is))
    }

    /// The pattern that says the same, where one says it all.
    fn only_pattern(&self) -> Option<String> {
        let (least, most) = self.lengths;
        match (self.patterns.as_slice(), self.lengths != (0, None)) {
            ([one], false) => Some(one.clone()),
            ([], true) => {
                let most = most.map(|most| most.to_string()).unwrap_or_default();
                Some(format!("^[\\s\\S]{{{least},{most}}}$"))
            }
            _ => None,
        }
    }

    /// Patterns of the names that are too short or too long.
    fn other_lengths(&self) -> impl Iterator<Item = String> {
        let (least, most) = self.lengths;
        let below = least.checked_sub(1);
        let short = below.map(|below| format!("^[\\s\\S]{{0,{below}}}$"));
        let above = most.and_then(|most| most.checked_add(1));
        let long = above.map(|above| format!("^[\\s\\S]{{{above},}}$"));
        short.into_iter().chain(long)
    }

    /// Of names that are not declared, whose schema is `others`: `patternProperties`, and
    /// `additionalProperties`; nothing where no one pattern says it all.
    pub(super) fn of_others(
        &self,
        others: Value,
        has_declared: bool,
    ) -> Option<(Map<String, Value>, Value)> {
        let mut patterns = Map::new();
        // Declared names are looked at by the caller, and others are none: a pattern that forbids
        // them would forbid the declared ones, too.
        if others == Value::Bool(false) {
            return Some((patterns, others));
        }
        // So would one that describes others by another schema than theirs.
        if has_declared && others != Value::Bool(true) && self.patterns.is_empty() {
            patterns.extend(self.other_lengths().map(|one| (one, false.into())));
            return Some((patterns, others));
        }
        patterns.insert(self.only_pattern()?, others);
        Some((patterns, false.into()))
    }
}

/// Names that a rewritten schema allows: `None` if it allows no string. The error is the keyword
/// that cannot be enforced.
pub(super) fn names_of(schema: &Value) -> Result<Option<Names>, String> {
    let mut names = Names::default();
    let members = match schema {
        Value::Bool(false) => return Ok(None),
        Value::Object(members) => members,
        _ => return Ok(Some(names)),
    };
    for (key, value) in members {
        match key.as_str() {
            "type" if types_of(value).contains(&"string") => {}
            "type" => return Ok(None),
            "enum" | "const" => {
                let one = std::slice::from_ref(value);
                let list = if key == "enum" {
                    value.as_array().map_or(one, Vec::as_slice)
                } else {
                    one
                };
                let texts = list.iter().filter_map(Value::as_str).map(str::to_owned);
                names.listed = Some(texts.collect());
            }
            "pattern" => names.patterns.extend(value.as_str().map(str::to_owned)),
            "minLength" => names.lengths.0 = value.as_u64().unwrap_or(0),
            "maxLength" => names.lengths.1 = value.as_u64(),
            // Keywords of other types say nothing about names, and formats are annotations there.
            "format"
            | "minimum"
            | "maximum"
            | "exclusiveMinimum"
            | "exclusiveMaximum"
            | "multipleOf"
            | "items"
            | "prefixItems"
            | "minItems"
            | "maxItems"
            | "properties"
            | "required"
            | "patternProperties"
            | "additionalProperties" => {}
            other => return Err(other.to_owned()),
        }
    }
    Ok(Some(names))
}
