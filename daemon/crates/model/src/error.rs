//! Errors of building a model from a header.

/// An error of making a model from a header. `Display` never repeats its source.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The architecture is not implemented.
    #[error("architecture '{name}' is not supported; supported: {supported}")]
    UnknownArchitecture {
        /// The file's architecture.
        name: String,
        /// Architectures that are supported.
        supported: String,
    },
    /// A feature of the model that is not supported, as a message.
    #[error("{0}")]
    Unsupported(String),
    /// An adapter that cannot be used with the model.
    #[error("{0}")]
    Adapter(String),
    /// A tensor has a type that no kernel computes with.
    #[error(
        "tensor '{tensor}' has type {ty}, which is not supported; supported: {}",
        supported_types()
    )]
    UnsupportedType {
        /// Name of the tensor.
        tensor: String,
        /// The tensor's type.
        ty: &'static str,
    },
    /// The plan is inconsistent: a bug.
    #[error("the plan of architecture '{arch}' is wrong, please report it: {fault}")]
    Plan {
        /// The model's architecture.
        arch: &'static str,
        /// What is inconsistent.
        fault: rocmforge_ops::plan::PlanFault,
    },
    /// A metadata key is absent.
    #[error("metadata key '{0}' is missing")]
    MissingKey(String),
    /// A metadata value is invalid.
    #[error("metadata key '{key}' is {value}: {message}")]
    BadValue {
        /// The metadata key.
        key: String,
        /// The key's value.
        value: String,
        /// The values that are supported.
        message: String,
    },
    /// A required tensor is absent.
    #[error("tensor '{0}' is missing")]
    MissingTensor(String),
    /// A tensor's shape does not fit the hyperparameters.
    #[error(
        "tensor '{name}' has shape {found:?} but {arch} with these hyperparameters needs {expected:?}"
    )]
    WrongShape {
        /// Name of the tensor.
        name: String,
        /// Dimensions in the file, fastest first.
        found: Vec<u64>,
        /// Required dimensions, fastest first.
        expected: Vec<u64>,
        /// The model's architecture.
        arch: &'static str,
    },
    /// A metadata value could not be read.
    #[error("the metadata cannot be read")]
    Gguf(#[from] rocmforge_gguf::Error),
}

fn supported_types() -> String {
    rocmforge_ops::WeightType::ALL
        .map(rocmforge_ops::WeightType::name)
        .join(", ")
}
