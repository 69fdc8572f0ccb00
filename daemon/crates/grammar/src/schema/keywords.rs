//! The keywords of JSON Schema, and what is done with each.
//!
//! [`KEYWORDS`] is the one list: the rewriting asks it, and `docs/json-schema.md` is printed from
//! it
//! (test `the_page_of_keywords_is_printed_from_the_list`).

use std::fmt::Write as _;

/// How a keyword of a schema is treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Treatment {
    /// The keyword constrains the output.
    Enforced,
    /// The keyword constrains the output in the forms that the note lists; other forms are
    /// rejected.
    Partly,
    /// The keyword does not restrict which values are valid, and is ignored.
    Annotation,
}

/// A keyword of a schema.
#[derive(Debug, Clone, Copy)]
pub struct Keyword {
    /// The keyword's name.
    pub name: &'static str,
    /// The vocabulary of draft 2020-12 that defines the keyword, or another definer.
    pub vocabulary: &'static str,
    /// How the keyword is treated.
    pub treatment: Treatment,
    /// What a reader has to know beside that.
    pub note: &'static str,
}

const CORE: &str = "core";
const APPLICATOR: &str = "applicator";
const UNEVALUATED: &str = "unevaluated";
const VALIDATION: &str = "validation";
const FORMAT: &str = "format-annotation";
const CONTENT: &str = "content";
const META: &str = "meta-data";
const OLDER: &str = "older drafts";
const OPENAPI: &str = "OpenAPI";
const GUIDANCE: &str = "llguidance";

/// The values of `format` that strings are held to. All others are annotations.
pub const FORMATS: [&str; 10] = [
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
];

macro_rules! keywords {
    ($($vocabulary:ident $treatment:ident $name:literal $note:literal;)*) => {
        /// All keywords that are known. A keyword that is not in this list is an annotation.
        pub const KEYWORDS: &[Keyword] = &[$(Keyword {
            name: $name,
            vocabulary: $vocabulary,
            treatment: Treatment::$treatment,
            note: $note,
        },)*];
    };
}

