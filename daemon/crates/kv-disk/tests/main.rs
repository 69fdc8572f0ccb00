//! The store over directories, over memory and over files that fail.

mod damage;
mod faults;
mod files;
mod kill;
mod store;
