//! Streaming reader of calls in tags.
//!
//! ```text
//! name --> between --a parameter's tag--> value --its closing tag--> between
//!   ^                                                                    |
//!   +--------------------------- the call's end -------------------------+
//! ```
//!
//! A text value is given as it arrives, except what may be a tag and white space that may be its
//! end. Other values are given when they are complete. Where a tag in a value may be the next
//! parameter's, since a closing tag was forgotten, or a part of the text, what follows decides; so
//! nothing more is known until the block has ended.

use serde_json::Value;

use super::{Parameters, Tags};
use crate::tool_calls::known::{Arguments, Known, NAME_MAX_BYTES, escaped};
use crate::tool_calls::texts::partial;

/// Where the reading is.
#[derive(Debug)]
enum State {
    /// Before a call.
    Name,
    /// Inside of a call, before a parameter.
    Between,
    /// Inside of a parameter's value.
    Value(Coming),
    /// Before something that only the whole block can decide.
    Open,
}

/// A value that is being read.
#[derive(Debug)]
struct Coming {
    key: String,
    /// Offset at which the value begins.
    from: usize,
    /// Offset up to which the value certainly contains no tag.
    seen: usize,
    /// End of the value without the space at its end, as far as [`Coming::looked`].
    solid: usize,
    looked: usize,
    /// Offset up to which there is white space after a closing tag that may be the last.
    spaced: usize,
    /// Offset up to which the value was sent, once it is sent as text.
    told: Option<usize>,
    /// Whether the value's tag says that it is text.
    is_text: bool,
    /// Whether tags count only at the beginning of a line.
    on_lines: bool,
    /// Whether the value's key was not given before.
    counts: bool,
}

/// Streaming reader of a block of calls in tags.
#[derive(Debug)]
pub(crate) struct Tagged {
    tags: Tags,
    state: State,
    /// Offset at which the text read so far ends.
    at: usize,
    /// Name of the called tool.
    name: String,
    arguments: Arguments,
    /// Offset of the end of the last complete call.
    ended: usize,
}

/// The complete part of a block of invokes that was cut. A call's closing tag may be part of a cut
/// value, and a tool must not be run with the beginning of a path.
pub(crate) fn whole_invokes<'t>(block: &'t str, prefix: &str, tools: &[Value]) -> &'t str {
    let mut tagged = Tagged::invokes(prefix);
    tagged.read(block, tools, &mut Vec::new());
    &block[..tagged.ended]
}

/// What stands at a position inside of a value.
enum Place {
    Text,
    /// More text is needed to decide.
    More,
    /// The value's closing tag.
    Close,
    /// The end of the call, whose last value has no closing tag.
    End,
    /// Only the whole block can decide.
    Open,
}

impl Tagged {
    /// A reader for the text between `<tool_call>` and `</tool_call>`, if it is in tags; `None`
    /// while the beginning is too short to decide.
    pub(crate) fn of_block(text: &str) -> Option<Self> {
        let functions = Tags::functions();
        let text = text.trim_start();
        if text.starts_with(&functions.call) {
            return Some(Self::new(functions));
        }
        let is_short = functions.call.starts_with(text);
        (!is_short).then(|| Self::new(Tags::keys_and_values()))
    }

    /// A reader of invokes with a prefix in their tags.
    pub(crate) fn invokes(prefix: &str) -> Self {
        Self::new(Tags::invokes(prefix))
    }

    fn new(tags: Tags) -> Self {
        Self {
            tags,
            state: State::Name,
            at: 0,
            name: String::new(),
            arguments: Arguments::default(),
            ended: 0,
        }
    }

    /// Appends to `tell` what is known by `block`, which is the earlier block with more text.
    pub(crate) fn read(&mut self, block: &str, tools: &[Value], tell: &mut Vec<Known>) {
        loop {
            let goes_on = match &mut self.state {
                State::Name => self.call(block, tools, tell),
                State::Between => self.between(block, tell),
                State::Value(_) => self.value(block, tools, tell),
                State::Open => return,
            };
            if !goes_on {
                return;
            }
        }
    }

