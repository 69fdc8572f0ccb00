//! Values, as Python has them.

use std::cell::RefCell;
use std::rc::Rc;

use indexmap::IndexMap;
use serde_json::Value as Json;

use crate::fault::{Fault, R};
use crate::objects::{Bound, Cycler, Function, Joiner, Loop, Macro};

/// A value of a template.
#[derive(Clone)]
pub(crate) enum Value {
    /// An undefined value, with its name for errors.
    Undefined(Rc<str>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Text),
    Bytes(Rc<[u8]>),
    List(Rc<RefCell<Vec<Value>>>),
    Tuple(Rc<[Value]>),
    /// A tuple of two whose members have names: what `groupby` makes.
    Group(Rc<[Value]>),
    Dict(Rc<RefCell<Dict>>),
    /// `keys()`, `values()` or `items()` of a dict.
    View(Rc<RefCell<Dict>>, ViewKind),
    Range(Range),
    /// An iterator, which is used up once.
    Iter(Rc<RefCell<Items>>),
    Namespace(Rc<RefCell<Dict>>),
    Bound(Rc<Bound>),
    Function(Function),
    Macro(Rc<Macro>),
    Loop(Rc<Loop>),
    Cycler(Rc<Cycler>),
    Joiner(Rc<Joiner>),
}

/// The remaining items of an iterator, with its type's name in Python.
pub(crate) struct Items {
    pub(crate) rest: std::vec::IntoIter<Value>,
    pub(crate) kind: &'static str,
}

/// A string. One that is safe is not escaped again.
#[derive(Clone)]
pub(crate) struct Text {
    pub(crate) text: Rc<str>,
    pub(crate) safe: bool,
}

/// What a view shows of a dict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ViewKind {
    Keys,
    Values,
    Items,
}

/// A range of whole numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Range {
    pub(crate) start: i128,
    pub(crate) stop: i128,
    pub(crate) step: i128,
}

impl Range {
    pub(crate) fn len(self) -> usize {
        let span = match self.step > 0 {
            true => self.stop - self.start,
            false => self.start - self.stop,
        };
        let step = self.step.abs();
        usize::try_from(((span + step - 1) / step).max(0)).unwrap_or(usize::MAX)
    }

    pub(crate) fn get(self, at: usize) -> i128 {
        self.start + self.step * at as i128
    }
}

/// What a key of a dict is by: equal keys are one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Key {
    None,
    Int(i128),
    Float(u64),
    Str(Rc<str>),
    Bytes(Rc<[u8]>),
    Tuple(Vec<Key>),
    /// An object, by its place.
    Object(usize),
}

/// A dict, in the order of its insertions.
#[derive(Clone, Default)]
pub(crate) struct Dict {
    entries: IndexMap<Key, (Value, Value)>,
}

impl Dict {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn get(&self, key: &Value) -> R<Option<Value>> {
        Ok(self
            .entries
            .get(&Key::of(key)?)
            .map(|(_, value)| value.clone()))
    }

    pub(crate) fn get_str(&self, key: &str) -> Option<Value> {
        // A key of its own is made, since a borrowed one would need another type.
        let key = Key::Str(key.into());
        self.entries.get(&key).map(|(_, value)| value.clone())
    }

    pub(crate) fn insert(&mut self, key: Value, value: Value) -> R<()> {
        let by = Key::of(&key)?;
        match self.entries.get_mut(&by) {
            Some(entry) => entry.1 = value,
            None => {
                self.entries.insert(by, (key, value));
            }
        }
        Ok(())
    }

    pub(crate) fn insert_str(&mut self, key: &str, value: Value) {
        let text: Rc<str> = key.into();
        let name = Value::text(Rc::clone(&text));
        self.entries.insert(Key::Str(text), (name, value));
    }

    pub(crate) fn remove(&mut self, key: &Value) -> R<Option<Value>> {
        Ok(self
            .entries
            .shift_remove(&Key::of(key)?)
            .map(|(_, value)| value))
    }

    pub(crate) fn pop_last(&mut self) -> Option<(Value, Value)> {
        self.entries.pop().map(|(_, entry)| entry)
    }

    pub(crate) fn clear(&mut self) {
        self.entries.clear();
    }

    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = (&Value, &Value)> {
        self.entries.values().map(|(key, value)| (key, value))
    }
}

