//! Lists that a template changes.
//!
//! minijinja's own cannot be. Templates for `transformers` do without, since it
//! refuses the methods; those that were written for llama.cpp, as Kimi K2's,
//! keep ids of calls in a list. Whatever holds the list sees the change.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use minijinja::value::{Enumerator, Object, ObjectRepr, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// A list of the items of `list` that can be changed.
pub(super) fn changing(list: &Value) -> Result<Value, Error> {
    Ok(List::of(list.try_iter()?.collect()))
}

/// Held by a name or a namespace, and locked by no call longer than it takes
/// to move items: none compares or prints them meanwhile, as a list may be in
/// itself.
#[derive(Debug)]
struct List(Mutex<Vec<Value>>);

impl List {
    fn of(items: Vec<Value>) -> Value {
        Value::from_object(List(Mutex::new(items)))
    }

    fn items(&self) -> MutexGuard<'_, Vec<Value>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Object for List {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.items().get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.items().len())
    }

    fn call_method(
        self: &Arc<Self>,
        _: &mut State,
        method: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        match method {
            "append" => {
                let (item,): (Value,) = from_args(args)?;
                self.items().push(item);
            }
            "extend" => {
                let (more,): (Value,) = from_args(args)?;
                let more: Vec<Value> = more.try_iter()?.collect();
                self.items().extend(more);
            }
            "insert" => {
                let (at, item): (i64, Value) = from_args(args)?;
                let mut items = self.items();
                let at = place(at, items.len()).unwrap_or(0).min(items.len());
                items.insert(at, item);
            }
            "pop" => {
                let (at,): (Option<i64>,) = from_args(args)?;
                let mut items = self.items();
                let at = place(at.unwrap_or(-1), items.len()).filter(|&at| at < items.len());
                let at = at.ok_or_else(|| {
                    Error::new(ErrorKind::InvalidOperation, "pop index out of range")
                })?;
                return Ok(items.remove(at));
            }
            "clear" => {
                let () = from_args(args)?;
                self.items().clear();
            }
            "copy" => {
                let () = from_args(args)?;
                return Ok(List::of(self.items().clone()));
            }
            _ => return Err(Error::from(ErrorKind::UnknownMethod)),
        }
        Ok(Value::from(()))
    }
}

/// The place that an index means, which counts from the end where it is
/// negative; nothing before the first.
fn place(at: i64, len: usize) -> Option<usize> {
    match usize::try_from(at) {
        Ok(at) => Some(at),
        Err(_) => len.checked_sub(usize::try_from(at.unsigned_abs()).ok()?),
    }
}
