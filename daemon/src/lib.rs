//! x
pub mod config;
pub mod model_files;
pub mod socket;
