//! WordPiece, BERT's (Schuster & Nakajima 2012; Devlin et al. 2019, arXiv 1810.04805): a text is
//! cleaned, and cut into words at white space, around punctuation and around Chinese characters; of
//! a word the longest token that it begins with is taken, then the longest continuation, and so on.
//! A word of which some part has no token is one unknown token.
//!
//! Files spell a token that begins a word with SentencePiece's space mark in front, and a
//! continuation as it is. A vocabulary without large letters is of a model that was trained on
//! small letters without accents.

use unicode_general_category::{GeneralCategory as G, get_general_category};
use unicode_normalization::UnicodeNormalization;

use crate::Error;
use crate::texts::TextIndex;
use crate::vocab::{SPM_SPACE, TokenType, Vocab, Words};

/// A longer word is unknown, in characters.
const WORD_MAX: usize = 100;

/// The tables of one vocabulary.
#[derive(Debug)]
pub(crate) struct WordPiece {
    index: TextIndex,
    /// Texts are brought to small letters without accents.
    uncased: bool,
}

impl WordPiece {
    /// Bytes of memory.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.index.memory_bytes()
    }

    /// Builds the tables.
    pub(crate) fn build(vocab: &Words) -> Result<WordPiece, Error> {
        let is_piece = |id| {
            matches!(
                vocab.token_type(id),
                TokenType::Normal | TokenType::UserDefined | TokenType::Unused
            )
        };
        let mark = SPM_SPACE.as_bytes();
        let named = |text: &[u8]| text.strip_prefix(mark).unwrap_or(text).starts_with(b"[");
        let texts = vocab.texts.iter().enumerate();
        let pieces = texts.filter(|(id, text)| is_piece(*id as u32) && !named(text));
        let uncased = pieces
            .filter_map(|(_, text)| std::str::from_utf8(text).ok())
            .all(|text| !text.chars().any(char::is_uppercase));
        Ok(WordPiece {
            index: TextIndex::build(&vocab.texts, is_piece)?,
            uncased,
        })
    }

    /// Calls `emit` with each word of a text, cleaned.
    pub(crate) fn split(
        &self,
        text: &str,
        emit: &mut dyn FnMut(&str) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut word = String::new();
        let mut end = |word: &mut String| match word.is_empty() {
            true => Ok(()),
            false => {
                let ended = emit(word);
                word.clear();
                ended
            }
        };
        let mut take = |c: char| -> Result<(), Error> {
            if c.is_whitespace() {
                return end(&mut word);
            }
            if is_left_out(c) {
                return Ok(());
            }
            if stands_alone(c) {
                end(&mut word)?;
                word.push(c);
                return end(&mut word);
            }
            word.push(c);
            Ok(())
        };
        match self.uncased {
            true => {
                // White space and control characters decompose to nothing else.
                let plain = text.chars().nfd().filter(|c| !is_accent(*c));
                plain.flat_map(char::to_lowercase).try_for_each(&mut take)?;
            }
            false => text.chars().try_for_each(&mut take)?,
        }
        take(' ')
    }

    /// Appends the tokens of one word.
    pub(crate) fn encode_word(&self, vocab: &Vocab, word: &str, out: &mut Vec<u32>) {
        let start = out.len();
        if word.chars().count() > WORD_MAX || !self.pieces(vocab, word, out) {
            out.truncate(start);
            out.extend(vocab.unknown);
        }
    }

    /// Appends the tokens of a word; whether all of it has some.
    fn pieces(&self, vocab: &Vocab, word: &str, out: &mut Vec<u32>) -> bool {
        let mut piece = String::with_capacity(SPM_SPACE.len() + word.len());
        piece.push_str(SPM_SPACE);
        let mut rest = word;
        while !rest.is_empty() {
            let mark = piece.len();
            piece.push_str(rest);
            let found = loop {
                if let Some(id) = self.index.find(&vocab.texts, piece.as_bytes()) {
                    break Some(id);
                }
                piece.pop();
                if piece.len() <= mark {
                    break None;
                }
            };
            let Some(id) = found else {
                return false;
            };
            out.push(id);
            rest = &rest[piece.len() - mark..];
            piece.clear();
        }
        true
    }
}

