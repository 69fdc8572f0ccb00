"""The vocabularies of the small encoders that make_encoders.py writes: WordPiece and unigram."""

import tempfile
import unicodedata
from collections import Counter

import gguf
import tokenizers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

CORPUS = """
the quick brown fox jumps over the lazy dog while a sleeping cat watches from the garden wall
a database keeps rows in pages and an index finds them; the cache holds what was read before
how do i return a broken kettle and when will the money be paid back to my account
the river rose after three days of rain and the bridge was closed to heavy lorries until monday
embedding models map a text to a vector so that texts of one meaning lie near each other
rerankers read a query together with a document and give one number for how well they fit
der schnelle braune fuchs springt über den faulen hund und die katze schläft im garten
le renard brun saute par-dessus le chien paresseux à côté de la forêt près du château
el veloz zorro marrón salta sobre el perro perezoso mañana por la mañana en españa
1234567890 3.14 2026-11-28 10:45 $5.00 50% a+b=c x<y (see [1]) e-mail: someone@example.org
""".strip()


def word_piece(lowercase):
    """Characters, words, and the pieces of two and three characters that most words have; the
    package's own trainer does not make the same of the same text twice."""
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    text = normalizer.normalize_str(CORPUS if lowercase else CORPUS + " " + CORPUS.title())
    words = [word for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(text)]
    pieces = Counter(word[i:i + n] for word in words for n in (2, 3) for i in range(1, len(word) - n + 1))
    often = sorted(pieces, key=lambda piece: (-pieces[piece], piece))[:60]
    characters = sorted({c for word in words for c in word})
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + characters
    tokens += ["##" + piece for piece in characters + often]
    tokens += sorted({word for word in words if len(word) > 1})[::2]
    vocab = {token: i for i, token in enumerate(tokens)}
    t = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    t.normalizer = normalizer
    t.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return t


def unigram():
    """As XLM-RoBERTa's: ids begin with <s>, <pad>, </s>, <unk>."""
    import io
    import sentencepiece as spm
    from sentencepiece import sentencepiece_model_pb2 as pb
    # Some of NFKC, as sentencepiece has all of it: a table of 15 kB instead of 240.
    ranges = [(0xA0, 0x180), (0x1C4, 0x1CD), (0x2000, 0x2070), (0x2100, 0x2150), (0x3000, 0x3001),
              (0xFB00, 0xFB07), (0xFF01, 0xFF5F)]
    rules = [(c, unicodedata.normalize("NFKC", chr(c))) for first, end in ranges for c in range(first, end)]
    rules = [(c, to) for c, to in rules if chr(c) != to] + [(0x200B, " "), (0x9, " "), (0xA, " "), (0xD, " ")]
    lines = [f"{c:X}\t{' '.join(f'{ord(x):X}' for x in to)}\n" for c, to in rules]
    lines += [f"{ord(a):X} {ord(b):X}\t{ord(unicodedata.normalize('NFC', a + b)):X}\n"
              for a in "aeiouAEIOU" for b in "\u0300\u0301"]
    rule_file = tempfile.NamedTemporaryFile("w", suffix=".tsv")
    rule_file.write("".join(lines))
    rule_file.flush()
    out = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.split("\n")), model_writer=out, vocab_size=300, model_type="unigram",
        character_coverage=1.0, hard_vocab_limit=False, normalization_rule_tsv=rule_file.name, minloglevel=2)
    proto = pb.ModelProto.FromString(out.getvalue())
    pieces = [(p.piece, p.score) for p in proto.pieces][3:]
    vocab = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)] + pieces + [("<mask>", 0.0)]
    t = Tokenizer(models.Unigram(vocab, unk_id=3))
    charsmap = proto.normalizer_spec.precompiled_charsmap
    t.normalizer = normalizers.Sequence([
        normalizers.Precompiled(charsmap), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")])
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    return t, vocab, charsmap


class Vocabulary:
    def __init__(self, kind):
        self.kind = kind
        if kind == "unigram":
            self.tokenizer, self.vocab, self.charsmap = unigram()
            self.n = len(self.vocab)
        else:
            self.tokenizer = word_piece(kind == "uncased")
            self.n = self.tokenizer.get_vocab_size()

    def around(self):
        """Tokens before, between and behind the texts of a pair."""
        if self.kind == "unigram":
            return [0], [2, 2], [2]
        return [2], [3], [3]

    def plain(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def ids(self, text):
        before, _, behind = self.around()
        return before + self.plain(text) + behind

    def pair(self, query, document):
        before, between, behind = self.around()
        return before + self.plain(query) + between + self.plain(document) + behind

    def write(self, w):
        kinds = gguf.TokenType
        if self.kind == "unigram":
            w.add_tokenizer_model("t5")
            w.add_tokenizer_pre("default")
            w.add_token_list([t.encode() for t, _ in self.vocab])
            w.add_token_scores([s for _, s in self.vocab])
            types = [kinds.NORMAL] * self.n
            for i, kind in [(0, kinds.CONTROL), (1, kinds.CONTROL), (2, kinds.CONTROL), (3, kinds.UNKNOWN),
                            (self.n - 1, kinds.CONTROL)]:
                types[i] = kind
            w.add_token_types(types)
            w.add_add_space_prefix(True)
            w.add_remove_extra_whitespaces(True)
            w.add_precompiled_charsmap(self.charsmap)
            w.add_bos_token_id(0)
            w.add_eos_token_id(2)
            w.add_unk_token_id(3)
            w.add_sep_token_id(2)
            w.add_pad_token_id(1)
            w.add_add_bos_token(True)
            w.add_add_eos_token(True)
            return
        tokens = [""] * self.n
        for token, i in self.tokenizer.get_vocab().items():
            tokens[i] = token
        special = range(5)
        spelled = [t if i in special else t[2:] if t.startswith("##") else "\u2581" + t
                   for i, t in enumerate(tokens)]
        w.add_tokenizer_model("bert")
        w.add_tokenizer_pre("jina-v2-en" if self.kind == "cased" else "default")
        w.add_token_list([t.encode() for t in spelled])
        w.add_token_types([kinds.CONTROL if i in special else kinds.NORMAL for i in range(self.n)])
        w.add_unk_token_id(1)
        w.add_sep_token_id(3)
        w.add_pad_token_id(0)
        w.add_bos_token_id(2)
        w.add_mask_token_id(4)