impl Key {
    pub(crate) fn of(value: &Value) -> R<Key> {
        Ok(match value {
            Value::None => Key::None,
            Value::Bool(b) => Key::Int(i128::from(*b)),
            Value::Int(n) => Key::Int(*n),
            // Below this every whole float is an integer of 128 bits.
            Value::Float(x) if x.fract() == 0.0 && x.abs() < 1e38 => Key::Int(*x as i128),
            Value::Float(x) => Key::Float(x.to_bits()),
            Value::Str(text) => Key::Str(Rc::clone(&text.text)),
            Value::Bytes(bytes) => Key::Bytes(Rc::clone(bytes)),
            Value::Tuple(items) | Value::Group(items) => {
                Key::Tuple(items.iter().map(Key::of).collect::<R<_>>()?)
            }
            Value::Undefined(_) => Key::Object(1),
            Value::Range(range) => Key::Tuple(vec![
                Key::Int(range.start),
                Key::Int(range.len() as i128),
                Key::Int(range.step),
                Key::Object(2),
            ]),
            Value::Macro(it) => Key::Object(Rc::as_ptr(it).addr()),
            Value::Loop(it) => Key::Object(Rc::as_ptr(it).addr()),
            Value::Cycler(it) => Key::Object(Rc::as_ptr(it).addr()),
            Value::Joiner(it) => Key::Object(Rc::as_ptr(it).addr()),
            Value::Namespace(it) => Key::Object(Rc::as_ptr(it).addr()),
            Value::Iter(it) => Key::Object(Rc::as_ptr(it).addr()),
            Value::Bound(it) => Key::Object(Rc::as_ptr(it).addr()),
            Value::Function(it) => Key::Object(*it as usize + 3),
            Value::List(_) | Value::Dict(_) | Value::View(..) => {
                return Err(Fault::new(format!(
                    "unhashable type: '{}'",
                    value.type_name()
                )));
            }
        })
    }
}

impl Value {
    pub(crate) fn text(text: impl Into<Rc<str>>) -> Value {
        Value::Str(Text {
            text: text.into(),
            safe: false,
        })
    }

    pub(crate) fn safe(text: impl Into<Rc<str>>) -> Value {
        Value::Str(Text {
            text: text.into(),
            safe: true,
        })
    }

    pub(crate) fn list(items: Vec<Value>) -> Value {
        Value::List(Rc::new(RefCell::new(items)))
    }

    pub(crate) fn tuple(items: impl Into<Rc<[Value]>>) -> Value {
        Value::Tuple(items.into())
    }

    pub(crate) fn dict(dict: Dict) -> Value {
        Value::Dict(Rc::new(RefCell::new(dict)))
    }

    /// An iterator over `items`, called `kind`.
    pub(crate) fn iter(items: Vec<Value>, kind: &'static str) -> Value {
        let rest = items.into_iter();
        Value::Iter(Rc::new(RefCell::new(Items { rest, kind })))
    }

    pub(crate) fn undefined(why: impl Into<Rc<str>>) -> Value {
        Value::Undefined(why.into())
    }

    pub(crate) fn count(n: usize) -> Value {
        Value::Int(n as i128)
    }

    pub(crate) fn as_str(&self) -> Option<&str> {
        match self {
            Value::Str(text) => Some(&text.text),
            _ => None,
        }
    }

    /// A whole number: Python takes booleans for them, too.
    pub(crate) fn as_int(&self) -> Option<i128> {
        match self {
            Value::Int(n) => Some(*n),
            Value::Bool(b) => Some(i128::from(*b)),
            _ => None,
        }
    }

    pub(crate) fn as_float(&self) -> Option<f64> {
        match self {
            Value::Float(x) => Some(*x),
            other => other.as_int().map(|n| n as f64),
        }
    }

    pub(crate) fn is_undefined(&self) -> bool {
        matches!(self, Value::Undefined(_))
    }

    pub(crate) fn is_none(&self) -> bool {
        matches!(self, Value::None)
    }

