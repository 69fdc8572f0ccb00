//! Compiles the grammar or schema of a request to a parser for the first token.

use llguidance::api::{GrammarInit, TopLevelGrammar};
use llguidance::earley::lexerspec::LexerSpec;
use llguidance::earley::regexvec::RegexVec;
use llguidance::panic_utils::catch_unwind;
use serde_json::{Value, json};

use crate::matcher::Matcher;
use crate::schema::prepared::{prepared, set_options};
use crate::schema::rewrite::rewritten;
use crate::size::{Size, check_size, refused};
use crate::vocabulary::Vocabulary;
use crate::written::{self, Piece};
use crate::{Error, gbnf, limits, reason};

/// The grammar or format that constrains the output.
#[derive(Debug, Clone, PartialEq)]
pub enum Grammar {
    /// A JSON object.
    JsonObject,
    /// A JSON value that a schema describes.
    JsonSchema(Value),
    /// A text that a regular expression describes from its beginning to its end.
    Regex(String),
    /// A text that a grammar in llguidance's variant of Lark describes; its rule `start` is the
    /// whole text.
    Lark(String),
    /// A text that a grammar in GBNF, llama.cpp's notation, describes; its rule `root` is the whole
    /// text.
    Gbnf(String),
    /// A text that is written as a piece says, as calls of tools.
    Written(Piece),
}

impl Grammar {
    /// A schema from its text.
    ///
    /// # Errors
    /// [`Error::Grammar`] where it is no JSON, or larger than may be.
    pub fn from_schema_text(text: &str) -> Result<Self, Error> {
        check_size(text, limits::SCHEMA_MAX_BYTES)?;
        let schema = serde_json::from_str(text).map_err(|error| refused(error.to_string()))?;
        Ok(Self::JsonSchema(schema))
    }

    fn top_level(&self, vocabulary: &Vocabulary) -> Result<TopLevelGrammar, Error> {
        match self {
            Self::JsonObject => {
                let schema = prepared(&json!({"type": "object"}), &mut Size::default())?;
                Ok(TopLevelGrammar::from_json_schema(schema))
            }
            Self::JsonSchema(schema) => {
                let schema = prepared(schema, &mut Size::default())?;
                Ok(TopLevelGrammar::from_json_schema(schema))
            }
            Self::Written(piece) => {
                let lark = written::lark(piece, vocabulary)?;
                Ok(TopLevelGrammar::from_lark(lark))
            }
            Self::Regex(text) => {
                check_size(text, limits::REGEX_MAX_BYTES)?;
                check_nesting(text)?;
                Ok(TopLevelGrammar::from_regex(text))
            }
            Self::Gbnf(text) => {
                check_size(text, limits::LARK_MAX_BYTES)?;
                let lark = gbnf::to_lark(text).map_err(|error| refused(error.to_string()))?;
                Ok(TopLevelGrammar::from_lark(lark))
            }
            Self::Lark(text) => {
                check_size(text, limits::LARK_MAX_BYTES)?;
                check_nesting(text)?;
                let text = with_schemas_rewritten(text)?;
                Ok(TopLevelGrammar::from_lark(text))
            }
        }
    }
}

impl Vocabulary {
    /// A matcher at the beginning of a text. Takes milliseconds for a usual schema and some tens of
    /// them at most; CPU-bound, for a blocking thread.
    ///
    /// # Errors
    /// [`Error::Grammar`] with the reason.
    pub fn matcher(&self, grammar: &Grammar) -> Result<Matcher, Error> {
        let compile = || {
            let compiled = self.compiled(grammar.top_level(self)?);
            compiled.map_err(|error| self.fault_of(grammar, error))
        };
        let inner = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new()
                .name("grammar".to_owned())
                .stack_size(limits::COMPILE_STACK_BYTES)
                .spawn_scoped(scope, compile);
            let thread = thread.map_err(|error| refused(format!("no thread for it: {error}")))?;
            let ended = thread.join();
            ended.unwrap_or_else(|_| Err(refused("it cannot be compiled".to_owned())))
        })?;
        let mut matcher = Matcher::new(inner, self)?;
        // A notation of its own says itself what its numbers are.
        if let Grammar::JsonObject | Grammar::JsonSchema(_) | Grammar::Written(_) = grammar {
            matcher.bound_numbers();
        }
        Ok(matcher)
    }
}

