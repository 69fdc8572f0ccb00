//! The store over directories, over memory and over files that fail.

#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

mod damage;
mod faults;
mod files;
mod kill;
mod store;
