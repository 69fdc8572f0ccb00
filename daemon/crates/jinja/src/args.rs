//! Arguments of calls, and how functions take them.

use std::rc::Rc;

use crate::fault::{R, fail};
use crate::value::Value;

/// The arguments of a call.
#[derive(Default, Clone)]
pub(crate) struct Args {
    pub(crate) positional: Vec<Value>,
    pub(crate) named: Vec<(Rc<str>, Value)>,
}

impl Args {
    pub(crate) fn of(positional: Vec<Value>) -> Args {
        Args {
            positional,
            named: Vec::new(),
        }
    }

    /// Takes an argument by its name.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        let at = self.named.iter().position(|(given, _)| &**given == name)?;
        Some(self.named.remove(at).1)
    }

    /// The arguments of parameters with these names, of which the first `required` must be there.
    ///
    /// # Errors
    ///
    /// If one is missing, twice there, or of another name.
    pub(crate) fn bind<const N: usize>(
        self,
        function: &str,
        names: [&str; N],
        required: usize,
    ) -> R<[Option<Value>; N]> {
        let given = self.positional.len();
        if given > N {
            return fail(format!(
                "{function}() takes at most {N} arguments ({given} given)"
            ));
        }
        let mut bound = [const { None }; N];
        for (place, value) in bound.iter_mut().zip(self.positional) {
            *place = Some(value);
        }
        for (name, value) in self.named {
            match names.iter().position(|known| *known == &*name) {
                Some(at) if bound[at].is_none() => bound[at] = Some(value),
                Some(_) => {
                    return fail(format!(
                        "{function}() got multiple values for argument '{name}'"
                    ));
                }
                None => {
                    return fail(format!(
                        "{function}() got an unexpected keyword argument '{name}'"
                    ));
                }
            }
        }
        for (name, value) in names.iter().zip(&bound).take(required) {
            if value.is_none() {
                return fail(format!("{function}() missing required argument: '{name}'"));
            }
        }
        Ok(bound)
    }

    /// Checks that a call has no arguments.
    ///
    /// # Errors
    ///
    /// If there is one.
    pub(crate) fn none(self, function: &str) -> R<()> {
        self.bind::<0>(function, [], 0).map(drop)
    }

    /// The positional ones, where there are no others.
    ///
    /// # Errors
    ///
    /// If there is one with a name, or fewer than `least` or more than `most`.
    pub(crate) fn only(self, function: &str, least: usize, most: usize) -> R<Vec<Value>> {
        if !self.named.is_empty() {
            return fail(format!("{function}() takes no keyword arguments"));
        }
        let n = self.positional.len();
        if n < least || n > most {
            return fail(format!(
                "{function}() takes from {least} to {most} arguments ({n} given)"
            ));
        }
        Ok(self.positional)
    }
}

/// A text.
///
/// # Errors
///
/// For other values.
pub(crate) fn text(value: &Value) -> R<&str> {
    match value {
        Value::Undefined(why) => fail(&**why),
        other => match other.as_str() {
            Some(text) => Ok(text),
            None => fail(format!("a str was expected, not '{}'", other.type_name())),
        },
    }
}

/// A whole number.
///
/// # Errors
///
/// For other values.
pub(crate) fn int(value: &Value) -> R<i128> {
    match value {
        Value::Undefined(why) => fail(&**why),
        other => match other.as_int() {
            Some(n) => Ok(n),
            None => fail(format!(
                "'{}' object cannot be interpreted as an integer",
                other.type_name()
            )),
        },
    }
}

/// A whole number that is no less than 0, as a size.
///
/// # Errors
///
/// For other values than whole numbers.
pub(crate) fn size(value: &Value) -> R<usize> {
    Ok(usize::try_from(int(value)?.max(0)).unwrap_or(usize::MAX))
}

/// Whether an argument is true, where it is given.
pub(crate) fn flag(value: Option<&Value>) -> bool {
    value.is_some_and(Value::is_true)
}

/// An argument that is there and not `none`.
pub(crate) fn some(value: Option<Value>) -> Option<Value> {
    value.filter(|value| !value.is_none())
}
