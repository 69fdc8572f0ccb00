//! GGUF files as others write them, damaged ones, and files that change while they are mapped.

#![allow(clippy::too_many_lines, reason = "tables of cases")]
#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

mod direct;
mod format;
mod known;
mod mapped;
mod properties;
mod real_files;
mod rewritten;
mod split;
