//! Collects all errors of a request, so that they are reported together.

use crate::{Failure, invalid_all};

/// Errors of a request's fields.
#[derive(Debug, Clone, Default)]
pub struct Violations {
    found: Vec<(String, String)>,
    rename: Option<fn(&str) -> String>,
}

impl Violations {
    /// An empty list of violations; `rename` gives the names of fields as the client wrote them.
    pub fn named(rename: fn(&str) -> String) -> Self {
        Self {
            found: Vec::new(),
            rename: Some(rename),
        }
    }

    /// Function that renames fields as the client knows them, if the names differ.
    pub fn naming(&self) -> Option<fn(&str) -> String> {
        self.rename
    }

    /// Adds an error of a field.
    pub fn add(&mut self, field: &str, message: impl Into<String>) {
        let field = self
            .rename
            .map_or_else(|| field.to_owned(), |name| name(field));
        self.found.push((field, message.into()));
    }

    /// Fails if any violation was added.
    ///
    /// # Errors
    /// INVALID_ARGUMENT if anything was added.
    pub fn result(self) -> Result<(), Failure> {
        if self.found.is_empty() {
            Ok(())
        } else {
            Err(invalid_all(&self.found))
        }
    }

    /// The value as `u32` if it is from `min` to `max`; otherwise adds a violation that states
    /// `range`, and returns `None`.
    pub fn integer(
        &mut self,
        field: &str,
        value: Option<i32>,
        min: u32,
        max: u32,
        range: &str,
    ) -> Option<u32> {
        let value = value?;
        match u32::try_from(value) {
            Ok(n) if (min..=max).contains(&n) => Some(n),
            _ => {
                self.add(field, format!("{value} is out of range: {range}"));
                None
            }
        }
    }

    /// A number that satisfies `fine`, or the default if absent; otherwise adds a violation that
    /// states `range`.
    pub fn number(
        &mut self,
        field: &str,
        value: Option<f32>,
        default: f32,
        fine: impl Fn(f32) -> bool,
        range: &str,
    ) -> f32 {
        match value {
            None => default,
            // NaN fails every comparison, infinities are named in the ranges.
            Some(x) if x.is_finite() && fine(x) => x,
            Some(x) => {
                self.add(field, format!("{x} is out of range: {range}"));
                default
            }
        }
    }
}
