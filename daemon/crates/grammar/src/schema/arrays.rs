//! Keywords of arrays, in the words that are enforced: `items`, `prefixItems`, lengths.

use serde_json::{Map, Value, json};

use super::document::Place;
use super::negate::any_of;
use super::rewriter::{Outcome, Rewriter, Written, refused, whole_number};

/// Places at which an item of `contains` is looked for.
const CONTAINS_MAX: u64 = 16;
/// Maximum number of values of items that are all different.
const UNIQUE_MAX: usize = 4;
/// Keywords beside which other items may be evaluated.
const OTHERS: [&str; 8] = [
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
    "allOf",
    "anyOf",
    "oneOf",
    "if",
    "contains",
];

/// Writes a keyword that says something by itself.
pub(super) fn keyword<'s>(
    rewriter: &mut Rewriter<'s>,
    place: &Place<'s>,
    members: &'s Map<String, Value>,
    key: &str,
    said: &Place<'s>,
    written: &mut Written,
) -> Outcome<()> {
    match key {
        "items" if said.value.is_array() => {
            let first = rewriter.schemas(said)?;
            written.put("prefixItems", first.into());
            if let Some(more) = members
                .get("additionalItems")
                .filter(|more| !more.is_null())
            {
                let more = rewriter.schema(&place.below("additionalItems", more))?;
                written.put("items", more);
            }
        }
        "items" => {
            let items = rewriter.schema(said)?;
            written.put(key, items);
        }
        "prefixItems" => {
            let first = rewriter.schemas(said)?;
            written.put(key, first.into());
        }
        "unevaluatedItems" => {
            let more = rewriter.schema(said)?;
            if is_any(&more)
                || members
                    .get("items")
                    .is_some_and(|items| !items.is_null() && !items.is_array())
            {
                return Ok(());
            }
            if let Some(other) = OTHERS.iter().find(|other| members.contains_key(**other)) {
                let why = format!(
                    "{key} cannot be enforced beside {other}; give items and prefixItems here"
                );
                return Err(refused(place, key, &why));
            }
            written.put("items", more);
        }
        _ => {}
    }
    Ok(())
}

/// Writes the keywords that depend on others.
pub(super) fn finish<'s>(
    rewriter: &mut Rewriter<'s>,
    place: &Place<'s>,
    written: &mut Written,
) -> Outcome<()> {
    let get = |key: &str| place.value.get(key).filter(|value| !value.is_null());
    if let Some(contained) = get("contains") {
        let contained = rewriter.schema(&place.below("contains", contained))?;
        let count = |key: &str| get(key).map(|n| whole_number(place, key, n)).transpose();
        contains(
            place,
            &contained,
            count("minContains")?,
            count("maxContains")?,
            written,
        )?;
    }
    match get("uniqueItems") {
        Some(Value::Bool(true)) => unique(rewriter, place, written),
        None | Some(Value::Bool(false)) => Ok(()),
        Some(other) => {
            let why = format!("{other} is neither true nor false; give one of them");
            Err(refused(place, "uniqueItems", &why))
        }
    }
}

fn is_any(schema: &Value) -> bool {
    *schema == true || *schema == json!({})
}

fn contains(
    place: &Place<'_>,
    contained: &Value,
    least: Option<u64>,
    most: Option<u64>,
    written: &mut Written,
) -> Outcome<()> {
    let least = least.unwrap_or(1);
    let is_every = is_any(contained)
        || written.members.get("items") == Some(contained)
            && !written.members.contains_key("prefixItems");
    if is_every {
        let bound = |key: &str, n: u64| json!({"type": "array", key: n});
        let mut all = vec![bound("minItems", least)];
        all.extend(most.map(|most| bound("maxItems", most)));
        written
            .all
            .push(json!({"anyOf": [{"allOf": all}, {"type": other_types()}]}));
        return Ok(());
    }
    if let Some(most) = most {
        let why = format!("maxContains {most} cannot be enforced; leave it out");
        return Err(refused(place, "maxContains", &why));
    }
    match least {
        0 => return Ok(()),
        1 => {}
        n => {
            let why = format!("minContains {n} cannot be enforced; give at most 1");
            return Err(refused(place, "minContains", &why));
        }
    }
    let places = written.members.get("maxItems").and_then(Value::as_u64);
    let at = |n: u64| {
        let mut first = vec![Value::Bool(true); n as usize];
        first.push(contained.clone());
        json!({"type": "array", "prefixItems": first, "minItems": n + 1})
    };
    let mut any: Vec<Value> = (0..places.unwrap_or(CONTAINS_MAX).min(CONTAINS_MAX))
        .map(at)
        .collect();
    any.push(json!({"type": other_types()}));
    written.all.push(any_of(any));
    Ok(())
}

