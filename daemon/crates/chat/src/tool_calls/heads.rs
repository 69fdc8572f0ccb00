//! Recognizes the beginnings of calls whose arguments are JSON text: the name, and where the
//! arguments begin.
//!
//! ```text
//! {"name": "f", "arguments": {...}}                                 objects, in a list or not
//! <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}             Kimi K2
//! <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}                                         DeepSeek
//! f[ARGS]{...}                                                                  Mistral
//! ```
//!
//! A head is parsed before its arguments have arrived, so text that may still become one is held.

use serde_json::Value;

use super::marked;

/// Possible JSON keys of a call's arguments.
const KEYS: [&str; 2] = ["arguments", "parameters"];
/// Possible JSON keys of a call's name.
const NAMES: [&str; 2] = ["name", "tool_name"];

/// Result of matching a text with the beginning of a call.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Head {
    /// The text may become a call, with more bytes.
    More,
    /// The text is not a call, or one with arguments that are no object.
    No,
    /// The text is a call.
    Yes {
        /// Name of the tool.
        name: String,
        /// Byte offset of the arguments' opening brace.
        at: usize,
    },
}

/// The formats in which calls begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heads {
    /// JSON objects with the name before the arguments.
    Objects,
    /// Kimi K2's format.
    Kimi,
    /// DeepSeek's format.
    DeepSeek,
    /// Mistral's format.
    Mistral,
}

impl Heads {
    /// The mark before each call; empty if there is none.
    pub(crate) fn mark(self) -> &'static str {
        match self {
            Self::Objects => "",
            Self::Kimi => marked::KIMI,
            Self::DeepSeek => marked::DEEPSEEK,
            Self::Mistral => marked::MISTRAL,
        }
    }

    /// The mark that ends arguments that are not valid JSON, besides the end of the block.
    pub(crate) fn end(self) -> &'static str {
        match self {
            Self::Objects => "",
            Self::Kimi => "<|tool_call_end|>",
            Self::DeepSeek => "<｜tool▁call▁end｜>",
            Self::Mistral => marked::MISTRAL,
        }
    }

    /// Matches `text`, after its mark, with the beginning of a call.
    pub(crate) fn head(self, text: &str) -> Head {
        let mut reader = Reader { text, at: 0 };
        let name = match self {
            Self::Objects => reader.object(),
            Self::Kimi => reader.kimi(),
            Self::DeepSeek => reader.deepseek(),
            Self::Mistral => reader.mistral(),
        };
        match name.and_then(|name| Ok((name, reader.brace()?))) {
            Ok((name, _)) if name.is_empty() => Head::No,
            Ok((name, at)) => Head::Yes { name, at },
            Err(Stop::Short) => Head::More,
            Err(Stop::Other) => Head::No,
        }
    }
}

/// Number of bytes of an object's member after the arguments; an error if it is incomplete or none.
pub(crate) fn member(text: &str) -> Result<usize, Stop> {
    let mut reader = Reader { text, at: 0 };
    reader.string()?;
    reader.eat(":")?;
    reader.value()?;
    match reader.rest().is_empty() && text.ends_with(|c: char| c.is_ascii_digit()) {
        // A number may have more digits.
        true => Err(Stop::Short),
        false => Ok(reader.at),
    }
}

/// Why parsing stopped.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The text is incomplete, and valid so far.
    Short,
    /// The text is something else.
    Other,
}

/// Parser over a text.
struct Reader<'t> {
    text: &'t str,
    at: usize,
}

