//! Errors of drivers, by what the caller has to do.

use crate::LossKind;

/// Result of a driver's call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What a failure means to the code above the tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// Memory, or a limit of it, was refused: free some, or ask for less. The context is sound.
    OutOfMemory,
    /// The work is still under way, which is no failure.
    NotReady,
    /// The context is damaged for good: every later call fails too. End the process.
    Lost(LossKind),
    /// The driver, the kernel module or the device cannot do this: take the other way.
    NotSupported,
    /// Anything else: this call failed, the context is sound.
    Other,
}

/// A library that could not be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The name that was given to the loader.
    pub library: String,
    /// The loader's error message.
    pub message: String,
}

/// An error of a driver or of its library.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A call returned an error code.
    #[error("{call}: {name} ({code}){}", beside(name, text))]
    Call {
        /// The vendor's function.
        call: &'static str,
        /// The vendor's code.
        code: u32,
        /// The vendor's name of the code.
        name: String,
        /// The vendor's text.
        text: String,
        /// What the error means for the device.
        class: Class,
    },
    /// No library of the driver could be opened.
    #[error(
        "no {vendor} library could be opened; tried {}; {hint}",
        attempts(tried)
    )]
    Library {
        /// `hip`, `cuda` and the like.
        vendor: &'static str,
        /// Libraries that were tried, in order.
        tried: Vec<Attempt>,
        /// What to do about the missing library.
        hint: &'static str,
    },
    /// The library lacks functions.
    #[error("{library} has no {}; install a newer version of it", symbols.join(", "))]
    Symbols {
        /// The library as it was opened.
        library: String,
        /// The functions that are missing.
        symbols: Vec<&'static str>,
    },
    /// A module has no such kernel.
    #[error("the module has no kernel '{kernel}'")]
    Kernel {
        /// The name that was asked for.
        kernel: String,
    },
    /// A range that does not lie inside its buffer.
    #[error("{operation}: bytes {offset}..+{bytes} of a buffer of {size}")]
    Range {
        /// The operation that was requested.
        operation: &'static str,
        /// First byte.
        offset: u64,
        /// Bytes.
        bytes: u64,
        /// The buffer's bytes.
        size: u64,
    },
    /// The driver gave an answer that makes no sense.
    #[error("{call}: unexpected answer: {message}")]
    Answer {
        /// The vendor's function.
        call: &'static str,
        /// What is unexpected in the answer.
        message: String,
    },
}

/// The text of a code behind its name; nothing where a library has the name as its text, as HIP 5
/// has.
fn beside(name: &str, text: &str) -> String {
    match text.is_empty() || text == name {
        true => String::new(),
        false => format!(": {text}"),
    }
}

/// `a (why), b (why)`.
fn attempts(tried: &[Attempt]) -> String {
    let mut text = String::new();
    for attempt in tried {
        if !text.is_empty() {
            text.push_str(", ");
        }
        text.push_str(&attempt.library);
        text.push_str(" (");
        text.push_str(&attempt.message);
        text.push(')');
    }
    text
}

impl Error {
    /// Class of the error, which says what it means for the device.
    pub fn class(&self) -> Class {
        match self {
            Error::Call { class, .. } => *class,
            Error::Library { .. } | Error::Symbols { .. } => Class::NotSupported,
            Error::Kernel { .. } | Error::Range { .. } | Error::Answer { .. } => Class::Other,
        }
    }

    /// Whether memory was refused.
    pub fn is_out_of_memory(&self) -> bool {
        self.class() == Class::OutOfMemory
    }

    /// How the device was lost, as far as this error shows it; `None` if it was not lost.
    pub fn loss(&self) -> Option<LossKind> {
        match self.class() {
            Class::Lost(kind) => Some(kind),
            _ => None,
        }
    }

    /// Whether the context is damaged for good.
    pub fn is_lost(&self) -> bool {
        self.loss().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_is_the_name_is_not_said_twice() {
        let error = |text: &str| Error::Call {
            call: "hipInit",
            code: 101,
            name: "hipErrorInvalidDevice".to_owned(),
            text: text.to_owned(),
            class: Class::Other,
        };
        let once = "hipInit: hipErrorInvalidDevice (101)";
        assert_eq!(error("hipErrorInvalidDevice").to_string(), once);
        assert_eq!(error("").to_string(), once);
        let text = "invalid device ordinal";
        assert_eq!(error(text).to_string(), format!("{once}: {text}"));
    }
}
