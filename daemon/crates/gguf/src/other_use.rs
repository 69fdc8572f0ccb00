//! What files are that stand among models and are none.

use std::fmt;

/// What a file is, by its beginning, that cannot be loaded as a model of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtherUse {
    /// A LoRA adapter.
    Adapter,
    /// The encoder of images or sound beside a text model (mmproj).
    Projector,
    /// An importance matrix.
    Imatrix,
    /// A control vector.
    ControlVector,
    /// A vocabulary without weights.
    Vocabulary,
    /// What Git keeps in the place of a large file.
    LfsPointer,
    /// A page of a web server.
    WebPage,
}

/// What pointers of Git LFS begin with.
const LFS: &[u8] = b"version https://git-lfs";

impl OtherUse {
    /// What stands in the place of a GGUF file, by its first bytes: what a download or a clone
    /// leaves where it did not get the file. A file that may be anybody's is told by nothing else.
    pub(crate) fn of_beginning(bytes: &[u8]) -> Option<OtherUse> {
        let bytes = bytes.get(..64).unwrap_or(bytes);
        let text = bytes.trim_ascii_start().to_ascii_lowercase();
        let is_page = |begins: &&[u8]| text.starts_with(begins);
        let pages: [&[u8]; 2] = [b"<!doctype html", b"<html"];
        if bytes.starts_with(LFS) {
            return Some(OtherUse::LfsPointer);
        }
        pages.iter().any(is_page).then_some(OtherUse::WebPage)
    }

    /// Whether the file is the result of a failed download or clone of a model.
    #[must_use]
    pub fn is_mishap(self) -> bool {
        matches!(self, OtherUse::LfsPointer | OtherUse::WebPage)
    }
}

impl fmt::Display for OtherUse {
    /// Text that continues "it is": what the file is, and what to give instead.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            OtherUse::Adapter => {
                "an adapter (LoRA) for a model; load that model, and give this file with --lora (lora of [[model]])"
            }
            OtherUse::Projector => {
                "the part of a model that reads images or sound (mmproj, architecture clip); give the file of its text \
                 model"
            }
            OtherUse::Imatrix => {
                "an importance matrix (imatrix) for quantizing a model; give the file of the model"
            }
            OtherUse::ControlVector => {
                "a control vector for a model, which cannot be applied; give the file of the model"
            }
            OtherUse::Vocabulary => {
                "a vocabulary without weights, for tests of tokenizers; give a file with the model's weights"
            }
            OtherUse::LfsPointer => {
                "the pointer of Git LFS that stands for the file; fetch the file itself (`git lfs pull`)"
            }
            OtherUse::WebPage => {
                "a web page, as servers send in the place of a file that is not there or needs a login; fetch the file again"
            }
        })
    }
}
