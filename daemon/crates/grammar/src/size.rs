//! Size of what is compiled, and what too much of it is refused with.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::{Error, limits};

/// The error of a grammar that is not compiled, with the reason.
pub(crate) fn refused(reason: String) -> Error {
    Error::Grammar { reason }
}

/// Refuses a text of more than `max` bytes.
pub(crate) fn check_size(text: &str, max: usize) -> Result<(), Error> {
    if text.len() > max {
        let message = format!("it has {} bytes; at most {max}", text.len());
        return Err(refused(message));
    }
    Ok(())
}

/// Size of schemas that are compiled together.
#[derive(Default)]
pub(crate) struct Size {
    values: usize,
    /// Different names in `patternProperties`.
    patterns: BTreeSet<String>,
}

impl Size {
    /// Counts a schema in, and refuses one that is nested deeper or has more values than may be:
    /// its text is walked by recursion, and members of an object are compared with one another.
    pub(crate) fn add(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.values += 1;
        if depth > limits::NESTING_MAX {
            let max = limits::NESTING_MAX;
            return Err(refused(format!("it is nested deeper than {max}")));
        }
        if self.values > limits::SCHEMA_VALUES_MAX {
            let max = limits::SCHEMA_VALUES_MAX;
            return Err(refused(format!("it has more than {max} values")));
        }
        let n_members = match value {
            Value::Object(members) => members.len(),
            Value::Array(list) => list.len(),
            _ => 0,
        };
        if n_members > limits::SCHEMA_MEMBERS_MAX {
            let max = limits::SCHEMA_MEMBERS_MAX;
            let message =
                format!("it has {n_members} members in one list or object; at most {max}");
            return Err(refused(message));
        }
        match value {
            Value::Object(members) => {
                if let Some(Value::Object(named)) = members.get("patternProperties") {
                    self.patterns.extend(named.keys().cloned());
                }
                members
                    .values()
                    .try_for_each(|member| self.add(member, depth + 1))
            }
            Value::Array(list) => list
                .iter()
                .try_for_each(|member| self.add(member, depth + 1)),
            _ => Ok(()),
        }
    }

    /// Refuses more names in `patternProperties` than are compared in time.
    pub(crate) fn check_patterns(&self) -> Result<(), Error> {
        let n = self.patterns.len();
        let pairs = n * n.saturating_sub(1) / 2;
        if pairs * self.values > limits::PATTERN_WORK_MAX {
            return Err(refused(format!(
                "its patternProperties have {n} different names beside {} values, which take too \
                 long to compare; give fewer",
                self.values
            )));
        }
        Ok(())
    }
}
