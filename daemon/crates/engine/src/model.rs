//! A model's file as the engine uses it: what was prepared of it, the threads that read it where
//! it may hang, its adapters and projector, rows of its embedding, and the tables of its rotations.

pub(crate) mod adapters;
pub(crate) mod embedding_rows;
pub(crate) mod fetcher;
pub(crate) mod header;
pub(crate) mod loaded;
pub(crate) mod name;
pub(crate) mod projector;
pub(crate) mod registry;
pub(crate) mod rotations;
