//! Arrays that are passed over because their content is known.

use crate::ValueType;
use crate::known::Content;

use super::{Parser, Stage};

impl Parser {
    /// A parser that stops before large arrays, and knows them once they were walked.
    pub(crate) fn recognising(file_len: u64) -> Parser {
        Parser {
            recognises: true,
            ..Parser::new(file_len)
        }
    }

    /// Bytes of the file that were passed over: the position in the file is so much behind that in
    /// the bytes given.
    pub(crate) fn passed(&self) -> u64 {
        self.passed
    }

    /// The element type and the count of the array before whose elements the walk stopped.
    pub(crate) fn large(&self) -> Option<(ValueType, u64)> {
        let (ty, count) = self.entries.last()?.array?;
        (self.stage == Stage::Elements).then_some((ty, count as u64))
    }

    /// Continues behind the elements of the array at which the parser stopped. They take `len`
    /// bytes of the file, which are not part of the bytes given.
    pub(crate) fn pass_over(&mut self, len: u64, content: Content) {
        if let Some(entry) = self.entries.last_mut() {
            entry.content = Some(content);
            entry.is_kept = false;
            self.passed += len;
        }
        self.frames.clear();
        self.is_before_large = false;
        self.stage = Stage::Keys;
    }
}
