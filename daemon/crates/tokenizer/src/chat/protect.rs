//! Text that must not become control tokens.
//!
//! A rendered chat is one text in which the template's own names of control
//! tokens count and those in messages do not: else whoever writes a message
//! could end it and begin another. A template does with a message's text what it
//! likes: trims, joins, takes pieces out, writes small letters for large ones. So
//! it gets texts out of which nothing of that makes a name. Each name of a control
//! token has an *anchor*, its first punctuation (`<`, `[`), and each anchor in
//! a message is replaced by a *stand-in* before the chat is rendered: a symbol
//! that is neither in the template nor in the chat. When the names were looked
//! for, the anchors come back. A text keeps its length, and its words.
//!
//! Templates look for marks in messages (`'</think>' in content`). So an anchor
//! stays as it is where a text has what the template has in quotes from that
//! anchor on, if that cannot begin a name, nor can with another quoted text taken
//! out of it. And where a template looks for an anchor alone (`'<' in content`), all
//! of that anchor stay, each with the *mark* behind it.
//!
//! Names that begin with no anchor, such as those of letters alone, are kept
//! apart by the mark, too, one more such symbol,
//! - in every occurrence of such a name, in large letters or small, behind its
//!   first character;
//! - in the beginning of one at the end of a text, which what follows could
//!   complete;
//! - in roles, which templates write as `<|role|>`, before the end of any name at
//!   the beginning.
//!
//! What remains: a template can make a name of its own characters and a message's
//! (it does so on purpose of roles: `im_end` as a role is `<|im_end|>`), or by
//! reordering text around a quoted text that it looks for; one that takes pieces
//! out of a message can make a name of letters alone. A name of one character cannot
//! be marked. A text that begins a name and is longer than its anchor (`'<|' in
//! content`) is not found in messages.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::message::Place;
use super::source::{self, Quoted};
use crate::Tokenizer;

/// The variable that holds the marks; no template can spell it.
pub(super) const MARK_VARIABLE: &str = "\u{1}mark";
/// Texts in quotes of a template that are examined; of one with more, none may stay.
const QUOTED_MAX: usize = 1000;
/// Texts that may stand in messages as they are.
const LEFT_MAX: usize = 64;

/// The symbols that keep the text of messages apart, and what each stands for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Marks(Vec<(char, Option<char>)>);

impl Marks {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What a symbol stands for, `None` within for nothing; `None` for others.
    pub(super) fn meant(&self, c: char) -> Option<Option<char>> {
        let found = self.0.iter().find(|(mark, _)| *mark == c);
        found.map(|(_, meant)| *meant)
    }

    /// The text that is meant.
    pub(crate) fn without<'t>(&self, text: &'t str) -> Cow<'t, str> {
        if !self.0.iter().any(|(mark, _)| text.contains(*mark)) {
            return text.into();
        }
        let meant = |c| self.meant(c).unwrap_or(Some(c));
        text.chars().filter_map(meant).collect::<String>().into()
    }

    /// As the value of [`MARK_VARIABLE`].
    pub(super) fn to_value(&self) -> Value {
        let pairs = self
            .0
            .iter()
            .flat_map(|(mark, meant)| [*mark, meant.unwrap_or(*mark)]);
        pairs.collect::<String>().into()
    }

    /// Undoes [`to_value`](Self::to_value).
    pub(super) fn of(value: &str) -> Marks {
        let mut chars = value.chars();
        let pair = || {
            let (mark, meant) = (chars.next()?, chars.next()?);
            Some((mark, (meant != mark).then_some(meant)))
        };
        Marks(std::iter::from_fn(pair).collect())
    }
}

/// A chat as its template wrote it, with what [`Tokenizer::encode_rendered`]
/// needs to tell the template's text from that of the messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedChat {
    text: String,
    marks: Marks,
}

impl RenderedChat {
    pub(super) fn new(text: String, marks: Marks) -> RenderedChat {
        RenderedChat { text, marks }
    }

    /// The text that the model sees.
    #[must_use]
    pub fn text(&self) -> Cow<'_, str> {
        self.marks.without(&self.text)
    }

    /// As [`text`](Self::text).
    #[must_use]
    pub fn into_text(self) -> String {
        match self.marks.without(&self.text) {
            Cow::Owned(text) => text,
            Cow::Borrowed(_) => self.text,
        }
    }

    /// Writes more behind it, as if the template had: names of control tokens are these tokens.
    pub fn push(&mut self, more: &str) {
        self.text.push_str(more);
    }

    /// Writes `by` in the place of what the template wrote as `name`, the name of a control token:
    /// what stands in messages stays.
    pub fn replace(&mut self, name: &str, by: &str) {
        if self.text.contains(name) {
            self.text = self.text.replace(name, by);
        }
    }

    pub(crate) fn marked(&self) -> (&str, &Marks) {
        (&self.text, &self.marks)
    }
}

/// Characters for marks. First hexagrams and Byzantine notes: symbols, which are no letters and no
/// white space to a template, and which it prints as they are; then characters that no text means,
/// and a plane of private ones.
fn candidates() -> impl Iterator<Item = char> {
    ('\u{4DC0}'..='\u{4DFF}')
        .chain('\u{1D000}'..='\u{1D0F5}')
        .chain('\u{FDD0}'..='\u{FDEF}')
        .chain('\u{100000}'..='\u{10FFFD}')
}

