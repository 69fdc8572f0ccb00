//! Pre-tokenizers: how a byte-level BPE vocabulary cuts text into the words
//! inside which merges happen.
//!
//! Each is published as one or more regular expressions, applied one after
//! the other: what an expression matches becomes a piece of its own, and so
//! does the text between two matches; the next expression sees each piece
//! alone. The expressions need look-ahead, which general engines serve by
//! backtracking, with a limit that long inputs hit. So they are written out as
//! scanners here: one pass, no limit, and checked in the tests against the
//! published expressions.
//!
//! *Invariant:* the pieces of a text, joined, are the text.

mod scan;

use crate::{Error, unicode};
use scan::Set;

/// One expression of a pre-tokenizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Isolates runs of at most `max` characters of the class.
    Runs { class: u8, max: usize },
    /// Isolates runs of characters of the set.
    RunsOf(Set),
    /// As `RunsOf`, each run taking the one character before it if that is
    /// white space (`\s?[...]+`).
    SpacedRunsOf(Set),
    /// Isolates each character of the set.
    Each(Set),
    /// Isolates groups of exactly three ASCII digits.
    DigitTriples,
    /// GPT-2: `'s|'t|...| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`.
    Gpt2,
    /// The cl100k family (Llama 3, Qwen 2).
    Cl100k(scan::Cl100k),
    /// The o200k family (GPT-4o, Tekken): words split where case changes.
    O200k(scan::O200k),
    /// DeepSeek V3's last expression.
    DeepSeek3,
}

/// A pre-tokenizer with what its name implies about the vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PreTokenizer {
    pub(crate) stages: &'static [Stage],
    /// A piece that is a token as it stands is taken whole, without merges.
    pub(crate) ignore_merges: bool,
    /// BOS is added if the metadata does not say.
    pub(crate) add_bos: bool,
}

const GPT2: &[Stage] = &[Stage::Gpt2];
const DIGIT_GPT2: &[Stage] = &[
    Stage::Runs {
        class: unicode::N,
        max: 1,
    },
    Stage::Gpt2,
];
const LLAMA3: &[Stage] = &[Stage::Cl100k(scan::Cl100k {
    digits: 3,
    marks: false,
    newline_tail: true,
})];
const QWEN2: &[Stage] = &[Stage::Cl100k(scan::Cl100k {
    digits: 1,
    marks: false,
    newline_tail: true,
})];
const QWEN35: &[Stage] = &[Stage::Cl100k(scan::Cl100k {
    digits: 1,
    marks: true,
    newline_tail: true,
})];
const SEED_CODER: &[Stage] = &[Stage::Cl100k(scan::Cl100k {
    digits: 1,
    marks: false,
    newline_tail: false,
})];
const TEKKEN: &[Stage] = &[Stage::O200k(scan::O200k {
    digits: 1,
    contractions: false,
})];
const GPT4O: &[Stage] = &[Stage::O200k(scan::O200k {
    digits: 3,
    contractions: true,
})];
const DEEPSEEK3: &[Stage] = &[
    Stage::Runs {
        class: unicode::N,
        max: 3,
    },
    Stage::RunsOf(Set::CjkOrKana),
    Stage::DeepSeek3,
];
const DEEPSEEK_CODER: &[Stage] = &[
    Stage::Each(Set::LineEnd),
    Stage::SpacedRunsOf(Set::Letter),
    Stage::SpacedRunsOf(Set::Punctuation),
    Stage::RunsOf(Set::Cjk),
    Stage::Runs {
        class: unicode::N,
        max: 1,
    },
];
const FALCON: &[Stage] = &[
    Stage::RunsOf(Set::FalconPunctuation),
    Stage::Gpt2,
    Stage::DigitTriples,
];
const DEFAULT: &[Stage] = &[
    Stage::RunsOf(Set::DefaultPunctuation),
    Stage::Gpt2,
    Stage::Runs {
        class: unicode::N,
        max: usize::MAX,
    },
    Stage::DigitTriples,
];

/// What one row of [`TABLE`] holds: names, stages, ignore_merges, add_bos.
type Row = (&'static [&'static str], &'static [Stage], bool, bool);

