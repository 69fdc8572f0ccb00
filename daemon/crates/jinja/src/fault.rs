//! Why a template gave no text, inside.

/// A result of evaluation.
pub(crate) type R<T> = Result<T, Fault>;

/// What ended an evaluation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fault {
    /// An error in the words of Python, and its line, 0 until it is known.
    Failed {
        line: u32,
        message: String,
    },
    /// What `raise_exception` was called with.
    Raised(String),
    Steps,
    Output,
    Depth,
}

impl Fault {
    pub(crate) fn new(message: impl Into<String>) -> Fault {
        Fault::Failed {
            line: 0,
            message: message.into(),
        }
    }

    /// The fault, of this line where it has none.
    pub(crate) fn at(self, line: u32) -> Fault {
        match self {
            Fault::Failed { line: 0, message } => Fault::Failed { line, message },
            other => other,
        }
    }
}

/// A failure in Python's words.
pub(crate) fn fail<T>(message: impl Into<String>) -> R<T> {
    Err(Fault::new(message))
}
