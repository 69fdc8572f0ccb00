"""A small byte-level BPE encoder over a GGUF file's own vocabulary, to drive the reference
without the code under test.

Sources: Sennrich et al. 2016 (BPE), GPT-2's byte-to-unicode table, and Qwen2's
published pre-tokenizer pattern. Python's `re` has no Unicode classes, so a letter is
`[^\\W\\d_]` and a number is `\\d`: the same as \\p{L} and \\p{N} for the text of the
fixtures, and not for every script.
"""

import re

SPLIT = re.compile(
    r"'(?:[sdmtSDMT]|[lL]{2}|[vV][eE]|[rR][eE])"
    r"|(?:[^\r\n\w]|_)?[^\W\d_]+"
    r"|\d"
    r"| ?(?:[^\s\w]|_)+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


def _byte_table():
    """GPT-2's map of bytes to printable characters: printable ones stand for themselves, the
    rest follow from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in printable}
    table.update({b: chr(256 + n) for n, b in enumerate(b for b in range(256) if b not in table)})
    return table


class ByteBpe:
    """Text to ids and back, special tokens in the text included."""

    def __init__(self, tokens, merges, token_types):
        self.tokens = tokens
        self.ids = {t: i for i, t in enumerate(tokens)}
        self.ranks = {tuple(m.split(" ")): n for n, m in enumerate(merges)}
        self.byte_to_char = _byte_table()
        self.char_to_byte = {c: b for b, c in self.byte_to_char.items()}
        self.special = {t for t, kind in zip(tokens, token_types) if kind in (CONTROL, USER_DEFINED)}
        longest_first = sorted(map(re.escape, self.special), key=len, reverse=True)
        self.special_split = re.compile("(" + "|".join(longest_first) + ")") if self.special else None

    @classmethod
    def from_reader(cls, reader):
        """Takes a gguf.GGUFReader; only byte-level BPE vocabularies have merges."""
        model = reader.fields["tokenizer.ggml.model"].contents()
        if model != "gpt2":
            raise SystemExit(f"tokenizer.ggml.model is {model!r}, not byte-level BPE: give ids with --ids instead of text")
        return cls(*(reader.fields[f"tokenizer.ggml.{k}"].contents() for k in ("tokens", "merges", "token_type")))

    def encode(self, text):
        """The ids of `text`; special tokens written out in it become
        themselves, nothing is added."""
        parts = self.special_split.split(text) if self.special_split else [text]
        ids = []
        for part in parts:
            if part in self.special:
                ids.append(self.ids[part])
            else:
                for word in SPLIT.findall(part):
                    ids += self._word(word)
        return ids

    def _word(self, word):
        symbols = [self.byte_to_char[b] for b in word.encode()]
        while len(symbols) > 1:
            pairs = list(zip(symbols, symbols[1:]))
            best = min(pairs, key=lambda p: self.ranks.get(p, len(self.ranks)))
            if best not in self.ranks:
                break
            at = pairs.index(best)
            symbols[at:at + 2] = ["".join(best)]
        return [self.ids[s] for s in symbols]

    def decode(self, ids):
        """The text of `ids`; special tokens as they are written."""
        out = bytearray()
        for token in (self.tokens[i] for i in ids):
            out += token.encode() if token in self.special else bytes(self.char_to_byte[c] for c in token)
        return out.decode(errors="replace")