    /// Reads the next call's name. Returns whether there may be more to read.
    fn call(&mut self, block: &str, tools: &[Value], tell: &mut Vec<Known>) -> bool {
        let rest = &block[self.at..];
        let (name, behind) = if self.tags.call.is_empty() {
            // The name is all in front of the first parameter.
            let Some(end) = rest.find(&self.tags.open) else {
                if rest.len() > NAME_MAX_BYTES {
                    self.state = State::Open;
                }
                return false;
            };
            (rest[..end].trim(), self.at + end)
        } else {
            let Some((_, head)) = rest.split_once(&*self.tags.call) else {
                self.at = block.len() - partial(rest, &self.tags.call);
                return false;
            };
            let Some((name, _, behind)) = self.tags.head(head) else {
                if head.len() > NAME_MAX_BYTES {
                    self.state = State::Open;
                }
                return false;
            };
            (name, block.len() - behind.len())
        };
        let is_known = Parameters::of(name, tools).is_some();
        if !is_known && self.tags.call.is_empty() {
            self.state = State::Open;
            return false;
        }
        self.at = behind;
        if is_known || self.tags.quoted {
            name.clone_into(&mut self.name);
            self.arguments.begin(name, tell);
            self.state = State::Between;
        }
        true
    }

    /// Reads what follows in a call: a parameter, or its end.
    fn between(&mut self, block: &str, tell: &mut Vec<Known>) -> bool {
        let (tags, rest) = (&self.tags, &block[self.at..]);
        let next = |tag: &str| rest.find(tag).filter(|_| !tag.is_empty());
        let all = [&tags.open, &tags.call_close, &tags.call];
        let found = all.map(|tag| next(tag));
        let Some(first) = found.into_iter().flatten().min() else {
            let begun = all.map(|tag| partial(rest, tag)).into_iter().max();
            self.at = block.len() - begun.unwrap_or(0);
            return false;
        };
        if found[0] != Some(first) {
            self.at += first;
            self.ended = self.at;
            self.arguments.end(tell);
            self.state = State::Name;
            return true;
        }
        let head = &rest[first + tags.open.len()..];
        let Some((key, attributes, behind)) = tags.head(head) else {
            if head.len() > NAME_MAX_BYTES {
                self.state = State::Open;
            }
            return false;
        };
        let mut from = block.len() - behind.len();
        if !tags.value.is_empty() {
            let value = behind.trim_start();
            from = match value.strip_prefix(&*tags.value) {
                Some(value) => block.len() - value.len(),
                None if tags.value.starts_with(value) => return false,
                None => {
                    self.state = State::Open;
                    return false;
                }
            };
        }
        // Whether it stands on lines tells the first character.
        let Some(first) = block[from..].chars().next() else {
            return false;
        };
        let on_lines = first == '\n';
        from += usize::from(on_lines);
        self.state = State::Value(Coming {
            key: key.to_owned(),
            from,
            seen: from,
            solid: from,
            looked: from,
            spaced: 0,
            told: None,
            is_text: super::says_text(attributes),
            on_lines,
            counts: !self.arguments.has(key),
        });
        true
    }

    /// Reads a value, up to its end or to what has arrived.
    fn value(&mut self, block: &str, tools: &[Value], tell: &mut Vec<Known>) -> bool {
        let parameters = Parameters::of(&self.name, tools).unwrap_or_else(Parameters::unknown);
        let State::Value(value) = &mut self.state else {
            return false;
        };
        if value.spaced > value.seen {
            if block[value.spaced..].trim_start().is_empty() {
                value.spaced = block.len();
                return false;
            }
            value.spaced = 0;
        }
        let place = loop {
            let Some(n) = block[value.seen..].find('<') else {
                value.seen = block.len();
                break Place::More;
            };
            value.seen += n;
            let is_new =
                |key: &str| key != value.key && parameters.has(key) && !self.arguments.has(key);
            match self.tags.place(block, value, tools, parameters, is_new) {
                Place::Text => value.seen += 1,
                place => break place,
            }
        };
        value.look(block);
        let text = &block[value.from..value.seen];
        let (next, at) = match place {
            Place::Close => (State::Between, value.seen + self.tags.close.len()),
            Place::End => (State::Between, value.seen),
            Place::Text | Place::More | Place::Open => {
                if matches!(place, Place::More) && self.tags.may_end(&block[value.seen..]) {
                    value.spaced = block.len();
                }
                // Space may be its end, which is none of it.
                let text = &block[value.from..value.solid];
                if value.counts {
                    value.tell_begun(text, parameters, &mut self.arguments, tell);
                }
                if matches!(place, Place::Open) {
                    self.state = State::Open;
                }
                return false;
            }
        };
        if value.counts {
            let text = text.strip_suffix('\n').unwrap_or(text);
            value.tell_whole(text, parameters, &mut self.arguments, tell);
        }
        (self.state, self.at) = (next, at);
        true
    }
}