impl<'t> Reader<'t> {
    fn rest(&self) -> &'t str {
        &self.text[self.at..]
    }

    fn skip_space(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
    }

    /// Offset of the brace that begins the arguments.
    fn brace(&mut self) -> Result<usize, Stop> {
        self.skip_space();
        match self.rest().chars().next() {
            Some('{') => Ok(self.at),
            Some(_) => Err(Stop::Other),
            None => Err(Stop::Short),
        }
    }

    fn eat(&mut self, word: &str) -> Result<(), Stop> {
        self.skip_space();
        match self.rest() {
            rest if rest.starts_with(word) => {
                self.at += word.len();
                Ok(())
            }
            rest if word.starts_with(rest) => Err(Stop::Short),
            _ => Err(Stop::Other),
        }
    }

    /// The text before a mark, if it contains no mark of another call.
    fn before(&mut self, mark: &str, own: &str) -> Result<&'t str, Stop> {
        let rest = self.rest();
        let end = rest.find(mark);
        let before = &rest[..end.unwrap_or(rest.len())];
        if before.contains(own) {
            return Err(Stop::Other);
        }
        self.at += end.ok_or(Stop::Short)? + mark.len();
        Ok(before)
    }

    /// Parses the members of an object up to the arguments, and returns the name. Strings and
    /// numbers may come before it.
    fn object(&mut self) -> Result<String, Stop> {
        self.eat("{")?;
        let mut name = None;
        loop {
            let key = self.string()?;
            self.eat(":")?;
            if KEYS.contains(&&*key) {
                return name.ok_or(Stop::Other);
            }
            match NAMES.contains(&&*key) {
                true if name.is_some() => return Err(Stop::Other),
                true => name = Some(self.string()?),
                false => self.value()?,
            }
            self.eat(",")?;
        }
    }

    fn string(&mut self) -> Result<String, Stop> {
        self.skip_space();
        let mut values = serde_json::Deserializer::from_str(self.rest()).into_iter::<String>();
        match values.next() {
            Some(Ok(text)) => {
                self.at += values.byte_offset();
                Ok(text)
            }
            Some(Err(error)) if !error.is_eof() => Err(Stop::Other),
            _ => Err(Stop::Short),
        }
    }

    /// Parses a value that is neither object nor list.
    fn value(&mut self) -> Result<(), Stop> {
        self.skip_space();
        if self.rest().starts_with(['{', '[']) {
            return Err(Stop::Other);
        }
        let mut values = serde_json::Deserializer::from_str(self.rest()).into_iter::<Value>();
        match values.next() {
            Some(Ok(_)) => {
                self.at += values.byte_offset();
                Ok(())
            }
            Some(Err(error)) if !error.is_eof() => Err(Stop::Other),
            _ => Err(Stop::Short),
        }
    }

    /// Parses Kimi K2's head: `functions.f:0` and a mark.
    fn kimi(&mut self) -> Result<String, Stop> {
        let name = self.before(marked::KIMI_ARGUMENTS, marked::KIMI)?;
        Ok(marked::kimi_name(name).to_owned())
    }

    /// Parses DeepSeek's head: `function`, a mark, a name and a fence; or a name and a mark.
    fn deepseek(&mut self) -> Result<String, Stop> {
        let before = self.before(marked::DEEPSEEK_NAME, marked::DEEPSEEK)?;
        self.skip_space();
        let mut name = before;
        if before.trim() == "function" && !self.rest().starts_with('{') {
            let rest = self.rest();
            let end = rest.find(['\n', '`']);
            name = &rest[..end.unwrap_or(rest.len())];
            if name.contains(marked::DEEPSEEK) {
                return Err(Stop::Other);
            }
            self.at += end.ok_or(Stop::Short)?;
        }
        let fence = match self.eat("```json") {
            Err(Stop::Other) => self.eat("```"),
            fence => fence,
        };
        match fence {
            Err(Stop::Short) => Err(Stop::Short),
            _ => Ok(name.trim().to_owned()),
        }
    }

    /// Parses Mistral's head: a name and texts in brackets.
    fn mistral(&mut self) -> Result<String, Stop> {
        self.skip_space();
        let rest = self.rest();
        let end = rest.find(marked::ends_name).ok_or(Stop::Short)?;
        let (name, rest) = rest.split_at(end);
        let brace = rest.find('{');
        let between = &rest[..brace.unwrap_or(rest.len())];
        let is_call = matches!(between.trim_start().chars().next(), None | Some('['));
        if !is_call || between.contains(marked::MISTRAL) {
            return Err(Stop::Other);
        }
        self.at += end + brace.ok_or(Stop::Short)?;
        Ok(name.to_owned())
    }
}
