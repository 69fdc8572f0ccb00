//! Why a file below a model directory is not offered as a model.

use std::fmt;
use std::path::{Path, PathBuf};

use rocmforge_gguf::OtherUse;

use super::ModelDirs;

/// The reason for which a file is not offered as a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unserved {
    /// The file is a link that leads out of the model directories.
    Outside {
        /// Target of the link, by its text.
        target: PathBuf,
        /// Whether the target's name is that of a model file.
        is_file: bool,
    },
    /// The file is a link to a path inside of the model directories where nothing exists.
    Nowhere {
        /// Target of the link.
        target: PathBuf,
    },
    /// The file's header says that it is not a model (an adapter, a projector).
    OtherUse(OtherUse),
    /// The model has an architecture that is not supported.
    Architecture(String),
    /// The daemon's user may not read the file.
    Unreadable,
    /// The first part of a split model of which other parts are missing.
    MissingParts {
        /// Number of parts of the model.
        count: u32,
        /// Number of parts that exist.
        there: u32,
    },
    /// A part of a split model whose first part is missing.
    NoFirstPart {
        /// Number of the part, from 1.
        number: u32,
        /// Number of parts of the model.
        count: u32,
        /// Expected path of the first part.
        first: PathBuf,
    },
}

/// Maximum number of files that one list of unserved files names.
const TOLD_MAX: usize = 64;

impl ModelDirs {
    /// One sentence for each unserved file that needs attention, at most [`TOLD_MAX`]. Blocks on
    /// the file system.
    pub fn troubles_of_files(&self) -> Vec<String> {
        let (files, _) = self.unserved();
        let troubles = files.iter().filter_map(|file| {
            let why = file.unserved.as_ref().filter(|why| why.is_trouble())?;
            let path = file.path.display();
            Some(format!("{path} is not offered as a model: {why}"))
        });
        let mut told: Vec<_> = troubles.collect();
        if told.len() > TOLD_MAX {
            let more = told.len() - TOLD_MAX;
            told.truncate(TOLD_MAX);
            told.push(format!(
                "{more} more files are not offered as models; `rocmforgectl files` of the running daemon lists them"
            ));
        }
        told
    }
}

impl Unserved {
    /// Whether a user should act on the file: the log and `doctor` warn about it.
    pub fn is_trouble(&self) -> bool {
        match self {
            Unserved::OtherUse(other) => other.is_mishap(),
            Unserved::Architecture(_) => false,
            Unserved::Outside { .. }
            | Unserved::Nowhere { .. }
            | Unserved::Unreadable
            | Unserved::MissingParts { .. }
            | Unserved::NoFirstPart { .. } => true,
        }
    }

    /// The directory that would have to be allowed so that the file is offered.
    pub fn directory(&self) -> Option<&Path> {
        match self {
            Unserved::Outside { target, is_file } => match is_file {
                true => target.parent(),
                false => Some(target),
            },
            _ => None,
        }
    }
}

impl fmt::Display for Unserved {
    /// Writes the reason as a text that follows the path: "it is ...".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unserved::Outside { target, is_file } => {
                let dir = self.directory().unwrap_or(target).display();
                let (leads, if_any) = match is_file {
                    true => ("it is a link", ""),
                    false => (
                        "it is a link, which is not entered,",
                        "if it holds models, ",
                    ),
                };
                write!(
                    f,
                    "{leads} to {}, outside of the model directories; {if_any}name {dir} as a model directory, too \
                     (--model-dir {dir}, model_dir in the file)",
                    target.display()
                )
            }
            Unserved::Nowhere { target } => write!(
                f,
                "it is a link to {}, where nothing is; point it to the file, or remove it",
                target.display()
            ),
            Unserved::OtherUse(other) => write!(f, "it is {other}"),
            Unserved::Architecture(name) => {
                write!(f, "its architecture '{name}' is not supported")?;
                match made_for(name) {
                    Some(what) => write!(f, ": it is {what}"),
                    None => Ok(()),
                }
            }
            Unserved::Unreadable => write!(
                f,
                "it may not be read by the daemon's user {}; change its mode or owner",
                nix::unistd::geteuid()
            ),
            Unserved::MissingParts { count, there } => write!(
                f,
                "it is one of {count} parts of a model, of which {there} are there; put the others beside it"
            ),
            Unserved::NoFirstPart {
                number,
                count,
                first,
            } => write!(
                f,
                "it is part {number} of {count} of a model, whose first part {} is not there; put all parts beside it",
                first.display()
            ),
        }
    }
}

/// What models of some known architectures do instead of generating text.
fn made_for(architecture: &str) -> Option<&'static str> {
    Some(match architecture {
        "flux" | "sd1" | "sdxl" | "sd3" | "aura" | "hidream" | "cosmos" | "ltxv" | "hyvid"
        | "wan" | "lumina2" | "qwen_image" | "z_image" => "a model that makes images or videos",
        "whisper" => "a model that writes down speech",
        "t5" | "t5encoder" => "a T5 text encoder",
        "llada" | "llada-moe" | "dream" | "diffusion-gemma" | "rnd1" => {
            "a diffusion language model"
        }
        "eagle3" | "dflash" => "a drafter for another model",
        "wavtokenizer-dec" => "a decoder of sound",
        _ => return None,
    })
}
