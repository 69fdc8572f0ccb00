//! JSON schemas of draft 2020-12 and of what generators write, as `llguidance` enforces them.
//!
//! [`keywords::KEYWORDS`] says what is done with each keyword. What cannot be enforced and matters
//! is rejected with its place, as `#/properties/a/uniqueItems`.
//!
//! *Invariants:* every text that the rewritten schema allows is valid under the schema (tests
//! `each_keyword_holds_an_output_to_what_it_says`, and with generated schemas
//! `schemas_of_generators_hold_outputs`), but for `oneOf` as `anyOf`. Nothing outside of the
//! document is read. The work is bounded by the schemas that are written.

mod arrays;
mod conditions;
mod document;
pub mod keywords;
mod names;
mod negate;
mod objects;
mod pattern;
pub(crate) mod prepared;
pub(crate) mod rewrite;
mod rewriter;

#[cfg(test)]
pub(crate) mod tests;