impl Coming {
    /// Finds the white space at the end of what was scanned.
    fn look(&mut self, block: &str) {
        let new = block[self.looked..self.seen].trim_end();
        if !new.is_empty() {
            self.solid = self.looked + new.len();
        }
        self.looked = self.seen;
    }

    /// Sends the new part of a text value; nothing if it may be another type.
    fn tell_begun(
        &mut self,
        text: &str,
        parameters: Parameters,
        arguments: &mut Arguments,
        tell: &mut Vec<Known>,
    ) {
        let told = match self.told {
            Some(told) => told - self.from,
            None if self.is_text || parameters.is_text(&self.key, text) => {
                arguments.key(&self.key, tell);
                tell.push(Known::More("\"".to_owned()));
                0
            }
            None => return,
        };
        if told < text.len() {
            tell.push(Known::More(escaped(&text[told..])));
        }
        self.told = Some(self.from + told.max(text.len()));
    }

    /// Sends the rest of a complete value.
    fn tell_whole(
        &self,
        text: &str,
        parameters: Parameters,
        arguments: &mut Arguments,
        tell: &mut Vec<Known>,
    ) {
        let rest = match self.told {
            Some(told) => format!("{}\"", escaped(&text[told - self.from..])),
            None => {
                arguments.key(&self.key, tell);
                super::value_of(parameters, &self.key, self.is_text, text).to_string()
            }
        };
        tell.push(Known::More(rest));
    }
}

impl Tags {
    /// The kind of the tag at the position up to which a value was scanned, consistent with
    /// [`Tags::value`].
    fn place(
        &self,
        block: &str,
        value: &Coming,
        tools: &[Value],
        parameters: Parameters,
        is_new: impl Fn(&str) -> bool,
    ) -> Place {
        let text = &block[value.seen..];
        let begun = |tag: &str| tag.starts_with(text) && text.len() < tag.len();
        if text.starts_with(&self.close) {
            return Place::Close;
        }
        // What closes all calls is none of a value that the end of the block cuts.
        if begun(&self.all) || !self.all.is_empty() && text.trim_end() == self.all {
            return Place::More;
        }
        if begun(&self.close) || begun(&self.open) || begun(&self.call_close) {
            return Place::More;
        }
        if let Some(behind) = text.strip_prefix(&*self.open) {
            let before = block[value.from..value.seen].trim_end_matches([' ', '\t']);
            if value.on_lines && !before.is_empty() && !before.ends_with('\n') {
                return Place::Text;
            }
            return match behind.split_once(&*self.named) {
                Some((key, _)) if is_new(key.trim()) => Place::Open,
                Some(_) => Place::Text,
                None if !parameters.names().any(|name| self.may_be(behind, name)) => Place::Text,
                None if behind.len() > NAME_MAX_BYTES => Place::Open,
                None => Place::More,
            };
        }
        match text.strip_prefix(&*self.call_close) {
            Some(behind) if !self.call_close.is_empty() => self.behind_call(behind, tools),
            _ => Place::Text,
        }
    }

    /// What a call's closing tag inside of a value is, by the text after it.
    fn behind_call(&self, behind: &str, tools: &[Value]) -> Place {
        let next = behind.trim_start();
        if let Some(named) = next.strip_prefix(&*self.call) {
            let mut names = tools
                .iter()
                .filter_map(|tool| tool["function"]["name"].as_str());
            return match named.split_once(&*self.named) {
                Some((name, _)) if Parameters::of(name.trim(), tools).is_some() => Place::End,
                Some(_) => Place::Text,
                None if !names.any(|name| self.may_be(named, name)) => Place::Text,
                None if named.len() > NAME_MAX_BYTES => Place::Open,
                None => Place::More,
            };
        }
        // Nothing, or what closes all calls, may be the end of the block.
        let is_last = !self.all.is_empty() && next.trim_end() == self.all;
        match self.call.starts_with(next) || self.all.starts_with(next) || is_last {
            true => Place::More,
            false => Place::Text,
        }
    }

    /// Whether `text`, which begins with a closing tag, is followed by white space only, so that
    /// more white space decides nothing.
    fn may_end(&self, text: &str) -> bool {
        let solid = text.trim_end();
        solid.len() < text.len()
            && (solid == self.call_close || !self.all.is_empty() && solid.ends_with(&*self.all))
    }

    /// Whether `text`, which has no end of a name yet, may be `name`.
    fn may_be(&self, text: &str, name: &str) -> bool {
        let text = &text[..text.len() - partial(text, &self.named)];
        let text = text.trim_start();
        name.starts_with(text) || text.trim_end() == name
    }
}
