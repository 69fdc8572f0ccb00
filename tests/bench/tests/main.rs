//! The benchmark's commands.

mod commands;
mod gpu;
