//! Special tokens in text: which tokens are recognised by name, and where.
//!
//! User-defined tokens are always recognised; control and unknown tokens only
//! where the caller asks for it, since a user's text must not be able to end a
//! turn. At a position the longest name wins.

use aho_corasick::{AhoCorasick, Input, MatchKind};

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
    control: ControlNames,
}

/// The names of control and unknown tokens, for those who must not say them.
#[derive(Debug, Default)]
struct ControlNames {
    search: Option<AhoCorasick>,
    /// Sorted.
    names: Vec<Box<str>>,
    /// Backwards, sorted.
    reversed: Vec<Box<str>>,
}

impl ControlNames {
    fn build(vocab: &Vocab) -> Result<ControlNames, Error> {
        let found = Names::build(vocab, |t| {
            matches!(t, TokenType::Control | TokenType::Unknown)
        })?;
        let texts = found.ids.iter().filter_map(|&id| {
            let name = std::str::from_utf8(vocab.texts.get(id as usize)?).ok()?;
            Some(spelled(vocab, name))
        });
        let mut names: Vec<Box<str>> = texts.map(String::into_boxed_str).collect();
        let backwards = |name: &str| name.chars().rev().collect::<String>().into_boxed_str();
        let mut reversed: Vec<Box<str>> = names.iter().map(|name| backwards(name)).collect();
        names.sort_unstable();
        reversed.sort_unstable();
        Ok(ControlNames {
            search: found.search,
            names,
            reversed,
        })
    }

    /// True if one of `sorted` begins with `text` and has more.
    fn is_beginning(sorted: &[Box<str>], text: &str) -> bool {
        let at = sorted.partition_point(|name| **name <= *text);
        sorted.get(at).is_some_and(|name| name.starts_with(text))
    }
}

/// How a text spells the token's name.
fn spelled(vocab: &Vocab, name: &str) -> String {
    match vocab.algorithm {
        Algorithm::Spm => name.replace(SPM_SPACE, " "),
        Algorithm::Bpe(_) => name.to_owned(),
    }
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
            let name = spelled(vocab, text);
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
        let all = Names::build(vocab, |t| {
            matches!(
                t,
                TokenType::UserDefined | TokenType::Control | TokenType::Unknown
            )
        })?;
        Ok(Specials {
            user_defined: Names::build(vocab, |t| t == TokenType::UserDefined)?,
            control: ControlNames::build(vocab)?,
            all,
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

    /// Where a character must be put into `text` so that it holds no name of a
    /// control token, nor, at its end, the beginning of one that what follows
    /// could complete; with `role` nor, at its beginning, the end of one.
    /// Ascending.
    pub(crate) fn names_to_mark(&self, text: &str, role: bool) -> Vec<usize> {
        let mut places = Vec::new();
        let behind_first = |at: usize| at + text[at..].chars().next().map_or(0, char::len_utf8);
        let mut from = 0;
        while let Some(search) = &self.control.search
            && let Some(found) = search.find(Input::new(text).range(from..))
        {
            // Names may overlap: the next one is looked for right behind.
            from = behind_first(found.start());
            places.push(from);
        }
        let trimmed = text.trim_end();
        let longest = self.control.names.iter().map(|name| name.len()).max();
        let tail = trimmed.len().saturating_sub(longest.unwrap_or(0));
        for at in tail..trimmed.len() {
            if text.is_char_boundary(at)
                && ControlNames::is_beginning(&self.control.names, &trimmed[at..])
            {
                places.push(behind_first(at));
            }
        }
        if role {
            let mut backwards = String::new();
            for c in text.chars().take(longest.unwrap_or(0)) {
                backwards.insert(0, c);
                if ControlNames::is_beginning(&self.control.reversed, &backwards) {
                    places.push(0);
                    break;
                }
            }
        }
        places.sort_unstable();
        places.dedup();
        places
    }
}
