//! `wordwrap`: Python's `textwrap`.

use crate::args::{self, Args};
use crate::fault::{R, fail};
use crate::lexer;
use crate::methods;
use crate::operators::sized;
use crate::value::Value;

/// The filter.
pub(super) fn word_wrap(value: &Value, args: Args) -> R<Value> {
    let names = [
        "width",
        "break_long_words",
        "wrapstring",
        "break_on_hyphens",
    ];
    let [width, breaks, by, hyphens] = args.bind("wordwrap", names, 0)?;
    let width = width.as_ref().map_or(Ok(79), args::int)?;
    let is_on = |flag: Option<Value>| flag.is_none_or(|flag| flag.is_true());
    let (breaks, hyphens) = (is_on(breaks), is_on(hyphens));
    let by = args::some(by).unwrap_or_else(|| Value::text("\n"));
    let by = args::text(&by)?;
    let text = args::text(value)?;
    let mut lines = Vec::new();
    for line in methods::split_lines(text, false) {
        if width <= 0 {
            return fail(format!("invalid width {width} (must be > 0)"));
        }
        let chunks = chunks(line, hyphens);
        let wrapped = wrapped(chunks, width as usize, breaks, hyphens);
        lines.push(wrapped.join(by));
    }
    sized(lines.iter().map(|line| line.len() + by.len()).sum())?;
    Ok(Value::from(lines.join(by)))
}

fn is_blank(c: char) -> bool {
    matches!(c, '\t'..='\r' | ' ')
}

/// Pieces that a line may be broken between: words, white space, and parts of words with hyphens.
fn chunks(text: &str, hyphens: bool) -> Vec<String> {
    let mut chunks = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let len = match is_blank(first) {
            true => rest.find(|c| !is_blank(c)).unwrap_or(rest.len()),
            false => {
                let word = rest.find(is_blank).unwrap_or(rest.len());
                match hyphens {
                    true => hyphen_len(&rest[..word]),
                    false => word,
                }
            }
        };
        chunks.push(rest[..len].to_owned());
        rest = &rest[len..];
    }
    chunks
}

/// Bytes of a word up to and with the first hyphen that it may be broken behind.
fn hyphen_len(word: &str) -> usize {
    let chars: Vec<(usize, char)> = word.char_indices().collect();
    let at = |n: usize| chars.get(n).map(|(_, c)| *c);
    let is_letter =
        |c: Option<char>| c.is_some_and(|c| methods::is_word(c) && !c.is_ascii_digit() && c != '_');
    let of_word = |c: char| methods::is_word(c) || "!\"'&.,?".contains(c);
    let mut n = 0;
    while let Some(c) = at(n) {
        // A dash of two hyphens or more stands alone between words.
        if c == '-' && at(n + 1) == Some('-') {
            let run = chars[n..].iter().take_while(|(_, c)| *c == '-').count();
            let behind = at(n + run);
            if n > 0 && at(n - 1).is_some_and(of_word) && behind.is_some_and(methods::is_word) {
                return chars[n].0;
            }
            if n == 0 && behind.is_some_and(methods::is_word) {
                return chars.get(run).map_or(word.len(), |(at, _)| *at);
            }
            n += run;
            continue;
        }
        let is_hyphen = c == '-' && n > 1;
        let before = is_hyphen
            && (is_letter(at(n - 1)) && is_letter(at(n - 2))
                || is_letter(at(n - 1)) && at(n - 2) == Some('-') && n > 2 && is_letter(at(n - 3)));
        let behind = is_letter(at(n + 1)) && (is_letter(at(n + 2)) || at(n + 2) == Some('-'));
        if before && behind {
            return chars[n].0 + 1;
        }
        n += 1;
    }
    word.len()
}

/// Lines of at most `width` characters.
fn wrapped(chunks: Vec<String>, width: usize, breaks: bool, hyphens: bool) -> Vec<String> {
    let mut lines = Vec::new();
    let mut rest: Vec<String> = chunks.into_iter().rev().collect();
    let count = |text: &str| text.chars().count();
    // Wider than what lines are broken at: a piece may be a space that does not break.
    let is_space = |text: &String| text.trim_matches(lexer::is_space).is_empty();
    while !rest.is_empty() {
        if !lines.is_empty() && rest.last().is_some_and(is_space) {
            rest.pop();
        }
        let mut line: Vec<String> = Vec::new();
        let mut used = 0;
        while let Some(next) = rest.last() {
            let n = count(next);
            if used + n > width {
                break;
            }
            used += n;
            line.extend(rest.pop());
        }
        if let Some(long) = rest.last().filter(|next| count(next) > width) {
            if breaks {
                // On a full line nothing of the word, which stands for its last piece then.
                let room = width.saturating_sub(used);
                let cut = cut_of(long, room, hyphens);
                let (head, tail) = long.split_at(cut);
                let (head, tail) = (head.to_owned(), tail.to_owned());
                line.push(head);
                rest.pop();
                rest.push(tail);
            } else if line.is_empty() {
                line.extend(rest.pop());
            }
        }
        if line.last().is_some_and(is_space) {
            line.pop();
        }
        if !line.is_empty() {
            lines.push(line.concat());
        }
    }
    lines
}

/// Bytes of a long word that go on a line with `room` characters.
fn cut_of(word: &str, room: usize, hyphens: bool) -> usize {
    let byte = |n: usize| word.char_indices().nth(n).map_or(word.len(), |(at, _)| at);
    let cut = byte(room);
    if hyphens && word.chars().count() > room {
        let hyphen = word[..cut].rfind('-');
        if let Some(at) = hyphen.filter(|at| *at > 0 && word[..*at].contains(|c| c != '-')) {
            return at + 1;
        }
    }
    cut
}