    /// The name of the type.
    pub(crate) fn type_name(&self) -> &'static str {
        match self {
            Value::Undefined(_) => "Undefined",
            Value::None => "NoneType",
            Value::Bool(_) => "bool",
            Value::Int(_) => "int",
            Value::Float(_) => "float",
            Value::Str(text) if text.safe => "Markup",
            Value::Str(_) => "str",
            Value::Bytes(_) => "bytes",
            Value::List(_) => "list",
            Value::Tuple(_) => "tuple",
            Value::Group(_) => "_GroupTuple",
            Value::Dict(_) => "dict",
            Value::View(_, ViewKind::Keys) => "dict_keys",
            Value::View(_, ViewKind::Values) => "dict_values",
            Value::View(_, ViewKind::Items) => "dict_items",
            Value::Range(_) => "range",
            Value::Iter(items) => items.borrow().kind,
            Value::Namespace(_) => "Namespace",
            Value::Bound(_) => "builtin_function_or_method",
            Value::Function(_) => "function",
            Value::Macro(_) => "Macro",
            Value::Loop(_) => "LoopContext",
            Value::Cycler(_) => "Cycler",
            Value::Joiner(_) => "Joiner",
        }
    }

    pub(crate) fn is_true(&self) -> bool {
        match self {
            Value::Undefined(_) | Value::None => false,
            Value::Bool(b) => *b,
            Value::Int(n) => *n != 0,
            Value::Float(x) => *x != 0.0,
            Value::Str(text) => !text.text.is_empty(),
            Value::Loop(it) => it.len_known() != Some(0),
            other => other.len() != Some(0),
        }
    }

    /// What `len` gives; nothing where a value has no length.
    pub(crate) fn len(&self) -> Option<usize> {
        Some(match self {
            Value::Undefined(_) => 0,
            Value::Str(text) => match text.text.is_ascii() {
                true => text.text.len(),
                false => text.text.chars().count(),
            },
            Value::Bytes(bytes) => bytes.len(),
            Value::List(list) => list.borrow().len(),
            Value::Tuple(items) | Value::Group(items) => items.len(),
            Value::Dict(dict) | Value::View(dict, _) => dict.borrow().len(),
            Value::Range(range) => range.len(),
            _ => return None,
        })
    }

    /// The items that a loop goes through. An iterator gives what is left of it.
    pub(crate) fn items(&self) -> R<Vec<Value>> {
        Ok(match self {
            Value::Undefined(_) => Vec::new(),
            Value::Str(text) => {
                let char = |c: char| Value::text(&*c.encode_utf8(&mut [0; 4]));
                text.text.chars().map(char).collect()
            }
            Value::Bytes(bytes) => bytes.iter().map(|b| Value::Int(i128::from(*b))).collect(),
            Value::List(list) => list.borrow().clone(),
            Value::Tuple(items) | Value::Group(items) => items.to_vec(),
            Value::Dict(dict) => dict.borrow().iter().map(|(key, _)| key.clone()).collect(),
            Value::View(dict, kind) => {
                let dict = dict.borrow();
                let shown = |(key, value): (&Value, &Value)| match kind {
                    ViewKind::Keys => key.clone(),
                    ViewKind::Values => value.clone(),
                    ViewKind::Items => Value::tuple([key.clone(), value.clone()]),
                };
                dict.iter().map(shown).collect()
            }
            Value::Range(range) => (0..range.len())
                .map(|at| Value::Int(range.get(at)))
                .collect(),
            Value::Iter(items) => {
                let mut items = items.borrow_mut();
                std::mem::take(&mut items.rest).collect()
            }
            other => return Err(other.not_iterable()),
        })
    }

    pub(crate) fn not_iterable(&self) -> Fault {
        Fault::new(format!("'{}' object is not iterable", self.type_name()))
    }

    /// The value of a JSON document.
    pub(crate) fn of_json(json: &Json) -> Value {
        match json {
            Json::Null => Value::None,
            Json::Bool(b) => Value::Bool(*b),
            Json::Number(n) => match (n.as_i64(), n.as_u64()) {
                (Some(n), _) => Value::Int(n.into()),
                (None, Some(n)) => Value::Int(n.into()),
                (None, None) => Value::Float(n.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(text) => Value::text(text.as_str()),
            Json::Array(list) => Value::list(list.iter().map(Value::of_json).collect()),
            Json::Object(map) => {
                let mut dict = Dict::default();
                for (key, value) in map {
                    dict.insert_str(key, Value::of_json(value));
                }
                Value::dict(dict)
            }
        }
    }
}

impl From<bool> for Value {
    fn from(b: bool) -> Value {
        Value::Bool(b)
    }
}

impl From<String> for Value {
    fn from(text: String) -> Value {
        Value::text(text)
    }
}
