//! Special tokens in text: which tokens are recognised by name, and where.
//!
//! User-defined tokens are always recognised; control and unknown tokens only
//! where the caller asks for it, since a user's text must not be able to end a
//! turn. At a position the longest name wins.

use aho_corasick::{AhoCorasick, MatchKind};

use crate::Error;
use crate::vocab::{Algorithm, SPM_SPACE, TokenType, Vocab};

/// Finds names of special tokens.
#[derive(Debug)]
pub(crate) struct Specials {
    user_defined: Names,
    all: Names,
    /// Tokens take the white space behind them, except those of `no_strip`.
    rstrip: bool,
    no_strip: Vec<u32>,
}

/// A part of a text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part<'t> {
    /// To be tokenized; never empty.
    Text(&'t str),
    /// A token that the text names.
    Token(u32),
}

#[derive(Debug, Default)]
struct Names {
    /// `None` if there are no names.
    search: Option<AhoCorasick>,
    ids: Vec<u32>,
}

impl Names {
    fn build(vocab: &Vocab, keep: impl Fn(TokenType) -> bool) -> Result<Names, Error> {
        let (mut names, mut ids) = (Vec::new(), Vec::new());
        for (id, (text, &token_type)) in vocab.texts.iter().zip(&vocab.types).enumerate() {
            if !keep(token_type) {
                continue;
            }
            // A name that is no text cannot be found in a text.
            let Ok(text) = std::str::from_utf8(text) else {
                continue;
            };
            let name = match vocab.algorithm {
                Algorithm::Spm => text.replace(SPM_SPACE, " "),
                Algorithm::Bpe(_) => text.to_owned(),
            };
            if !name.is_empty() {
                names.push(name);
                ids.push(id as u32);
            }
        }
        if names.is_empty() {
            return Ok(Names::default());
        }
        let search = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(&names)
            .map_err(|error| Error::SpecialTable(error.to_string()))?;
        Ok(Names {
            search: Some(search),
            ids,
        })
    }
}

impl Specials {
    pub(crate) fn build(vocab: &Vocab) -> Result<Specials, Error> {
        let no_strip = ["<unk>", "<s>", "<|endoftext|>"];
        let kept = |text: &[u8]| no_strip.iter().any(|name| name.as_bytes() == text);
        let no_strip = match vocab.special_rstrip {
            true => {
                let found = vocab
                    .texts
                    .iter()
                    .enumerate()
                    .filter(|(_, text)| kept(text));
                found.map(|(id, _)| id as u32).collect()
            }
            false => Vec::new(),
        };
        Ok(Specials {
            user_defined: Names::build(vocab, |t| t == TokenType::UserDefined)?,
            all: Names::build(vocab, |t| {
                matches!(
                    t,
                    TokenType::UserDefined | TokenType::Control | TokenType::Unknown
                )
            })?,
            rstrip: vocab.special_rstrip,
            no_strip,
        })
    }

    /// Calls `emit` with the parts of `text`, in order, until it fails.
    pub(crate) fn split<'t>(
        &self,
        text: &'t str,
        parse_special: bool,
        mut emit: impl FnMut(Part<'t>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let names = if parse_special {
            &self.all
        } else {
            &self.user_defined
        };
        let mut start = 0;
        if let Some(search) = &names.search {
            for found in search.find_iter(text) {
                // White space that a token took may itself hold a name.
                if found.start() < start {
                    continue;
                }
                if start < found.start() {
                    emit(Part::Text(&text[start..found.start()]))?;
                }
                let id = names.ids[found.pattern().as_usize()];
                emit(Part::Token(id))?;
                start = found.end();
                if self.rstrip && !self.no_strip.contains(&id) {
                    start = text.len() - text[start..].trim_start().len();
                }
            }
        }
        if start < text.len() {
            emit(Part::Text(&text[start..]))?;
        }
        Ok(())
    }
}
