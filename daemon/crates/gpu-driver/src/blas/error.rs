//! What a vendor's library for products can fail with.

/// An error of a library for products.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No library can be used; the text lists what was tried.
    #[error("{0}")]
    Config(String),
    /// The library was refused memory of its own.
    #[error(
        "0 bytes of device memory were refused: {0}; end other users of that memory, or lower the budget"
    )]
    Memory(String),
    /// The library has no way to make the product, or failed.
    #[error("matrix product: {0}")]
    Driver(String),
}
