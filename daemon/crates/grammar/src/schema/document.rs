//! The places of a schema's document, and what references find there.
//!
//! A reference is resolved against the base of the schema that has it (`$id`), then by what follows
//! `#`: nothing, a JSON pointer (RFC 6901) or an anchor. Nothing outside of the document is read.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value};

/// Keywords whose value is data, in which no schema stands.
const DATA: [&str; 5] = ["enum", "const", "default", "examples", "example"];

/// A schema's document with what can be referred to by name.
#[derive(Debug)]
pub(super) struct Document<'s> {
    root: &'s Value,
    /// Schemas that have an `$id`, by the absolute one.
    resources: HashMap<String, Place<'s>>,
    /// Anchors of the document, by base URI and name.
    anchors: HashMap<(String, String), Place<'s>>,
    /// How many schemas have a `$dynamicAnchor` of this name.
    dynamic: BTreeMap<String, usize>,
    /// Keywords beside `$ref` are ignored.
    pub(super) ref_stands_alone: bool,
}

/// A schema in its document.
#[derive(Debug, Clone)]
pub(super) struct Place<'s> {
    pub(super) value: &'s Value,
    /// Place of the schema, as a JSON pointer behind `#`.
    pub(super) pointer: String,
    /// What references in it are relative to.
    pub(super) base: String,
}

impl<'s> Place<'s> {
    /// A value below it, which may be a schema with a base of its own.
    pub(super) fn below(&self, key: &str, value: &'s Value) -> Self {
        let pointer = format!("{}/{}", self.pointer, escaped(key));
        let base = base_of(&self.base, value);
        Self {
            value,
            pointer,
            base,
        }
    }
}

impl<'s> Document<'s> {
    pub(super) fn new(root: &'s Value) -> Self {
        let draft = root["$schema"].as_str().unwrap_or_default();
        let mut document = Self {
            root,
            resources: HashMap::new(),
            anchors: HashMap::new(),
            dynamic: BTreeMap::new(),
            ref_stands_alone: draft.contains("json-schema.org/draft-0"),
        };
        document.index(document.root());
        document
    }

    /// The whole of it.
    pub(super) fn root(&self) -> Place<'s> {
        let base = base_of("", self.root);
        Place {
            value: self.root,
            pointer: "#".to_owned(),
            base,
        }
    }

    fn index(&mut self, place: Place<'s>) {
        match place.value {
            Value::Object(members) => {
                self.name(&place, members);
                for (key, value) in members
                    .iter()
                    .filter(|(key, _)| !DATA.contains(&key.as_str()))
                {
                    self.index(place.below(key, value));
                }
            }
            Value::Array(list) => {
                for (at, value) in list.iter().enumerate() {
                    self.index(place.below(&at.to_string(), value));
                }
            }
            _ => {}
        }
    }

    /// Takes the names that a schema gives itself. The first of a name counts.
    fn name(&mut self, place: &Place<'s>, members: &Map<String, Value>) {
        if let Some(id) = id_of(place.value) {
            // In drafts before 2019-09 an id that is only a fragment is an anchor.
            match id.strip_prefix('#').filter(|name| !name.is_empty()) {
                Some(name) => self.anchor(place, name),
                None => {
                    let id = place.base.clone();
                    self.resources.entry(id).or_insert_with(|| place.clone());
                }
            }
        }
        if let Some(name) = members.get("$anchor").and_then(Value::as_str) {
            self.anchor(place, name);
        }
        if let Some(name) = members.get("$dynamicAnchor").and_then(Value::as_str) {
            self.anchor(place, name);
            *self.dynamic.entry(name.to_owned()).or_default() += 1;
        }
    }

    fn anchor(&mut self, place: &Place<'s>, name: &str) {
        let key = (place.base.clone(), name.to_owned());
        self.anchors.entry(key).or_insert_with(|| place.clone());
    }

    /// Whether more than one schema may be meant by a dynamic reference.
    pub(super) fn is_ambiguous(&self, reference: &str) -> bool {
        let name = reference.rsplit_once('#').map_or("", |(_, name)| name);
        self.dynamic.get(name).is_some_and(|&n| n > 1)
    }

    /// What a reference in a schema with this base finds.
    pub(super) fn find(&self, base: &str, reference: &str) -> Option<Place<'s>> {
        let whole = resolved(base, reference);
        let (resource, fragment) = whole.split_once('#').unwrap_or((&whole, ""));
        let fragment = percent_decoded(fragment)?;
        let root = self.root();
        let from = match self.resources.get(resource) {
            Some(place) => place.clone(),
            None if resource == root.base || resource.is_empty() => root.clone(),
            None => return None,
        };
        if fragment.is_empty() {
            return Some(from);
        }
        let Some(pointer) = fragment.strip_prefix('/') else {
            let anchor = |base: &str| self.anchors.get(&(base.to_owned(), fragment.clone()));
            return anchor(&from.base).cloned();
        };
        let below = |from: &Place<'s>| {
            let parts = pointer.split('/');
            parts.into_iter().try_fold(from.clone(), |place, part| {
                let key = part.replace("~1", "/").replace("~0", "~");
                let value = match place.value {
                    Value::Object(members) => members.get(&key)?,
                    Value::Array(list) => list.get(key.parse::<usize>().ok()?)?,
                    _ => return None,
                };
                Some(place.below(&key, value))
            })
        };
        // `#/` is the root for some that write it, and a member without a name for others. What
        // stands in a schema with an id of its own is often meant from the root.
        let from_root = || {
            (pointer.is_empty())
                .then(|| root.clone())
                .or_else(|| below(&root))
        };
        below(&from).or_else(from_root)
    }
}

