//! Split models: files `NAME-00001-of-00003.gguf` and on, written by llama.cpp's gguf-split.
//!
//! The first part has the metadata. Each part has a tensor table for its own data, and says which
//! part it is (`split.no`, from 0), of how many (`split.count`), and how many tensors all have
//! (`split.tensors.count`).

use std::path::{Path, PathBuf};

use crate::gguf::Gguf;
use crate::limits::{MAX_PARTS, MAX_TENSORS};
use crate::{Error, MappedFile, ReadMode};

/// The place of a part in its model, as its name says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartName {
    dir: PathBuf,
    stem: String,
    suffix: String,
    number: u32,
    count: u32,
}

/// Digits of either number in a part's name.
const DIGITS: usize = 5;

impl PartName {
    /// Reads `STEM-NNNNN-of-NNNNN.gguf`; `None` for any other name, for a part beyond the last, and
    /// for one of one.
    pub fn of(path: &Path) -> Option<PartName> {
        let name = path.file_name()?.to_str()?;
        let dot = name.len().checked_sub(".gguf".len())?;
        let (rest, suffix) = name.split_at_checked(dot)?;
        if !suffix.eq_ignore_ascii_case(".gguf") {
            return None;
        }
        let (rest, count) = rest.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| {
            let fine = text.len() == DIGITS && text.bytes().all(|b| b.is_ascii_digit());
            fine.then(|| text.parse().ok()).flatten()
        };
        let (number, count) = (digits(number)?, digits(count)?);
        (count > 1 && (1..=count).contains(&number)).then(|| PartName {
            dir: path.parent().unwrap_or(Path::new("")).to_owned(),
            stem: stem.to_owned(),
            suffix: suffix.to_owned(),
            number,
            count,
        })
    }

    /// Number of the part, from 1.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// How many parts there are.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// The name that the parts share.
    pub fn stem(&self) -> &str {
        &self.stem
    }

    /// The path of a part by its number, from 1, beside this one.
    pub fn path(&self, number: u32) -> PathBuf {
        let Self {
            stem,
            suffix,
            count,
            ..
        } = self;
        self.dir
            .join(format!("{stem}-{number:05}-of-{count:05}{suffix}"))
    }

    /// The paths of all parts, in their order.
    ///
    /// # Errors
    /// [`Error::TooManyParts`].
    pub fn paths(&self) -> Result<impl Iterator<Item = PathBuf> + '_, Error> {
        if self.count as usize > MAX_PARTS {
            return Err(Error::TooManyParts {
                path: self.path(self.number),
                found: self.count.into(),
            });
        }
        Ok((1..=self.count).map(|number| self.path(number)))
    }
}

impl MappedFile {
    /// Opens a model: the file at `path` or, where its name is a part's and its header says so,
    /// too, that part and all others beside it.
    ///
    /// # Errors
    /// As [`open`](MappedFile::open), for the first file that fails; [`Error::TooManyParts`].
    pub fn open_model(path: &Path) -> Result<MappedFile, Error> {
        let Some(name) = PartName::of(path) else {
            return MappedFile::open(path);
        };
        let open = |path: PathBuf| MappedFile::open_with(&path, ReadMode::Pread);
        // What is merged or quantized anew under a part's name is whole.
        if open(path.to_owned()).is_ok_and(|file| matches!(file.split_count(), Ok(1))) {
            return MappedFile::open(path);
        }
        MappedFile::join(
            name.paths()?.map(open).collect::<Result<_, _>>()?,
            ReadMode::Map,
        )
    }
}

/// What a header says about its part.
struct Claim {
    number: Option<u64>,
    count: u64,
    tensors: Option<u64>,
}

impl Claim {
    fn of(gguf: &Gguf) -> Result<Claim, Error> {
        Ok(Claim {
            number: gguf.u64("split.no")?,
            count: gguf.u64("split.count")?.unwrap_or(1),
            tensors: gguf.u64("split.tensors.count")?,
        })
    }
}

/// Refuses a file that says that it is a part, where it is all there is.
pub(crate) fn refuse_part(path: &Path, gguf: &Gguf) -> Result<(), Error> {
    let claim = Claim::of(gguf)?;
    if claim.count <= 1 {
        return Ok(());
    }
    Err(Error::Split {
        path: path.to_owned(),
        problem: format!(
            "it is part {} of a model of {} parts (split.count), and its name does not say so; name the parts \
             NAME-00001-of-{:05}.gguf and on, in one directory, and give the first",
            claim.number.map_or("?".to_owned(), |n| (n + 1).to_string()),
            claim.count,
            claim.count
        ),
    })
}

/// Puts the headers of all parts together; the offsets of their tensors are those of the whole
/// already.
pub(crate) fn merge(parts: Vec<(&Path, Gguf)>) -> Result<Gguf, Error> {
    let count = parts.len() as u64;
    let mut whole: Option<(&Path, Gguf)> = None;
    let mut tensors = None;
    for (number, (path, gguf)) in (0..).zip(parts) {
        let refuse = |problem: String| Error::Split {
            path: path.to_owned(),
            problem,
        };
        let claim = Claim::of(&gguf).map_err(|e| in_part(path, e))?;
        if claim.number != Some(number) || claim.count != count {
            let says = |key: &str, found: Option<u64>| {
                found.map_or(format!("no {key}"), |n| format!("{key} {n}"))
            };
            return Err(refuse(format!(
                "it has {} and {} where split.no {number} and split.count {count} are expected: it is another file under \
                 this part's name; fetch the part again",
                says("split.no", claim.number),
                says("split.count", Some(claim.count)),
            )));
        }
        match (tensors, claim.tensors) {
            (None, _) => tensors = claim.tensors,
            (Some(first), Some(here)) if first != here => {
                return Err(refuse(format!(
                    "it belongs to a model of {here} tensors (split.tensors.count), the first part to one of {first}; fetch \
                     all parts of one model"
                )));
            }
            _ => {}
        }
        match &mut whole {
            None => whole = Some((path, gguf)),
            Some((_, whole)) => {
                if let Some(twice) = gguf
                    .tensors
                    .iter()
                    .find(|t| whole.tensor(&t.name).is_some())
                {
                    return Err(refuse(format!(
                        "tensor \"{}\" is in an earlier part, too; fetch all parts of one model",
                        twice.name
                    )));
                }
                if (whole.tensors.len() + gguf.tensors.len()) as u64 > MAX_TENSORS {
                    return Err(refuse(format!(
                        "with it the model has more than {MAX_TENSORS} tensors"
                    )));
                }
                whole.extend(gguf.tensors);
            }
        }
    }
    let (path, whole) = whole.expect("a model has at least one part");
    match tensors {
        Some(told) if told != whole.tensors.len() as u64 => Err(Error::Split {
            path: path.to_owned(),
            problem: format!(
                "the model has {told} tensors (split.tensors.count), and its {count} parts have {}; fetch them again",
                whole.tensors.len()
            ),
        }),
        _ => Ok(whole),
    }
}

/// Names the part that an error of its header is about. Errors of reading name it already.
pub(crate) fn in_part(path: &Path, error: Error) -> Error {
    match error {
        Error::Io { .. } | Error::Changed { .. } | Error::Split { .. } => error,
        _ => Error::Part {
            path: path.to_owned(),
            source: Box::new(error),
        },
    }
}
