//! Tokenizers and chat templates, from fixtures and from forged files.

#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

mod chat_templates;
mod files;
mod forged;
mod metadata;
mod shared;
mod vocabularies;