/// What references in a schema are relative to, which stands where they are relative to `base`. In
/// older drafts an id that is only a fragment is an anchor.
fn base_of(base: &str, value: &Value) -> String {
    match id_of(value).filter(|id| !id.starts_with('#')) {
        Some(id) => resolved(base, id),
        None => base.to_owned(),
    }
}

/// The id of a schema that has one.
fn id_of(value: &Value) -> Option<&str> {
    let members = value.as_object()?;
    let id = members.get("$id").or_else(|| members.get("id"))?;
    id.as_str().filter(|id| !id.is_empty())
}

/// A reference, made absolute (RFC 3986, section 5.2, without dot segments in the middle).
fn resolved(base: &str, reference: &str) -> String {
    let base = base.split_once('#').map_or(base, |(base, _)| base);
    if reference.is_empty() || reference.starts_with('#') {
        return format!("{base}{reference}");
    }
    let scheme = |text: &str| {
        let end = text.find(|c: char| !(c.is_ascii_alphanumeric() || "+-.".contains(c)));
        end.filter(|&at| at > 0 && text[at..].starts_with(':'))
    };
    let has_scheme = scheme(reference).is_some();
    let Some(at) = scheme(base).filter(|_| !has_scheme) else {
        let before = base
            .rfind('/')
            .filter(|_| !has_scheme && !reference.starts_with('/'));
        return trimmed(format!(
            "{}{reference}",
            &base[..before.map_or(0, |at| at + 1)]
        ));
    };
    if reference.starts_with("//") {
        return trimmed(format!("{}{reference}", &base[..=at]));
    }
    let authority = match base[at + 1..].strip_prefix("//") {
        Some(rest) => at + 3 + rest.find('/').unwrap_or(rest.len()),
        None => at + 1,
    };
    let path = match reference.starts_with('/') {
        true => authority,
        false => base[authority..]
            .rfind('/')
            .map_or(authority, |n| authority + n + 1),
    };
    let slash = path == base.len() && !reference.starts_with('/') && authority == base.len();
    let between = if slash { "/" } else { "" };
    let reference = reference.strip_prefix("./").unwrap_or(reference);
    trimmed(format!("{}{between}{reference}", &base[..path]))
}

/// Without an empty fragment, which says nothing.
fn trimmed(mut uri: String) -> String {
    if uri.ends_with('#') {
        uri.pop();
    }
    uri
}

/// A name as a part of a JSON pointer.
pub(super) fn escaped(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

/// The text that percent signs stand for; nothing if it is none.
fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || char::from(rest.next()?).to_digit(16);
        bytes.push((digit()? * 16 + digit()?) as u8);
    }
    String::from_utf8(bytes).ok()
}

/// The names of types in a `type` that was checked.
pub(super) fn types_of(value: &Value) -> Vec<&str> {
    match value {
        Value::Array(list) => list.iter().filter_map(Value::as_str).collect(),
        one => one.as_str().into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_made_absolute_as_rfc_3986_says() {
        for (base, reference, expected) in [
            ("", "#/a", "#/a"),
            ("", "b.json#/a", "b.json#/a"),
            ("http://h/a/b.json", "c.json", "http://h/a/c.json"),
            ("http://h/a/b.json", "/c.json#x", "http://h/c.json#x"),
            ("http://h/a/b.json#y", "#x", "http://h/a/b.json#x"),
            ("http://h", "c", "http://h/c"),
            ("http://h/a", "//k/c", "http://k/c"),
            ("http://h/a", "https://k/c#", "https://k/c"),
            ("urn:x:y", "#a", "urn:x:y#a"),
            ("a/b.json", "c.json", "a/c.json"),
        ] {
            assert_eq!(resolved(base, reference), expected, "{base} {reference}");
        }
    }
}
