//! A model's file as the engine uses it: the prepared model, the threads that read the file if it
//! may hang, adapters and projector, rows of the embedding, and tables of RoPE angles.

pub(crate) mod adapters;
pub(crate) mod embedding_rows;
pub(crate) mod fetcher;
pub(crate) mod header;
pub(crate) mod loaded;
pub(crate) mod name;
pub(crate) mod projector;
pub(crate) mod registry;
pub(crate) mod rotations;
