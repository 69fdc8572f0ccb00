//! What a request can make of a grammar, at most.

use llguidance::api::ParserLimits;

/// Largest regular expression in bytes of its text.
pub const REGEX_MAX_BYTES: usize = 256 << 10;
/// Largest JSON schema in bytes of its text.
pub const SCHEMA_MAX_BYTES: usize = 1 << 20;
/// Maximum number of bytes of the schemas of all tools of a request together.
pub const CALLS_MAX_BYTES: usize = 4 << 20;
/// Maximum number of bytes of a grammar in Lark.
pub const LARK_MAX_BYTES: usize = 64 << 10;
/// Deepest nesting of brackets in a grammar, and of values in a schema.
pub const NESTING_MAX: usize = 64;
/// Maximum number of values in the JSON schemas of a request.
pub const SCHEMA_VALUES_MAX: usize = 60_000;
/// Maximum number of members of a list or an object in a schema. They are compared with one
/// another, and take a second to compile.
pub const SCHEMA_MEMBERS_MAX: usize = 6_000;
/// Maximum number of schemas that are written for one: conditions and choices are written as all
/// that they stand for.
pub const SCHEMAS_WRITTEN_MAX: usize = 100_000;
/// Maximum number of pairs of different names in `patternProperties`, times the values of the
/// schema. Each pair is compared, some 0.1 ms, and as often as schemas are merged.
pub const PATTERN_WORK_MAX: usize = 20_000;
/// Maximum number of bytes of JSON that `uniqueItems` may stand for in the schemas of a request:
/// four values in every order are 65 lists, of 49 times the bytes of the values.
pub const UNIQUE_MAX_BYTES: usize = 256 << 10;
/// Steps to find what may begin a text, 100 to 200 ns each.
pub(crate) const FIRST_BYTES_FUEL: u64 = 1_000_000;
/// White space between two parts of a JSON text: a little on one line, or a line end with an
/// indentation. More of it is what models fall into that do not know how to go on.
pub(crate) const JSON_SPACE: &str = r"[ \t]{1,2}|\r?\n[ \t]{0,40}";
/// Maximum number of digits of a number in JSON in front of its point, and as many behind it: 39
/// are all that a whole number of 128 bits has, 17 what a double is written with.
pub const DIGITS_MAX: usize = 40;
/// Maximum number of digits of a number's exponent. Doubles have 3.
pub const EXPONENT_DIGITS_MAX: usize = 4;
/// Longest reason of a refusal in bytes.
pub(crate) const REASON_MAX_BYTES: usize = 400;
/// Stack of the thread that compiles: schemas and expressions are walked by recursion.
pub(crate) const COMPILE_STACK_BYTES: usize = 64 << 20;

/// The bounds of the parser: about 20 ms for the beginning, 15 ms for the mask of a token, and 40
/// MB of states for a text.
pub(crate) fn parser() -> ParserLimits {
    ParserLimits {
        max_lexer_states: 20_000,
        max_grammar_size: 200_000,
        verbose_errors: false,
        // It would run over the whole vocabulary for each request.
        precompute_large_lexemes: false,
        ..ParserLimits::default()
    }
}
