//! Wire types of rocmforge.v1, generated from the .proto files.
