//! The tokenizer of one model.
//!
//! Loading checks the vocabulary and builds the tables that encoding needs:
//! some tens of milliseconds for the largest ones. So a damaged vocabulary is
//! refused when its file is loaded, and never blamed on a text.
//!
//! *Invariant:* nothing changes once loaded; any thread may call anything (the
//! test `everything_can_be_shared_between_threads`).

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use rocmforge_gguf::Gguf;

use crate::bpe;
use crate::chat::Marks;
use crate::interned::Digest;
use crate::lexicon::{LEXICONS, Lexicon, Model};
use crate::special::{Part, Specials};
use crate::spm;
use crate::stream::{self, DecodeOptions, StreamDecoder};
use crate::unigram;
#[cfg(test)]
use crate::vocab::VocabData;
use crate::vocab::{Algorithm, SPM_SPACE, TokenType, Usage, Vocab};
use crate::{Error, RenderedChat, metadata};

/// Bytes of text that one [`Tokenizer::encode`] takes: more than the longest
/// contexts hold. It bounds the memory of one call, which is about 40 times
/// the longest word at worst.
pub const MAX_TEXT_BYTES: usize = 16 << 20;

/// Words that one encode remembers, and the longest of them in bytes.
const CACHED_WORDS_MAX: usize = 32 << 10;
const CACHED_WORD_BYTES_MAX: usize = 48;

/// Turns text into token ids and back. Cheap to clone; share it freely.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    vocab: Vocab,
    lexicon: Arc<Lexicon>,
    digest: Digest,
}

impl Tokenizer {
    /// Reads the vocabulary of a file and builds its tables, or shares those of another tokenizer
    /// that was made of the same tokens: then in the time that it takes to compare a digest.
    ///
    /// # Errors
    ///
    /// If the file has no vocabulary, one that contradicts itself, or one of
    /// a kind that is not supported.
    pub fn from_gguf(file: &Gguf) -> Result<Tokenizer, Error> {
        let digest = metadata::digest_of_words(file);
        let make = || Lexicon::new(metadata::read(file)?, digest);
        let lexicon = LEXICONS.get(digest, make)?;
        Tokenizer::of(lexicon, &metadata::usage(file)?)
    }

    /// The tokenizer of a file whose tokens another tokenizer has, in the time that it takes to
    /// compare a digest; the header need not be whole
    /// ([`Gguf::open_recognising`]). `None` where no tokenizer has them.
    ///
    /// # Errors
    ///
    /// If what the file says about its tokens' use is of a wrong type.
    pub fn shared(file: &Gguf) -> Result<Option<Tokenizer>, Error> {
        let lexicon = LEXICONS.find(metadata::digest_of_words(file));
        let of = |lexicon| Tokenizer::of(lexicon, &metadata::usage(file)?);
        lexicon.map(of).transpose()
    }

    #[cfg(test)]
    pub(crate) fn new(data: VocabData) -> Result<Tokenizer, Error> {
        let usage = data.usage.clone();
        let lexicon = Lexicon::new(data, Digest::of([]))?;
        Tokenizer::of(Arc::new(lexicon), &usage)
    }

    fn of(lexicon: Arc<Lexicon>, usage: &Usage) -> Result<Tokenizer, Error> {
        let vocab = Vocab::of(Arc::clone(&lexicon.words), usage);
        let used = format!(
            "{:?}",
            (
                [vocab.bos, vocab.eos, vocab.unknown],
                [vocab.add_bos, vocab.add_eos],
                [vocab.add_space_prefix, vocab.keeps_spaces],
                &vocab.ends
            )
        );
        let digest = Digest::of([&lexicon.digest.to_bytes()[..], used.as_bytes()]);
        Ok(Tokenizer {
            shared: Arc::new(Shared {
                vocab,
                lexicon,
                digest,
            }),
        })
    }

    /// What is wrong with the file's vocabulary and does not keep it from being used, a few remarks
    /// at most.
    #[must_use]
    pub fn tolerated(&self) -> &[String] {
        &self.vocab().tolerated
    }