impl Vocabulary {
    fn compiled(&self, top: TopLevelGrammar) -> Result<llguidance::Matcher, Error> {
        let mut is_bounded = true;
        let parser = catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut limits = limits::parser();
            let env = self.factory.tok_env().clone();
            let grammar = GrammarInit::Serialized(top);
            let (rules, lexer) = grammar.to_internal(Some(env), limits.clone())?;
            let automaton = lexer.to_regex_vec(&mut limits)?;
            is_bounded = may_begin_within_bounds(&lexer, automaton);
            if !is_bounded {
                return self.factory.create_parser(nothing());
            }
            let compiled = GrammarInit::Internal(rules, lexer);
            self.factory.create_parser_from_init_default(compiled)
        }));
        if !is_bounded {
            let message = "what may begin it takes too long to find; give a smaller multipleOf, or \
                           simpler patterns";
            return Err(refused(message.to_owned()));
        }
        let inner = llguidance::Matcher::new(parser);
        match inner.get_error() {
            None => Ok(inner),
            Some(error) => Err(refused(reason(&error))),
        }
    }

    /// Why a grammar does not compile, with the name of the piece whose schema it is: compiles the
    /// schemas of named pieces alone, up to the first that fails. `of_all` is why all of it does
    /// not.
    fn fault_of(&self, grammar: &Grammar, of_all: Error) -> Error {
        let mut named = Vec::new();
        if let Grammar::Written(piece) = grammar {
            piece.named_schemas(None, &mut named);
        }
        for (name, schema) in named {
            let Ok(schema) = prepared(schema, &mut Size::default()) else {
                continue;
            };
            let top = TopLevelGrammar::from_json_schema(schema);
            if let Err(Error::Grammar { reason }) = self.compiled(top) {
                return refused(format!("{name}: {reason}"));
            }
        }
        of_all
    }
}

/// Whether the first bytes that a text can have are found in [`limits::FIRST_BYTES_FUEL`].
/// llguidance's parser looks for them without a bound, before it sets one for what follows: a
/// `multipleOf` of ten million is as many states, and gigabytes.
fn may_begin_within_bounds(lexer: &LexerSpec, mut automaton: RegexVec) -> bool {
    automaton.set_fuel(limits::FIRST_BYTES_FUEL);
    let first = automaton.initial_state(&lexer.all_lexemes());
    for byte in 0..=u8::MAX {
        automaton.transition(first, byte);
        if automaton.has_error() {
            return false;
        }
    }
    true
}

/// Stands in for a grammar that is not compiled.
fn nothing() -> TopLevelGrammar {
    TopLevelGrammar::from_regex("a")
}

/// Refuses what a parser by recursive descent would go too deep for. Brackets count wherever they
/// stand, since what is text and what is not is for that parser to say.
fn check_nesting(text: &str) -> Result<(), Error> {
    let mut depth = 0usize;
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > limits::NESTING_MAX {
            let max = limits::NESTING_MAX;
            return Err(refused(format!(
                "its brackets are nested deeper than {max}"
            )));
        }
    }
    Ok(())
}

/// A grammar in Lark whose schemas are checked and rewritten as others are.
fn with_schemas_rewritten(lark: &str) -> Result<String, Error> {
    const BEFORE: &str = "%json";
    let mut schemas: Vec<(std::ops::Range<usize>, Value)> = Vec::new();
    for (at, _) in lark.match_indices(BEFORE) {
        let from = at + BEFORE.len();
        let mut values = serde_json::Deserializer::from_str(&lark[from..]).into_iter();
        // What is no JSON is for the parser of the grammar to refuse.
        if let Some(Ok(schema)) = values.next() {
            schemas.push((from..from + values.byte_offset(), schema));
        }
    }
    let mut size = Size::default();
    let mut text = String::new();
    let mut from = 0;
    for (at, schema) in schemas.iter().filter(|(at, _)| !at.is_empty()) {
        size.add(schema, 0)?;
        // One in a text of another schema is a part of that.
        if at.start < from {
            continue;
        }
        let mut rewritten = rewritten(schema)?;
        set_options(&mut rewritten, schema.get("x-guidance").cloned())?;
        text.push_str(&lark[from..at.start]);
        text.push_str(&format!(" {rewritten}"));
        from = at.end;
    }
    size.check_patterns()?;
    text.push_str(&lark[from..]);
    Ok(text)
}
