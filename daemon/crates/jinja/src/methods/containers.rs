//! Methods of lists, tuples and dicts.

use std::cell::RefCell;
use std::rc::Rc;

use crate::access;
use crate::args::{self, Args};
use crate::compare;
use crate::fault::{Fault, R, fail};
use crate::operators::sized;
use crate::value::{Dict, Value, ViewKind};

/// A method of a list. What changes it changes it for whoever holds it; `transformers` refuses
/// these, and templates that were written for other programs need them.
pub(super) fn list(list: &Rc<RefCell<Vec<Value>>>, name: &str, args: Args) -> R<Value> {
    match name {
        "append" => {
            let items = args.only(name, 1, 1)?;
            list.borrow_mut().extend(items);
            sized(list.borrow().len())?;
        }
        "extend" => {
            let more = args.only(name, 1, 1)?[0].items()?;
            sized(list.borrow().len() + more.len())?;
            list.borrow_mut().extend(more);
        }
        "insert" => {
            let given = args.only(name, 2, 2)?;
            let mut items = list.borrow_mut();
            let len = items.len() as i128;
            let at = args::int(&given[0])?;
            let at = if at < 0 { at.saturating_add(len) } else { at }.clamp(0, len);
            items.insert(at as usize, given[1].clone());
        }
        "pop" => {
            let given = args.only(name, 0, 1)?;
            let at = given.first().map_or(Ok(-1), args::int)?;
            let len = list.borrow().len() as i128;
            if len == 0 {
                return fail("pop from empty list");
            }
            let at = if at < 0 { at.saturating_add(len) } else { at };
            return match (0..len).contains(&at) {
                true => Ok(list.borrow_mut().remove(at as usize)),
                false => fail("pop index out of range"),
            };
        }
        "remove" => {
            let given = args.only(name, 1, 1)?;
            let at = place_of(&list.borrow(), &given[0])?;
            let at = at.ok_or_else(|| Fault::new("list.remove(x): x not in list"))?;
            list.borrow_mut().remove(at);
        }
        "clear" => {
            args.none(name)?;
            list.borrow_mut().clear();
        }
        "reverse" => {
            args.none(name)?;
            list.borrow_mut().reverse();
        }
        "sort" => {
            let [key, reverse] = args.bind("sort", ["key", "reverse"], 0)?;
            if args::some(key).is_some() {
                return fail("sort() with a key is not supported; use the filter sort");
            }
            let items = list.borrow().clone();
            let mut keyed: Vec<_> = items.into_iter().map(|item| (item.clone(), item)).collect();
            compare::sort_by_keys(&mut keyed, args::flag(reverse.as_ref()))?;
            *list.borrow_mut() = keyed.into_iter().map(|(_, item)| item).collect();
        }
        "copy" => {
            args.none(name)?;
            return Ok(Value::list(list.borrow().clone()));
        }
        _ => {
            let items = list.borrow().clone();
            return sequence(&items, "list", name, args);
        }
    }
    Ok(Value::None)
}

fn place_of(items: &[Value], value: &Value) -> R<Option<usize>> {
    for (at, item) in items.iter().enumerate() {
        if compare::equal(item, value)? {
            return Ok(Some(at));
        }
    }
    Ok(None)
}

/// `count` and `index` of anything with items.
pub(super) fn sequence(items: &[Value], kind: &str, name: &str, args: Args) -> R<Value> {
    if name == "count" {
        let given = args.only(name, 1, 1)?;
        let mut n = 0;
        for item in items {
            n += usize::from(compare::equal(item, &given[0])?);
        }
        return Ok(Value::count(n));
    }
    let given = args.only(name, 1, 3)?;
    let len = items.len() as i128;
    let bound = |at: usize, or: i128| -> R<usize> {
        let at = given.get(at).map_or(Ok(or), args::int)?;
        let at = if at < 0 { at.saturating_add(len) } else { at };
        Ok(at.clamp(0, len) as usize)
    };
    let (begin, end) = (bound(1, 0)?, bound(2, len)?);
    let found = place_of(items.get(begin..end).unwrap_or_default(), &given[0])?;
    match found {
        Some(at) => Ok(Value::count(begin + at)),
        None => fail(format!("{kind}.index(x): x not in {kind}")),
    }
}

/// A method of a dict.
pub(super) fn dict(dict: &Rc<RefCell<Dict>>, name: &str, args: Args) -> R<Value> {
    let view = |kind| Value::View(Rc::clone(dict), kind);
    match name {
        "keys" | "values" | "items" => {
            args.none(name)?;
            Ok(view(match name {
                "keys" => ViewKind::Keys,
                "values" => ViewKind::Values,
                _ => ViewKind::Items,
            }))
        }
        "get" => {
            let given = args.only(name, 1, 2)?;
            let found = dict.borrow().get(&given[0])?;
            Ok(found.unwrap_or_else(|| given.get(1).cloned().unwrap_or(Value::None)))
        }
        "copy" => {
            args.none(name)?;
            Ok(Value::dict(dict.borrow().clone()))
        }
        "fromkeys" => {
            let given = args.only(name, 1, 2)?;
            let value = given.get(1).cloned().unwrap_or(Value::None);
            let mut made = Dict::default();
            for key in given[0].items()? {
                made.insert(key, value.clone())?;
            }
            Ok(Value::dict(made))
        }
        "pop" => {
            let given = args.only(name, 1, 2)?;
            let removed = dict.borrow_mut().remove(&given[0])?;
            match removed.or_else(|| given.get(1).cloned()) {
                Some(value) => Ok(value),
                None => fail(crate::repr::repr(&given[0])?),
            }
        }
        "popitem" => {
            args.none(name)?;
            match dict.borrow_mut().pop_last() {
                Some((key, value)) => Ok(Value::tuple([key, value])),
                None => fail("'popitem(): dictionary is empty'"),
            }
        }
        "setdefault" => {
            let given = args.only(name, 1, 2)?;
            let found = dict.borrow().get(&given[0])?;
            match found {
                Some(value) => Ok(value),
                None => {
                    let value = given.get(1).cloned().unwrap_or(Value::None);
                    dict.borrow_mut().insert(given[0].clone(), value.clone())?;
                    Ok(value)
                }
            }
        }
        "update" => {
            let more = access::dict_of(args)?;
            for (key, value) in more.iter() {
                dict.borrow_mut().insert(key.clone(), value.clone())?;
            }
            Ok(Value::None)
        }
        _ => {
            args.none(name)?;
            dict.borrow_mut().clear();
            Ok(Value::None)
        }
    }
}

/// `isdisjoint` of a view.
pub(super) fn view(value: &Value, args: Args) -> R<Value> {
    let given = args.only("isdisjoint", 1, 1)?;
    for item in given[0].items()? {
        if compare::contains(value, &item)? {
            return Ok(Value::Bool(false));
        }
    }
    Ok(Value::Bool(true))
}
