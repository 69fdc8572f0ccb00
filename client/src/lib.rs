//! Thin typed client of rocmforged.