/// What keeps the text of one chat apart.
pub(super) struct Guard<'t> {
    tokenizer: Option<&'t Tokenizer>,
    /// The mark, then the stand-ins.
    marks: Marks,
    /// Anchors that stay and have the mark behind them.
    kept: Vec<char>,
    /// Behind the text of a message that is left open.
    pub(super) open: char,
    /// What may stand in messages as it is; each begins with an anchor.
    left: Vec<String>,
}

impl<'t> Guard<'t> {
    /// For a chat with these variables. `None` only if its text has tens of thousands of private
    /// characters.
    pub(super) fn new(
        template: &str,
        tokenizer: Option<&'t Tokenizer>,
        variables: &Map<String, Value>,
    ) -> Option<Guard<'t>> {
        let says = |c| {
            variables
                .iter()
                .any(|(key, value)| key.contains(c) || contains(value, c))
        };
        let mut free = candidates().filter(|&c| !template.contains(c) && !says(c));
        let mut marks = vec![(free.next()?, None)];
        let open = free.next()?;
        let anchors = tokenizer.map_or(&[][..], |tokenizer| tokenizer.specials().anchors());
        let anchors: Vec<char> = anchors.iter().copied().filter(|&c| says(c)).collect();
        let quoted = match anchors.is_empty() {
            true => Vec::new(),
            false => source::quoted(template),
        };
        let is_kept = |&anchor: &char| {
            let mut compared = quoted.iter().filter(|quoted| quoted.is_compared);
            let before = |quoted: &Quoted| quoted.text.strip_suffix(anchor).map(str::to_owned);
            compared.any(|quoted| before(quoted).is_some_and(|before| !before.contains(anchor)))
        };
        let (kept, replaced): (Vec<_>, Vec<_>) = anchors.iter().copied().partition(is_kept);
        for anchor in replaced {
            marks.push((free.next()?, Some(anchor)));
        }
        let left = tokenizer.map_or_else(Vec::new, |tokenizer| {
            left_alone(quoted, tokenizer, &anchors)
        });
        Some(Guard {
            tokenizer,
            marks: Marks(marks),
            kept,
            open,
            left,
        })
    }

    /// The marks, for whoever gets the text.
    pub(super) fn marks(&self) -> &Marks {
        &self.marks
    }

    /// Makes a text of a message one that names no control token.
    pub(super) fn protect(&self, place: Place, text: &mut String) {
        let Some(tokenizer) = self.tokenizer else {
            return;
        };
        let mark = self.marks.0[0].0;
        let places = tokenizer
            .specials()
            .names_to_mark(text, place == Place::Role);
        let stand_ins = &self.marks.0[1..];
        let stand_in = |c| stand_ins.iter().find(|(_, anchor)| *anchor == Some(c));
        let is_anchor = |c: char| stand_in(c).is_some() || self.kept.contains(&c);
        if places.is_empty() && !text.contains(is_anchor) {
            return;
        }
        let is_left = |at: usize| self.left.iter().any(|left| text[at..].starts_with(left));
        let mut out = String::with_capacity(text.len() + text.len() / 8 + 8);
        let mut places = places.into_iter().peekable();
        for (at, c) in text.char_indices() {
            if places.next_if_eq(&at).is_some() {
                out.push(mark);
            }
            match stand_in(c) {
                _ if !is_anchor(c) || is_left(at) => out.push(c),
                Some((stand_in, _)) => out.push(*stand_in),
                None => out.extend([c, mark]),
            }
        }
        // Behind the last character.
        out.extend(places.map(|_| mark));
        *text = out;
    }
}

/// What the template has in quotes, each from an anchor on, that can begin no name.
fn left_alone(mut quoted: Vec<Quoted>, tokenizer: &Tokenizer, anchors: &[char]) -> Vec<String> {
    quoted.sort_unstable();
    quoted.dedup_by(|a, b| a.text == b.text);
    if quoted.len() > QUOTED_MAX {
        return Vec::new();
    }
    let quoted: Vec<&str> = quoted.iter().map(|quoted| &*quoted.text).collect();
    let is_anchor = |c: char| anchors.contains(&c);
    let may_begin = |text: &str| tokenizer.specials().may_begin_name(text);
    let mut left: Vec<String> = Vec::new();
    for text in &quoted {
        for (at, anchor) in text.char_indices().filter(|&(_, c)| is_anchor(c)) {
            let rest = &text[at..];
            let behind = &rest[anchor.len_utf8()..];
            if left.len() == LEFT_MAX || behind.is_empty() || left.iter().any(|l| l == rest) {
                continue;
            }
            let opens = quoted
                .iter()
                .filter(|piece| !piece.is_empty() && behind.contains(**piece))
                .any(|piece| may_begin(&format!("{anchor}{}", behind.replace(*piece, ""))));
            if !opens && !may_begin(rest) {
                left.push(rest.to_owned());
            }
        }
    }
    left
}

fn contains(value: &Value, c: char) -> bool {
    match value {
        Value::String(text) => text.contains(c),
        Value::Array(list) => list.iter().any(|item| contains(item, c)),
        Value::Object(map) => map
            .iter()
            .any(|(key, member)| key.contains(c) || contains(member, c)),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}