    /// Digest of the vocabulary and its settings: tokenizers with equal digests produce equal
    /// results.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.shared.digest
    }

    /// A number that tokenizers have in common which share their tokens and tables, while any of
    /// them is there.
    #[must_use]
    pub fn lexicon_id(&self) -> usize {
        Arc::as_ptr(&self.shared.lexicon).addr()
    }

    /// Bytes of the tokens and their tables in memory, whoever shares them.
    #[must_use]
    pub fn lexicon_bytes(&self) -> usize {
        self.shared.lexicon.memory_bytes()
    }

    /// Number of tokens; ids are below it.
    #[must_use]
    pub fn n_vocab(&self) -> usize {
        self.vocab().n_vocab()
    }

    /// The token that begins a text.
    #[must_use]
    pub fn bos(&self) -> Option<u32> {
        self.vocab().bos
    }

    /// The token that ends a text.
    #[must_use]
    pub fn eos(&self) -> Option<u32> {
        self.vocab().eos
    }

    /// True if `add_special` puts [`bos`](Self::bos) in front.
    #[must_use]
    pub fn adds_bos(&self) -> bool {
        self.vocab().add_bos && self.bos().is_some()
    }

    /// True if a model that emits `id` has finished: end of text, of turn or
    /// of message.
    #[must_use]
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.vocab().ends.binary_search(&id).is_ok()
    }

    /// The tokens that end a generation, ascending.
    #[must_use]
    pub fn end_of_generation(&self) -> &[u32] {
        &self.vocab().ends
    }

    /// True for control and unknown tokens, which are not text of their own.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        matches!(
            self.vocab().token_type(id),
            TokenType::Control | TokenType::Unknown
        )
    }

    /// The bytes that `id` stands for, which need not be whole characters;
    /// for special tokens their name, for unused ones nothing. `None` outside
    /// of the vocabulary.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.vocab().pieces.get(id as usize)
    }

    /// Turns `text` into ids.
    ///
    /// `add_special` puts BOS and EOS around it where the model wants them.
    /// `parse_special` takes the names of control tokens in the text for these
    /// tokens; user-defined tokens are always recognised.
    ///
    /// # Errors
    ///
    /// If the text is too long, or has a character that a SentencePiece
    /// vocabulary without unknown token cannot express. A byte-level vocabulary
    /// leaves out what it has no token for, as those in the field do.
    pub fn encode(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, Error> {
        self.encode_at_most(usize::MAX, text, add_special, parse_special)
    }

    /// As [`encode`](Self::encode), but gives up once the text needs more than `max_tokens`: at
    /// once if the text is longer than that many of the longest tokens, unless special tokens
    /// swallow white space, else after the word or the special token that exceeds it.
    ///
    /// # Errors
    ///
    /// [`Error::TooManyTokens`], and those of [`encode`](Self::encode).
    pub fn encode_at_most(
        &self,
        max_tokens: usize,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, Error> {
        self.encode_marked(
            max_tokens,
            (text, &Marks::default()),
            add_special,
            parse_special,
        )
    }

    /// The first `max_tokens` tokens of a text; what comes far behind them is not looked at. EOS,
    /// where `add_special` puts it there, is the last of them.
    ///
    /// # Errors
    ///
    /// Those of [`encode`](Self::encode), about what is looked at.
    pub fn encode_beginning(
        &self,
        max_tokens: usize,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, Error> {
        check_length(text)?;
        let vocab = self.vocab();
        // A word that is cut would end in other tokens: there is one more than is asked for.
        let mut bytes = max_tokens
            .saturating_add(1)
            .saturating_mul(vocab.max_token_bytes);
        loop {
            let beginning = &text[..text.floor_char_boundary(bytes)];
            let mut out = Vec::new();
            let marks = Marks::default();
            let text_of = (beginning, &marks);
            match self.encode_into(max_tokens, text_of, add_special, parse_special, &mut out) {
                Err(Error::TooManyTokens { .. }) => {
                    out.truncate(max_tokens);
                    let eos = vocab.eos.filter(|_| add_special && vocab.add_eos);
                    if let (Some(eos), Some(place)) = (eos, out.last_mut()) {
                        *place = eos;
                    }
                    return Ok(out);
                }
                // Special tokens may swallow white space, and bytes without a token are left out.
                Ok(()) if beginning.len() < text.len() => bytes = bytes.saturating_mul(2),
                ended => return ended.map(|()| out),
            }
        }
    }

    /// Encodes `text`, in which marks keep the names of special tokens apart.
    fn encode_marked(
        &self,
        max_tokens: usize,
        (text, marks): (&str, &Marks),
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, Error> {
        check_length(text)?;
        let vocab = self.vocab();
        if vocab.tokens_take_their_bytes()
            && marks.is_empty()
            && text.len() / vocab.max_token_bytes > max_tokens
        {
            return Err(Error::TooManyTokens { max: max_tokens });
        }
        let mut out = Vec::with_capacity(max_tokens.min(text.len() / 4) + 2);
        self.encode_into(
            max_tokens,
            (text, marks),
            add_special,
            parse_special,
            &mut out,
        )?;
        Ok(out)
    }

    /// Encodes a text behind what is in `out`, where more than `max_tokens` tokens are once there
    /// are too many.
    fn encode_into(
        &self,
        max_tokens: usize,
        (text, marks): (&str, &Marks),
        add_special: bool,
        parse_special: bool,
        out: &mut Vec<u32>,
    ) -> Result<(), Error> {
        let vocab = self.vocab();
        let tables = &self.shared.lexicon.tables;
        if add_special && vocab.add_bos {
            out.extend(vocab.bos);
        }
        let mut encoder = Encoder::new(vocab, &tables.model, max_tokens);
        let mut after_special = true;
        let mut plain = |part: Part<'_>| {
            match part {
                Part::Token(id) => {
                    out.push(id);
                    if out.len() > max_tokens {
                        return Err(Error::TooManyTokens { max: max_tokens });
                    }
                    after_special = true;
                }
                Part::Text(text) => {
                    encoder.encode(text, after_special, out)?;
                    after_special = false;
                }
            }
            Ok(())
        };
        tables
            .specials
            .split(text, parse_special, |part| match part {
                Part::Text(text) => match marks.without(text) {
                    Cow::Borrowed(text) => plain(Part::Text(text)),
                    // Without the marks names of user-defined tokens count, as
                    // in any text; those of control tokens do not.
                    Cow::Owned(text) => tables.specials.split(&text, false, &mut plain),
                },
                part => plain(part),
            })?;
        if add_special && vocab.add_eos {
            out.extend(vocab.eos);
        }
        if out.len() > max_tokens {
            return Err(Error::TooManyTokens { max: max_tokens });
        }
        Ok(())
    }

    /// Turns a rendered chat template into ids: special tokens are parsed, and
    /// BOS comes first where the model wants it, once, whether or not the
    /// template wrote it. EOS is the template's affair. Gives up as
    /// [`encode_at_most`](Self::encode_at_most) does.
    ///
    /// # Errors
    ///
    /// As [`encode_at_most`](Self::encode_at_most).
    pub fn encode_chat(&self, max_tokens: usize, rendered: &str) -> Result<Vec<u32>, Error> {
        self.encode_chat_marked(max_tokens, (rendered, &Marks::default()))
    }

    /// As [`encode_chat`](Self::encode_chat), for what a
    /// [`Renderer`](crate::Renderer) made: special tokens are those of the
    /// template and of messages that may name them.
    ///
    /// # Errors
    ///
    /// As [`encode_at_most`](Self::encode_at_most).
    pub fn encode_rendered(
        &self,
        max_tokens: usize,
        rendered: &RenderedChat,
    ) -> Result<Vec<u32>, Error> {
        self.encode_chat_marked(max_tokens, rendered.marked())
    }

    fn encode_chat_marked(
        &self,
        max_tokens: usize,
        text: (&str, &Marks),
    ) -> Result<Vec<u32>, Error> {
        let mut ids = self.encode_marked(max_tokens, text, false, true)?;
        if let Some(bos) = self.bos()
            && self.adds_bos()
            && ids.first() != Some(&bos)
        {
            if ids.len() >= max_tokens {
                return Err(Error::TooManyTokens { max: max_tokens });
            }
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// What knows the names of control tokens.
    pub(crate) fn specials(&self) -> &Specials {
        &self.shared.lexicon.tables.specials
    }

    /// Turns ids into text. Special tokens are left out; bytes that are no
    /// UTF-8 become U+FFFD. Undoes [`encode`](Self::encode).
    ///
    /// # Errors
    ///
    /// If an id is outside of the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> Result<String, Error> {
        let options = DecodeOptions {
            special: false,
            from_start: true,
        };
        self.decode_with(ids, options)
    }

    /// As [`decode`](Self::decode), with options.
    ///
    /// # Errors
    ///
    /// If an id is outside of the vocabulary.
    pub fn decode_with(&self, ids: &[u32], options: DecodeOptions) -> Result<String, Error> {
        stream::decode(self, ids, options)
    }

    /// A decoder for ids that a model generates after a prompt: special tokens
    /// are left out, the first space is kept.
    #[must_use]
    pub fn stream(&self) -> StreamDecoder {
        self.stream_with(DecodeOptions::default())
    }

    /// As [`stream`](Self::stream), with options.
    #[must_use]
    pub fn stream_with(&self, options: DecodeOptions) -> StreamDecoder {
        StreamDecoder::new(options)
    }

    pub(crate) fn vocab(&self) -> &Vocab {
        &self.shared.vocab
    }

    pub(crate) fn adds_space_prefix(&self) -> bool {
        self.vocab().add_space_prefix
    }

    /// What `id` adds to a text.
    pub(crate) fn rendered(&self, id: u32, special: bool) -> &[u8] {
        if !special && self.is_special(id) {
            return &[];
        }
        self.token_bytes(id).unwrap_or_default()
    }
}

/// One call's state: buffers, and where words that were seen already lie in
/// the ids, since most of a text is words that come again.
struct Encoder<'a> {
    vocab: &'a Vocab,
    model: &'a Model,
    max_tokens: usize,
    bpe: bpe::MergeBuffers,
    spm: spm::MergeBuffers,
    lattice: unigram::Lattice,
    /// Word to start and length in the ids.
    seen: HashMap<Box<str>, (u32, u32), foldhash::fast::RandomState>,
}

impl<'a> Encoder<'a> {
    fn new(vocab: &'a Vocab, model: &'a Model, max_tokens: usize) -> Encoder<'a> {
        Encoder {
            vocab,
            model,
            max_tokens,
            bpe: bpe::MergeBuffers::default(),
            spm: spm::MergeBuffers::default(),
            lattice: unigram::Lattice::default(),
            seen: HashMap::default(),
        }
    }

    fn encode(&mut self, text: &str, after_special: bool, out: &mut Vec<u32>) -> Result<(), Error> {
        match (self.model, self.vocab.algorithm) {
            (Model::Bpe(_), Algorithm::Bpe(pre)) if pre.raw => {
                let text = text.replace(' ', SPM_SPACE);
                pre.split(&text, &mut |word| self.word(word, out))
            }
            (Model::Bpe(_), Algorithm::Bpe(pre)) => {
                pre.split(text, &mut |word| self.word(word, out))
            }
            (Model::Spm(model), _) => {
                let prefix = self.vocab.add_space_prefix && after_special;
                let spaces = text.bytes().filter(|&b| b == b' ').count();
                let mut marked = String::with_capacity(text.len() + 2 * spaces + SPM_SPACE.len());
                if prefix {
                    marked.push_str(SPM_SPACE);
                }
                for part in text.split_inclusive(' ') {
                    match part.strip_suffix(' ') {
                        Some(part) => {
                            marked.push_str(part);
                            marked.push_str(SPM_SPACE);
                        }
                        None => marked.push_str(part),
                    }
                }
                if model.splits_at_spaces {
                    spm::split(&marked, &mut |word| self.word(word, out))
                } else {
                    self.word(&marked, out)
                }
            }
            (Model::Unigram(model), _) => {
                let prefix = self.vocab.add_space_prefix && after_special;
                let keeps = self.vocab.keeps_spaces;
                model.split(text, prefix, keeps, &mut |word| self.word(word, out))
            }
            (Model::WordPiece(model), _) => model.split(text, &mut |word| self.word(word, out)),
            (Model::Bpe(_), _) => unreachable!("the model is built for the algorithm"),
        }
    }

    fn word(&mut self, word: &str, out: &mut Vec<u32>) -> Result<(), Error> {
        if out.len() > self.max_tokens {
            return Err(Error::TooManyTokens {
                max: self.max_tokens,
            });
        }
        let cacheable = (2..=CACHED_WORD_BYTES_MAX).contains(&word.len());
        if cacheable && let Some(&(start, len)) = self.seen.get(word) {
            out.extend_from_within(start as usize..(start + len) as usize);
            return Ok(());
        }
        let start = out.len();
        match self.model {
            Model::Bpe(model) => model.encode_word(self.vocab, word, &mut self.bpe, out),
            Model::Spm(model) => model.encode_word(self.vocab, word, &mut self.spm, out)?,
            Model::Unigram(model) => model.encode_word(self.vocab, word, &mut self.lattice, out),
            Model::WordPiece(model) => model.encode_word(self.vocab, word, out),
        }
        if cacheable && self.seen.len() < CACHED_WORDS_MAX {
            let place = (start as u32, (out.len() - start) as u32);
            self.seen.insert(word.into(), place);
        }
        Ok(())
    }
}

/// Refuses a text that is longer than one encode takes.
fn check_length(text: &str) -> Result<(), Error> {
    match text.len() {
        len if len > MAX_TEXT_BYTES => Err(Error::TextTooLong {
            len,
            max: MAX_TEXT_BYTES,
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod beginning_tests;
#[cfg(test)]
mod said_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod vocabulary_tests;
