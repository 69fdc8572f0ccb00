//! Stop strings: text is held back while it may become one.

use std::collections::VecDeque;

/// Searches for stop strings in text that arrives in pieces.
#[derive(Debug)]
pub(crate) struct StopStrings {
    stops: Vec<String>,
    /// Text at the end that may be the beginning of a stop string.
    held: String,
    /// Lengths in bytes of the last pieces whose text is held completely.
    whole: VecDeque<usize>,
}

/// Result of adding a piece of text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Checked {
    /// Text that can be sent now.
    pub(crate) text: String,
    /// Number of last pieces, this one included, whose text is held back.
    pub(crate) held: usize,
    /// Index of the stop string that was found; the text from it on is dropped.
    pub(crate) stopped: Option<u32>,
}

impl StopStrings {
    pub(crate) fn new(stops: Vec<String>) -> Self {
        Self {
            stops,
            held: String::new(),
            whole: VecDeque::new(),
        }
    }

    /// Adds a piece of text.
    pub(crate) fn push(&mut self, piece: &str) -> Checked {
        if self.stops.is_empty() {
            return Checked {
                text: piece.to_owned(),
                held: 0,
                stopped: None,
            };
        }
        self.held.push_str(piece);
        self.whole.push_back(piece.len());
        let found = (0..)
            .zip(&self.stops)
            .filter_map(|(i, s)| Some((self.held.find(s.as_str())?, i)));
        if let Some((at, index)) = found.min() {
            let held = self.pieces_within(self.held.len() - at);
            self.held.truncate(at);
            return Checked {
                text: std::mem::take(&mut self.held),
                held,
                stopped: Some(index),
            };
        }
        let keep = self.held.len() - self.possible_start();
        let rest = self.held.split_off(keep);
        Checked {
            held: self.pieces_within(rest.len()),
            text: std::mem::replace(&mut self.held, rest),
            stopped: None,
        }
    }

    /// Number of pieces that lie completely within the last `bytes` bytes; earlier ones are
    /// forgotten.
    fn pieces_within(&mut self, bytes: usize) -> usize {
        let mut sum: usize = self.whole.iter().sum();
        while sum > bytes {
            sum -= self.whole.pop_front().unwrap_or(sum);
        }
        self.whole.len()
    }

    /// The text that is still held back, at the end of the generation.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Number of bytes at the end of the held text that may begin a stop string.
    fn possible_start(&self) -> usize {
        let held = self.held.as_bytes();
        let longest = |stop: &String| {
            let stop = stop.as_bytes();
            (1..stop.len().min(held.len() + 1))
                .rev()
                .find(|&n| held.ends_with(&stop[..n]))
                .unwrap_or(0)
        };
        let mut n = self.stops.iter().map(longest).max().unwrap_or(0);
        // A stop string may begin inside a character's bytes only if it is that character.
        while !self.held.is_char_boundary(self.held.len() - n) {
            n += 1;
        }
        n
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut s = StopStrings::new(stops.iter().map(|s| (*s).to_owned()).collect());
        let mut text = String::new();
        for piece in pieces {
            let checked = s.push(piece);
            text += &checked.text;
            if checked.stopped.is_some() {
                return (text, true);
            }
        }
        text += &s.finish();
        (text, false)
    }

    #[test]
    fn stop_across_pieces_is_found_and_cut() {
        assert_eq!(
            all(&["END"], &["abcE", "N", "Dxyz"]),
            ("abc".to_owned(), true)
        );
        assert_eq!(all(&["END", "c"], &["abcEND"]), ("ab".to_owned(), true));
        assert_eq!(all(&["aab"], &["a", "a", "a", "b"]), ("a".to_owned(), true));
    }

    #[test]
    fn text_that_only_looked_like_a_stop_is_given_back() {
        assert_eq!(
            all(&["END"], &["E", "N", "E", "N", "T"]),
            ("ENENT".to_owned(), false)
        );
        assert_eq!(all(&["END"], &["abcEN"]), ("abcEN".to_owned(), false));
        assert_eq!(
            all(&["\u{e9}x"], &["\u{e9}", "\u{e9}y"]),
            ("\u{e9}\u{e9}y".to_owned(), false)
        );
    }

    #[test]
    fn pieces_that_are_held_whole_are_counted() {
        let held = |stop: &str, pieces: &[&str]| {
            let mut s = StopStrings::new(vec![stop.to_owned()]);
            let held: Vec<_> = pieces.iter().map(|piece| s.push(piece).held).collect();
            held
        };
        assert_eq!(held("aab", &["a", "a", "a", "b"]), [1, 2, 2, 3]);
        assert_eq!(
            held("\n\nQ", &["\n", "\n", "\n", "\n", "Q"]),
            [1, 2, 2, 2, 3]
        );
        // Of the first one some is told.
        assert_eq!(held("END", &["xE", "N", "", "D"]), [0, 1, 2, 3]);
        assert_eq!(held("END", &["E", "N", "E", "x"]), [1, 2, 1, 0]);
        // Those of a character that is not whole have their text in the next one.
        assert_eq!(held("END", &["", "x", "", "E"]), [1, 0, 1, 2]);
    }

    #[test]
    fn nothing_is_held_that_cannot_become_a_stop() {
        let mut s = StopStrings::new(vec!["###".to_owned()]);
        assert_eq!(
            s.push("ab#"),
            Checked {
                text: "ab".to_owned(),
                held: 0,
                stopped: None
            }
        );
        assert_eq!(
            s.push("c"),
            Checked {
                text: "#c".to_owned(),
                held: 0,
                stopped: None
            }
        );
    }
}