fn other_types() -> Vec<&'static str> {
    super::negate::TYPES
        .into_iter()
        .filter(|name| *name != "array")
        .collect()
}

/// Items that are all different: none, one, or those of a few values in every order.
fn unique<'s>(
    rewriter: &mut Rewriter<'s>,
    place: &Place<'s>,
    written: &mut Written,
) -> Outcome<()> {
    let most = written.members.get("maxItems").and_then(Value::as_u64);
    if most.is_some_and(|most| most <= 1) {
        return Ok(());
    }
    let items = place.value.get("items").filter(|items| items.is_object());
    let items = match items {
        Some(items) => {
            let items = rewriter.followed(&place.below("items", items))?;
            Some(rewriter.schema(&items)?)
        }
        None => None,
    };
    let values = items.as_ref().and_then(values_of);
    let values = values.filter(|values| values.len() <= UNIQUE_MAX);
    let (Some(values), None) = (values, written.members.get("prefixItems")) else {
        let why =
            "it cannot be enforced for items like these; leave it out, and drop what comes twice";
        return Err(refused(place, "uniqueItems", why));
    };
    rewriter.count_unique(place, bytes_of_orders(&values))?;
    let mut orders: Vec<Vec<Value>> = vec![Vec::new()];
    let mut from = 0;
    while from < orders.len() {
        let more: Vec<Vec<Value>> = (values.iter())
            .filter(|value| !orders[from].contains(value))
            .map(|value| [&orders[from][..], std::slice::from_ref(value)].concat())
            .collect();
        orders.extend(more);
        from += 1;
    }
    let mut any: Vec<Value> = orders
        .into_iter()
        .map(|order| json!({"const": order}))
        .collect();
    any.push(json!({"type": other_types()}));
    written.all.push(any_of(any));
    Ok(())
}

/// Bytes of the text of all lists of different ones of these values.
fn bytes_of_orders(values: &[Value]) -> usize {
    // Each value stands in this many lists, of which there are as many as this with the lists of a
    // value less: every list begins with one of the values, if it has any.
    let (mut lists, mut with_one) = (1, 0);
    for n in 1..=values.len() {
        with_one = lists + (n - 1) * with_one;
        lists = 1 + n * lists;
    }
    let text: usize = values.iter().map(|value| value.to_string().len()).sum();
    // And brackets and commas.
    with_one * (text + values.len()) + 2 * lists
}

/// The values that a schema lists.
fn values_of(schema: &Value) -> Option<Vec<Value>> {
    if let Value::Array(branches) = &schema["anyOf"] {
        let each: Option<Vec<_>> = branches.iter().map(values_of).collect();
        return each.map(|values| values.concat());
    }
    let mut values = match (
        &schema["enum"],
        schema.get("const"),
        schema["type"].as_str(),
    ) {
        (Value::Array(list), ..) => list.clone(),
        (_, Some(one), _) => vec![one.clone()],
        (.., Some("boolean")) => vec![true.into(), false.into()],
        (.., Some("null")) => vec![Value::Null],
        _ => return None,
    };
    let mut seen = Vec::new();
    values.retain(|value| {
        let is_new = !seen.contains(value);
        seen.push(value.clone());
        is_new
    });
    Some(values)
}
