//! Pre-tokenizers: how a byte-level BPE vocabulary cuts text into the words
//! inside which merges happen.
//!
//! Each is published as one or more regular expressions, applied one after
//! the other: what an expression matches becomes a piece of its own, and so
//! does the text between two matches; the next expression sees each piece
//! alone. The expressions need look-ahead, which general engines serve by
//! backtracking, with a limit that long inputs hit. So they are written out as
//! scanners here: one pass, no limit.
//!
//! *Invariants:* a scanner cuts as the published expressions do (tests
//! `scanners_agree_with_the_published_expressions`,
//! `every_listed_stage_list_has_a_published_form_in_the_test`), in time that is in proportion to
//! the text (test `long_runs_are_cut_in_time_in_proportion_under_every_name`). The pieces of a
//! text, joined, are the text (that test, and `any_text_survives_byte_level_bpe`).

mod han;
mod letters;
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
    /// `[^\n]+|[\n]+`
    Lines,
    /// White space at the end of a piece (`\s+$`).
    TrailingSpace,
    /// Runs of characters that are no white space and no mark of BLOOM's list,
    /// with the space before them.
    BloomWords,
    /// Cuts runs of decimal digits into groups of three from their end.
    TriplesFromEnd,
    /// Kimi K2: o200k, with Chinese characters in words of their own.
    KimiK2,
}

/// A pre-tokenizer with what its name implies about the vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PreTokenizer {
    pub(crate) stages: &'static [Stage],
    /// A piece that is a token as it stands is taken whole, without merges.
    pub(crate) ignore_merges: bool,
    /// BOS is added if the metadata does not say.
    pub(crate) add_bos: bool,
    /// Words are text in which spaces are marks, as in SentencePiece, and not
    /// bytes in GPT-2's alphabet.
    pub(crate) raw: bool,
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
const MINICPM5: &[Stage] = &[
    Stage::Runs {
        class: unicode::N,
        max: 3,
    },
    Stage::Cl100k(scan::Cl100k {
        digits: usize::MAX,
        marks: false,
        newline_tail: true,
    }),
];
const LAGUNA: &[Stage] = &[
    Stage::Lines,
    Stage::Cl100k(scan::Cl100k {
        digits: 1,
        marks: false,
        newline_tail: true,
    }),
];
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
const DEEPSEEK_LLM: &[Stage] = &[
    Stage::Each(Set::LineEnd),
    Stage::SpacedRunsOf(Set::CasedLetter),
    Stage::SpacedRunsOf(Set::WidePunctuation),
    Stage::TrailingSpace,
    Stage::RunsOf(Set::Cjk),
    Stage::Runs {
        class: unicode::N,
        max: usize::MAX,
    },
];
const KIMI_K2: &[Stage] = &[Stage::KimiK2];
const BLOOM: &[Stage] = &[Stage::BloomWords];
const VIKING: &[Stage] = &[
    Stage::BloomWords,
    Stage::Runs {
        class: unicode::N,
        max: 1,
    },
];
const SUPERBPE: &[Stage] = &[
    Stage::Runs {
        class: unicode::N,
        max: usize::MAX,
    },
    Stage::TriplesFromEnd,
];
const GEMMA4: &[Stage] = &[Stage::Lines];
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
            "jina-v5-nano",
        ],
        LLAMA3,
        true,
        true,
    ),
    (&["dbrx", "smaug-bpe", "chatglm-bpe"], LLAMA3, false, false),
    (&["glm4"], LLAMA3, true, false),
    (&["minicpm5"], MINICPM5, true, false),
    (&["laguna"], LAGUNA, false, false),
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
            "f2llmv2",
            "bailingmoe",
            "bailingmoe2",
            "llada-moe",
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
            "jina-es",
            "jina-de",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v1-en",
            "jina-v2-code",
            "modern-bert",
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
            "mellum2",
        ],
        DIGIT_GPT2,
        false,
        false,
    ),
    (&["tekken"], TEKKEN, true, true),
    (
        &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"],
        GPT4O,
        false,
        false,
    ),
    (&["kimi-k2"], KIMI_K2, false, false),
    (
        &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        DEEPSEEK3,
        false,
        false,
    ),
    (&["deepseek-llm"], DEEPSEEK_LLM, false, false),
    (&["viking"], VIKING, false, false),
    (&["poro-chat", "bloom", "gpt3-finnish"], BLOOM, false, false),
    (&["superbpe"], SUPERBPE, false, false),
    (&["gemma4"], GEMMA4, false, true),
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
                    raw: stages == GEMMA4,
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
    if *stage == Stage::TriplesFromEnd {
        return scan::triples_from_end(text, &mut |piece| split_stages(rest, piece, emit));
    }
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
            Stage::Lines => match scan::run(rest, usize::MAX, |c| c == '\n') {
                0 => scan::run(rest, usize::MAX, |c| c != '\n'),
                len => len,
            },
            Stage::TrailingSpace => {
                // A run that does not reach the end is stepped over whole.
                let len = scan::run(rest, usize::MAX, |c| unicode::class(c) & unicode::S != 0);
                if len > 0 && len < rest.len() {
                    return (len, 0);
                }
                len
            }
            Stage::BloomWords => {
                let space = usize::from(rest.starts_with(' '));
                match scan::run(&rest[space..], usize::MAX, |c| Set::BloomWord.has(c)) {
                    0 => 0,
                    len => space + len,
                }
            }
            // Cut by split_stages, which needs a whole run at a time.
            Stage::TriplesFromEnd => 0,
            Stage::KimiK2 => scan::kimi_k2(rest),
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