/// Control characters and what stands for characters that could not be read.
fn is_left_out(c: char) -> bool {
    c == '\u{FFFD}'
        || matches!(
            get_general_category(c),
            G::Control | G::Format | G::PrivateUse
        )
}

/// Non-spacing marks.
fn is_accent(c: char) -> bool {
    !c.is_ascii() && get_general_category(c) == G::NonspacingMark
}

/// Whether a character is a word of its own: punctuation, and Chinese, which is written without
/// spaces.
fn stands_alone(c: char) -> bool {
    if c.is_ascii() {
        return c.is_ascii_punctuation();
    }
    is_chinese(c)
        || matches!(
            get_general_category(c),
            G::ConnectorPunctuation
                | G::DashPunctuation
                | G::OpenPunctuation
                | G::ClosePunctuation
                | G::InitialPunctuation
                | G::FinalPunctuation
                | G::OtherPunctuation
        )
}

/// The blocks of ideographs that BERT's tokenizer names.
fn is_chinese(c: char) -> bool {
    matches!(
        u32::from(c),
        0x4E00..=0x9FFF
            | 0x3400..=0x4DBF
            | 0x20000..=0x2A6DF
            | 0x2A700..=0x2B73F
            | 0x2B740..=0x2B81F
            | 0x2B920..=0x2CEAF
            | 0xF900..=0xFAFF
            | 0x2F800..=0x2FA1F
    )
}

#[cfg(test)]
mod tests {
    use crate::Tokenizer;
    use crate::fixture::texts;
    use crate::vocab::{Usage, VocabData};

    /// `[PAD]`, `[UNK]`, `[CLS]`, `[SEP]`, then these.
    fn tokenizer(tokens: &[&str]) -> Tokenizer {
        let names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"];
        let all = names.iter().chain(tokens).map(|t| t.as_bytes());
        let mut types = vec![3; names.len()];
        types.resize(names.len() + tokens.len(), 1);
        let mut special = [None; crate::vocab::SPECIAL_KEYS.len()];
        special[crate::vocab::UNK] = Some(1);
        special[crate::vocab::CLS] = Some(2);
        special[crate::vocab::SEP] = Some(3);
        Tokenizer::new(VocabData {
            model: "bert".into(),
            tokens: texts(all),
            types: Some(types),
            usage: Usage {
                special,
                ..Usage::default()
            },
            ..VocabData::default()
        })
        .unwrap()
    }

    #[test]
    fn words_are_their_longest_pieces_between_cls_and_sep() {
        let tokenizer = tokenizer(&["▁un", "aff", "able", "▁a", "a", "▁,", "▁中", "▁e"]);
        let ids = |text: &str| tokenizer.encode(text, true, false).unwrap();
        assert_eq!(ids("unaffable"), [2, 4, 5, 6, 3]);
        assert_eq!(ids(" UNAFFABLE,\ta\n"), [2, 4, 5, 6, 9, 7, 3]);
        assert_eq!(ids("a中a"), [2, 7, 10, 7, 3]);
        assert_eq!(ids("É\u{200B}"), [2, 11, 3]);
        // A word is unknown as a whole; a text may not name a control token.
        assert_eq!(ids("unaffix a"), [2, 1, 7, 3]);
        let long = "a".repeat(101);
        assert_eq!(ids(&long), [2, 1, 3]);
        assert_eq!(ids(""), [2, 3]);
        assert_eq!(tokenizer.encode("[SEP]", false, true).unwrap(), [3]);
    }

    #[test]
    fn a_vocabulary_with_large_letters_keeps_them_and_accents() {
        let tokenizer = tokenizer(&["▁A", "▁a", "▁é"]);
        let ids = |text: &str| tokenizer.encode(text, false, false).unwrap();
        assert_eq!(ids("A a é É"), [4, 5, 6, 1]);
    }
}
