//! Special tokens in text: which tokens are recognised by name, and where.
//!
//! User-defined tokens are always recognised; control and unknown tokens only
//! where the caller asks for it, since a user's text must not be able to end a
//! turn. At a position the longest name wins.

use aho_corasick::{AhoCorasick, Input, MatchKind};

use crate::Error;
use crate::vocab::{Algorithm, SPM_SPACE, TokenType, Words, is_searched};

/// Maximum number of characters that names of control tokens are kept apart by; those in the field
/// have three.
const ANCHORS_MAX: usize = 24;

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

/// The names of control and unknown tokens, for those who must not say them. Whether a letter is
/// large or small does not count: a template may change that.
#[derive(Debug, Default)]
struct ControlNames {
    /// Search for names that do not begin with an anchor.
    search: Option<AhoCorasick>,
    /// Names that do not begin with an anchor, in small letters, sorted.
    loose: Vec<Box<str>>,
    /// All of them, in small letters, sorted.
    names: Vec<Box<str>>,
    /// Backwards, sorted.
    reversed: Vec<Box<str>>,
    /// Characters of which each name has one, but for names of letters, digits and white space.
    anchors: Vec<char>,
}

/// The character without which a name is none: its first punctuation or symbol. A name of one
/// character has none, since texts would be full of it.
fn anchor_of(name: &str) -> Option<char> {
    let fits = |c: &char| !c.is_alphanumeric() && !c.is_whitespace() && *c >= ' ';
    name.chars()
        .find(fits)
        .filter(|c| name.len() > c.len_utf8())
}

impl ControlNames {
    fn build(vocab: &Words) -> Result<ControlNames, Error> {
        let is_control = |t: &TokenType| matches!(t, TokenType::Control | TokenType::Unknown);
        let controls = vocab.texts.iter().zip(&vocab.types);
        let mut names: Vec<Box<str>> = controls
            .filter(|(text, token_type)| is_control(token_type) && is_searched(text))
            .filter_map(|(text, _)| Some(spelled(vocab, std::str::from_utf8(text).ok()?)))
            .filter(|name| !name.is_empty())
            .map(|name| name.to_ascii_lowercase().into_boxed_str())
            .collect();
        names.sort_unstable();
        names.dedup();
        let backwards = |name: &str| name.chars().rev().collect::<String>().into_boxed_str();
        let mut reversed: Vec<Box<str>> = names.iter().map(|name| backwards(name)).collect();
        reversed.sort_unstable();
        let mut anchors = Vec::new();
        for anchor in names.iter().filter_map(|name| anchor_of(name)) {
            if !anchors.contains(&anchor) && anchors.len() < ANCHORS_MAX {
                anchors.push(anchor);
            }
        }
        let mut loose = names.clone();
        loose.retain(|name| !name.starts_with(anchors.as_slice()));
        let search = match loose.is_empty() {
            true => None,
            false => Some(
                AhoCorasick::builder()
                    .match_kind(MatchKind::LeftmostLongest)
                    .ascii_case_insensitive(true)
                    .build(loose.iter().map(|name| name.as_bytes()))
                    .map_err(|error| Error::SpecialTable(error.to_string()))?,
            ),
        };
        Ok(ControlNames {
            search,
            loose,
            names,
            reversed,
            anchors,
        })
    }

    /// True if one of `sorted` begins with `text`, which is in small letters, and has more.
    fn is_beginning(sorted: &[Box<str>], text: &str) -> bool {
        let at = sorted.partition_point(|name| **name <= *text);
        sorted.get(at).is_some_and(|name| name.starts_with(text))
    }

    /// True if `text`, in small letters, begins with a name.
    fn begins(&self, text: &str) -> bool {
        let ends = text.char_indices().map(|(at, c)| at + c.len_utf8());
        let names = &self.names;
        let mut found = ends.map(|end| names.binary_search_by(|name| (**name).cmp(&text[..end])));
        found.any(|found| found.is_ok())
    }
}

/// How a text spells the token's name.
fn spelled(vocab: &Words, name: &str) -> String {
    match vocab.algorithm {
        Algorithm::Spm | Algorithm::Unigram | Algorithm::WordPiece => name.replace(SPM_SPACE, " "),
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
    fn build(vocab: &Words, keep: impl Fn(TokenType) -> bool) -> Result<Names, Error> {
        let (mut names, mut ids) = (Vec::new(), Vec::new());
        for (id, (text, &token_type)) in vocab.texts.iter().zip(&vocab.types).enumerate() {
            if !keep(token_type) || !is_searched(text) {
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
    pub(crate) fn build(vocab: &Words) -> Result<Specials, Error> {
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

    /// The characters without which a text names no control token, unless it has one of letters
    /// and digits alone: see [`names_to_mark`](Self::names_to_mark).
    pub(crate) fn anchors(&self) -> &[char] {
        &self.control.anchors
    }

    /// True if a control token's name may begin at the beginning of `text`, whatever follows.
    pub(crate) fn may_begin_name(&self, text: &str) -> bool {
        let text = text.to_ascii_lowercase();
        ControlNames::is_beginning(&self.control.names, &text) || self.control.begins(&text)
    }

    /// Where a character must be put into `text` so that it holds no name of a control token that
    /// begins with no anchor, nor, at its end, the beginning of one that what follows could
    /// complete; with `role` nor, at its beginning, the end of any. Ascending.
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
        let longest = |names: &[Box<str>]| names.iter().map(|name| name.len()).max().unwrap_or(0);
        let trimmed = text.trim_end();
        let tail = trimmed.len().saturating_sub(longest(&self.control.loose));
        for at in tail..trimmed.len() {
            if text.is_char_boundary(at)
                && ControlNames::is_beginning(
                    &self.control.loose,
                    &trimmed[at..].to_ascii_lowercase(),
                )
            {
                places.push(behind_first(at));
            }
        }
        if role {
            let mut backwards = String::new();
            for c in text.chars().take(longest(&self.control.names)) {
                backwards.insert(0, c.to_ascii_lowercase());
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