keywords! {
    CORE Annotation "$schema" "Draft 7 and earlier ignore keywords beside `$ref`.";
    CORE Annotation "$vocabulary" "";
    CORE Annotation "$comment" "";
    CORE Enforced "$id" "The base of references below it.";
    CORE Enforced "$anchor" "";
    CORE Enforced "$ref" "To any place of the same document, by JSON pointer (RFC 6901), anchor or `$id`. Nothing is fetched.";
    CORE Partly "$dynamicRef" "As `$ref`; rejected if several schemas have the same `$dynamicAnchor`.";
    CORE Enforced "$dynamicAnchor" "";
    CORE Enforced "$defs" "";
    APPLICATOR Enforced "allOf" "";
    APPLICATOR Enforced "anyOf" "";
    APPLICATOR Enforced "oneOf" "As `anyOf`: a value that matches two branches is let through, unless each branch has nothing but `required`.";
    APPLICATOR Partly "not" "Of `type`, `const`, `enum`, `required`, `properties`, lengths and bounds of numbers, and of `anyOf`, `allOf` and `not` of these.";
    APPLICATOR Partly "if" "As `not`, since `else` applies where it does not match. Without `then` and `else` it says nothing.";
    APPLICATOR Partly "then" "See `if`.";
    APPLICATOR Partly "else" "See `if`.";
    APPLICATOR Partly "dependentSchemas" "Up to 6 in one schema.";
    APPLICATOR Enforced "prefixItems" "";
    APPLICATOR Enforced "items" "A list is read as `prefixItems`.";
    APPLICATOR Partly "contains" "With `minContains` up to 1; one of the first 16 items matches.";
    APPLICATOR Enforced "properties" "In the order in which they are declared.";
    APPLICATOR Enforced "patternProperties" "No name may match two patterns.";
    APPLICATOR Enforced "additionalProperties" "";
    APPLICATOR Partly "propertyNames" "`enum`, `const`, `pattern`, `minLength` and `maxLength`.";
    UNEVALUATED Partly "unevaluatedItems" "Beside no `$ref`, `allOf`, `anyOf`, `oneOf` or `if`.";
    UNEVALUATED Partly "unevaluatedProperties" "`true`, `false`, or beside nothing that evaluates others.";
    VALIDATION Enforced "type" "";
    VALIDATION Enforced "enum" "";
    VALIDATION Enforced "const" "";
    VALIDATION Enforced "multipleOf" "";
    VALIDATION Enforced "maximum" "Numbers up to 2^53, whatever a larger one says.";
    VALIDATION Enforced "exclusiveMaximum" "As `maximum`. `true` as in draft 4.";
    VALIDATION Enforced "minimum" "As `maximum`.";
    VALIDATION Enforced "exclusiveMinimum" "As `exclusiveMaximum`.";
    VALIDATION Enforced "maxLength" "";
    VALIDATION Enforced "minLength" "";
    VALIDATION Partly "pattern" "No back-references. Look-aheads at its beginning: any positive one; negative ones of one character, or of `.*` and one or two. Beside an enforced `format`, that stands for a pattern which cannot be enforced.";
    VALIDATION Enforced "maxItems" "";
    VALIDATION Enforced "minItems" "";
    VALIDATION Partly "uniqueItems" "Where at most one item fits, or the items are up to 4 values, whose lists in every order are at most 256 KiB in a request.";
    VALIDATION Partly "maxContains" "Where `contains` matches every item.";
    VALIDATION Partly "minContains" "0 and 1; more where `contains` matches every item.";
    VALIDATION Partly "maxProperties" "With up to 6 optional properties.";
    VALIDATION Partly "minProperties" "With up to 64 choices of optional properties.";
    VALIDATION Enforced "required" "`true` and `false`, as in draft 3, are ignored.";
    VALIDATION Partly "dependentRequired" "Up to 6 in one schema.";
    FORMAT Partly "format" "Enforced: `date-time`, `time`, `date`, `duration`, `email`, `hostname`, `ipv4`, `ipv6`, `uuid`, `uri`. All others, and those beside a `pattern` from `^` to `$`, are annotations.";
    CONTENT Annotation "contentEncoding" "";
    CONTENT Annotation "contentMediaType" "";
    CONTENT Annotation "contentSchema" "";
    META Annotation "title" "";
    META Annotation "description" "";
    META Annotation "default" "";
    META Annotation "deprecated" "";
    META Annotation "readOnly" "";
    META Annotation "writeOnly" "";
    META Annotation "examples" "";
    OLDER Enforced "definitions" "As `$defs`.";
    OLDER Enforced "id" "As `$id`.";
    OLDER Partly "dependencies" "As `dependentRequired` and `dependentSchemas`.";
    OLDER Enforced "additionalItems" "Beside `items` as a list; otherwise it says nothing.";
    OLDER Enforced "$recursiveRef" "As `$ref`.";
    OLDER Annotation "$recursiveAnchor" "";
    OPENAPI Enforced "nullable" "`true` allows null beside what the schema describes.";
    OPENAPI Annotation "discriminator" "The branches of `oneOf` tell which one it is.";
    OPENAPI Annotation "example" "";
    OPENAPI Annotation "externalDocs" "";
    OPENAPI Annotation "xml" "";
    GUIDANCE Enforced "x-guidance" "Options at the root, but for separators.";
}

/// The keyword of this name.
pub(super) fn known(name: &str) -> Option<&'static Keyword> {
    KEYWORDS.iter().find(|keyword| keyword.name == name)
}

/// All keywords as a page in Markdown.
pub fn page() -> String {
    let mut page = String::from(
        "# JSON Schema keywords\n\
         \n\
         Structured output (`response_format`, `format`, `text.format`, `output_config.format`), forced tool\n\
         calls and tools with `strict: true` are constrained to a JSON schema. The dialect is draft\n\
         2020-12, with the keywords of older drafts and of OpenAPI that generators still write.\n\
         \n\
         - *enforced*: the output is constrained by the keyword.\n\
         - *partly*: the output is constrained by it in the forms that the note lists. A form that says\n\x20\x20\
         nothing new, as `uniqueItems: false`, is always accepted. Any other form is rejected with 400; the\n\x20\x20\
         message names the keyword and its place as a JSON pointer.\n\
         - *annotation*: the keyword says nothing about which values are valid, and is ignored. Keywords that\n\x20\x20\
         are not in this table are annotations, too.\n\
         \n\
         A keyword whose value is `null` is ignored, except `const` and `default`. `[]` in the place of an\n\
         object or a schema counts as an empty one, as PHP writes it.\n\
         \n\
         Numbers have at most 40 digits before the point, 40 behind it and 4 in the exponent. White space\n\
         between two parts is at most 2 spaces, or a line end and 40 spaces.\n\
         \n\
         | keyword | vocabulary | | note |\n\
         |---|---|---|---|\n\
         ",
    );
    for keyword in KEYWORDS {
        let treatment = match keyword.treatment {
            Treatment::Enforced => "enforced",
            Treatment::Partly => "partly",
            Treatment::Annotation => "annotation",
        };
        let Keyword {
            name,
            vocabulary,
            note,
            ..
        } = keyword;
        // Writing into a string cannot fail.
        let _ = writeln!(page, "| `{name}` | {vocabulary} | {treatment} | {note} |");
    }
    page
}