/// Every name that `tokenizer.ggml.pre` may have.
const TABLE: &[Row] = &[
    (
        &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
        ],
        LLAMA3,
        true,
        true,
    ),
    (
        &["dbrx", "smaug-bpe", "chatglm-bpe", "glm4"],
        LLAMA3,
        false,
        false,
    ),
    (
        &[
            "qwen2",
            "deepseek-r1-qwen",
            "megrez",
            "kormo",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
        QWEN2,
        false,
        false,
    ),
    (&["qwen35"], QWEN35, false, false),
    (&["seed-coder"], SEED_CODER, false, false),
    (
        &[
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
            "mellum",
            "gigachat",
            "a.x-4.0",
        ],
        GPT2,
        false,
        false,
    ),
    (
        &[
            "starcoder",
            "refact",
            "command-r",
            "smollm",
            "codeshell",
            "exaone",
            "minerva-7b",
        ],
        DIGIT_GPT2,
        false,
        false,
    ),
    (&["tekken"], TEKKEN, true, true),
    (&["gpt-4o", "llama4"], GPT4O, false, false),
    (&["deepseek-v3", "hunyuan-dense"], DEEPSEEK3, false, false),
    (&["deepseek-coder"], DEEPSEEK_CODER, false, false),
    (&["falcon"], FALCON, false, false),
    (&["default"], DEFAULT, false, false),
];

impl PreTokenizer {
    /// Looks `name` up; a file that names none gets `default`, as in the field.
    pub(crate) fn by_name(name: Option<&str>) -> Result<PreTokenizer, Error> {
        let name = match name {
            None | Some("") => "default",
            Some(name) => name,
        };
        for &(names, stages, ignore_merges, add_bos) in TABLE {
            if names.contains(&name) {
                return Ok(PreTokenizer {
                    stages,
                    ignore_merges,
                    add_bos,
                });
            }
        }
        let supported: Vec<&str> = TABLE.iter().flat_map(|row| row.0).copied().collect();
        Err(Error::UnknownPre {
            pre: name.to_owned(),
            supported: supported.join(", "),
        })
    }

    /// Calls `emit` with each word of `text`, in order, until it fails.
    pub(crate) fn split(
        &self,
        text: &str,
        emit: &mut dyn FnMut(&str) -> Result<(), Error>,
    ) -> Result<(), Error> {
        split_stages(self.stages, text, emit)
    }
}

fn split_stages(
    stages: &[Stage],
    text: &str,
    emit: &mut dyn FnMut(&str) -> Result<(), Error>,
) -> Result<(), Error> {
    let Some((stage, rest)) = stages.split_first() else {
        return emit(text);
    };
    let mut gap = 0; // start of the text that no match has taken yet
    let mut at = 0;
    while at < text.len() {
        let (skip, len) = stage.match_at(text, at);
        at += skip;
        if len == 0 {
            continue;
        }
        if gap < at {
            split_stages(rest, &text[gap..at], emit)?;
        }
        split_stages(rest, &text[at..at + len], emit)?;
        at += len;
        gap = at;
    }
    if gap < text.len() {
        split_stages(rest, &text[gap..], emit)?;
    }
    Ok(())
}

impl Stage {
    /// Tries to match at byte `at`: bytes to step over first, then the
    /// length of the match after them (0 if there is none there).
    fn match_at(&self, text: &str, at: usize) -> (usize, usize) {
        let rest = &text[at..];
        let len = match *self {
            Stage::Runs { class, max } => scan::run(rest, max, |c| unicode::class(c) & class != 0),
            Stage::RunsOf(set) => scan::run(rest, usize::MAX, |c| set.has(c)),
            Stage::SpacedRunsOf(set) => scan::spaced_run(rest, |c| set.has(c)),
            Stage::Each(set) => scan::run(rest, 1, |c| set.has(c)),
            Stage::DigitTriples => scan::digit_triple(rest),
            Stage::Gpt2 => scan::gpt2(rest),
            Stage::Cl100k(rules) => rules.scan(rest),
            Stage::O200k(rules) => rules.scan(rest),
            Stage::DeepSeek3 => scan::deepseek3(rest),
        };
        if len > 0 {
            (0, len)
        } else {
            (rest.chars().next().map_or(0, char::len_utf8), 0)
        }
    }
}

#[cfg(test)]
mod tests;
