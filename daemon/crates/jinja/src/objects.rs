//! Values that can be called, with the names that they see, and what loops know of themselves.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::ast::{For, MacroNode, Name};
use crate::fault::{R, fail};
use crate::value::Value;

/// A method of a value.
pub(crate) struct Bound {
    pub(crate) of: Value,
    pub(crate) name: Rc<str>,
}

/// A function that every template has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Function {
    Range,
    Dict,
    Namespace,
    Cycler,
    Joiner,
    RaiseException,
    StrftimeNow,
}

impl Function {
    pub(crate) const ALL: [(&'static str, Function); 7] = [
        ("range", Function::Range),
        ("dict", Function::Dict),
        ("namespace", Function::Namespace),
        ("cycler", Function::Cycler),
        ("joiner", Function::Joiner),
        ("raise_exception", Function::RaiseException),
        ("strftime_now", Function::StrftimeNow),
    ];
}

/// Names with values, within others.
pub(crate) struct Scope {
    names: RefCell<Vec<(Name, Value)>>,
    parent: Option<Rc<Scope>>,
}

impl Scope {
    pub(crate) fn new(parent: Option<&Rc<Scope>>) -> Rc<Scope> {
        Rc::new(Scope {
            names: RefCell::default(),
            parent: parent.cloned(),
        })
    }

    pub(crate) fn set(&self, name: Name, value: Value) {
        let mut names = self.names.borrow_mut();
        match names.iter_mut().find(|(known, _)| *known == name) {
            Some((_, old)) => *old = value,
            None => names.push((name, value)),
        }
    }

    /// Forgets all names, so that macros which are among them and see them are freed.
    pub(crate) fn clear(&self) {
        self.names.take();
    }

    pub(crate) fn get(&self, name: Name) -> Option<Value> {
        let mut scope = self;
        loop {
            let names = scope.names.borrow();
            if let Some((_, value)) = names.iter().find(|(known, _)| *known == name) {
                return Some(value.clone());
            }
            drop(names);
            scope = scope.parent.as_deref()?;
        }
    }
}

/// A macro, with what it sees.
pub(crate) struct Macro {
    pub(crate) node: Rc<MacroNode>,
    pub(crate) scope: Rc<Scope>,
}

/// `loop`.
pub(crate) struct Loop {
    pub(crate) node: Rc<For>,
    /// Where the loop stands, for its test and its recursion.
    pub(crate) scope: Rc<Scope>,
    /// The elements that were not iterated yet.
    pub(crate) rest: RefCell<std::vec::IntoIter<Value>>,
    /// The length that the iterable reported.
    pub(crate) length: Cell<Option<usize>>,
    pub(crate) index0: Cell<i64>,
    pub(crate) depth0: i64,
    pub(crate) after: RefCell<Option<Value>>,
    pub(crate) current: RefCell<Option<Value>>,
    pub(crate) before: RefCell<Option<Value>>,
    pub(crate) changed: RefCell<Option<Vec<Value>>>,
}

impl Loop {
    pub(crate) fn len_known(&self) -> Option<usize> {
        self.length.get()
    }

    /// The length, or that of what is there without a look ahead.
    pub(crate) fn known_length(&self) -> usize {
        self.length.get().unwrap_or_else(|| {
            let rest = self.rest.borrow().as_slice().len();
            rest + usize::try_from(self.index0.get() + 1).unwrap_or(0)
        })
    }
}

/// `cycler(...)`.
pub(crate) struct Cycler {
    pub(crate) items: Vec<Value>,
    pub(crate) at: Cell<usize>,
}

impl Cycler {
    pub(crate) fn of(items: Vec<Value>) -> R<Value> {
        if items.is_empty() {
            return fail("at least one item has to be provided");
        }
        let at = Cell::new(0);
        Ok(Value::Cycler(Rc::new(Cycler { items, at })))
    }

    pub(crate) fn current(&self) -> Value {
        self.items[self.at.get()].clone()
    }

    pub(crate) fn next(&self) -> Value {
        let current = self.current();
        self.at.set((self.at.get() + 1) % self.items.len());
        current
    }
}

/// `joiner(...)`.
pub(crate) struct Joiner {
    pub(crate) separator: Value,
    pub(crate) used: Cell<bool>,
}
