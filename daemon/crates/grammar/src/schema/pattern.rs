//! Regular expressions of schemas, in the syntax that `llguidance` compiles.
//!
//! It has no look-around. Look-aheads at the beginning of a pattern, as generators write them for
//! e-mail addresses and host names, become patterns of their own that must match, too.

use llguidance::derivre::{RegexAst, RegexBuilder};
use llguidance::regex_to_lark;

/// Steps to find whether a name matches a pattern.
const MATCH_FUEL: u64 = 10_000;

/// The patterns that together say what one says, or why there are none.
pub(super) fn taken_apart(pattern: &str) -> Result<Vec<String>, String> {
    let mut patterns = Vec::new();
    let mut rest = pattern;
    if let Some(mut behind) = pattern.strip_prefix('^') {
        while let Some((kind, inner, after)) = look_ahead(behind) {
            patterns.push(match kind {
                "?=" => format!("^(?:{inner})"),
                _ => without(inner).ok_or_else(|| {
                    format!("the negative look-ahead (?!{inner}) cannot be enforced; write the pattern without it")
                })?,
            });
            behind = after;
        }
        rest = behind;
    }
    let main = match rest.len() == pattern.len() || pattern.starts_with('^') && patterns.is_empty()
    {
        true => pattern.to_owned(),
        false => format!("^{rest}"),
    };
    if let Some(sign) =
        look_around(&main).or_else(|| patterns.iter().find_map(|one| look_around(one)))
    {
        return Err(format!(
            "{sign} cannot be enforced there; write the pattern without it"
        ));
    }
    patterns.push(main);
    for one in &patterns {
        let mut builder = RegexBuilder::new();
        if let Err(error) = builder.mk(&searched(one)) {
            return Err(crate::reason(&error));
        }
    }
    Ok(patterns)
}

/// A pattern that matches somewhere in a text.
fn searched(pattern: &str) -> RegexAst {
    RegexAst::SearchRegex(regex_to_lark(pattern, "dw"))
}

/// Whether a text matches a pattern; nothing if that takes too long to find.
pub(super) fn matches(pattern: &str, text: &str) -> Option<bool> {
    let mut builder = RegexBuilder::new();
    let id = builder.mk(&searched(pattern)).ok()?;
    let mut regex = builder.to_regex_limited(id, MATCH_FUEL).ok()?;
    Some(regex.is_match(text))
}

/// Whether a pattern describes a text from its beginning to its end.
pub(super) fn is_whole(pattern: &str) -> bool {
    pattern.starts_with('^') && pattern.ends_with('$') && !pattern.ends_with("\\$")
}

/// A pattern of all texts but this one.
pub(super) fn other_than(text: &str) -> String {
    let mut pattern = String::from("^(?:");
    let mut before = String::new();
    for c in text.chars() {
        let c = quoted(c);
        pattern.push_str(&format!("{before}(?:[^{c}][\\s\\S]*)?|"));
        before.push_str(&c);
    }
    pattern.push_str(&format!("{before}[\\s\\S]+)$"));
    pattern
}

/// A character as a pattern has it, inside of a class and outside.
fn quoted(c: char) -> String {
    match c {
        c if c.is_ascii_alphanumeric() || !c.is_ascii() => c.to_string(),
        c if c.is_ascii_punctuation() && !"<>".contains(c) => format!("\\{c}"),
        c => format!("\\x{:02x}", u32::from(c)),
    }
}

/// A look-ahead that a text begins with: its sign, what is in it, and what is behind.
fn look_ahead(text: &str) -> Option<(&str, &str, &str)> {
    let inner = text
        .strip_prefix("(?=")
        .or_else(|| text.strip_prefix("(?!"))?;
    let (mut depth, mut in_class, mut escaped) = (1_usize, false, false);
    for (at, c) in inner.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '[' => in_class = true,
            ']' => in_class = false,
            '(' if !in_class => depth += 1,
            ')' if !in_class => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some((&text[1..3], &inner[..at], &inner[at + 1..]));
        }
    }
    None
}

/// A pattern of the texts that do not begin so: with one character or class; or with one or two
/// characters anywhere, behind `.*`.
fn without(inner: &str) -> Option<String> {
    let (anywhere, inner) = match inner.strip_prefix(".*") {
        Some(rest) => (true, rest),
        None => (false, inner),
    };
    let is_end = inner.strip_suffix('$');
    let characters = atoms(is_end.unwrap_or(inner))?;
    Some(match (characters.as_slice(), anywhere, is_end.is_some()) {
        ([a], false, false) => format!("^(?:[^{a}]|$)"),
        ([], false, true) => "[\\s\\S]".to_owned(),
        ([a], true, false) => format!("^[^{a}]*$"),
        ([a], true, true) => format!("(?:^|[^{a}])$"),
        ([a, b], true, false) if a == b => format!("^(?:[^{a}]|{a}[^{a}])*{a}?$"),
        ([a, b], true, false) if a.len() <= 2 && b.len() <= 2 => {
            format!("^(?:[^{a}]|{a}+[^{a}{b}])*{a}*$")
        }
        _ => return None,
    })
}

/// The characters or classes of a text, as they stand inside of brackets.
fn atoms(text: &str) -> Option<Vec<String>> {
    let mut atoms = Vec::new();
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        atoms.push(match c {
            '\\' => match rest.next()? {
                c if c.is_ascii_alphanumeric() && !"dws".contains(c) => return None,
                c => format!("\\{c}"),
            },
            '[' if atoms.is_empty() => {
                let class: String = rest.by_ref().take_while(|&c| c != ']').collect();
                if class.starts_with('^') || class.contains(['[', '\\']) {
                    return None;
                }
                class
            }
            c if "()[]{}.*+?|^$".contains(c) => return None,
            c => quoted(c),
        });
    }
    Some(atoms)
}

/// What a pattern has that looks around, or refers back.
fn look_around(pattern: &str) -> Option<&'static str> {
    let mut rest = pattern;
    while let Some(at) = rest.find(['\\', '(']) {
        rest = &rest[at..];
        if let Some(behind) = rest.strip_prefix('\\') {
            let mut behind = behind.chars();
            if behind
                .next()
                .is_some_and(|c| ('1'..='9').contains(&c) || c == 'k')
            {
                return Some("a back-reference");
            }
            rest = behind.as_str();
            continue;
        }
        let found = [
            ("(?=", "a look-ahead"),
            ("(?!", "a look-ahead"),
            ("(?<=", "a look-behind"),
            ("(?<!", "a look-behind"),
        ];
        if let Some((_, name)) = found.into_iter().find(|(sign, _)| rest.starts_with(sign)) {
            return Some(name);
        }
        rest = &rest[1..];
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_match(pattern: &str, text: &str) -> bool {
        let parts = taken_apart(pattern).unwrap_or_else(|error| panic!("{pattern}: {error}"));
        parts.iter().all(|part| matches(part, text) == Some(true))
    }

    #[test]
    fn look_aheads_at_the_beginning_say_what_they_said() {
        let email = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$";
        for (text, is_one) in [
            ("a.b@c.de", true),
            ("ab@c-d.ef.gh", true),
            (".a@b.cd", false),
            ("a..b@c.de", false),
            ("a@b", false),
        ] {
            assert_eq!(all_match(email, text), is_one, "{text}");
        }
        let password = r"^(?=.*[A-Z])(?=.*\d).{4,}$";
        for (text, is_one) in [
            ("abC1", true),
            ("abc1", false),
            ("abCd", false),
            ("C1", false),
        ] {
            assert_eq!(all_match(password, text), is_one, "{text}");
        }
        for (pattern, text, is_one) in [
            (r"^(?!-)[a-z-]+$", "a-b", true),
            (r"^(?!-)[a-z-]+$", "-ab", false),
            (r"^(?!.*--)[a-z-]+$", "a-b-c", true),
            (r"^(?!.*--)[a-z-]+$", "a--b", false),
            (r"^(?!.*ab)[abc]+$", "aacba", true),
            (r"^(?!.*ab)[abc]+$", "caab", false),
            (r"^(?!.*-$)[a-z-]+$", "a-b", true),
            (r"^(?!.*-$)[a-z-]+$", "ab-", false),
        ] {
            assert_eq!(all_match(pattern, text), is_one, "{pattern} {text}");
        }
    }

    #[test]
    fn what_cannot_be_enforced_is_refused() {
        for pattern in [
            r"a(?=b)",
            r"(?<!a)b",
            r"^(?!.*(foo|bar)).*$",
            r"(a)\1",
            "(",
            r"^x(?!y)",
        ] {
            assert!(taken_apart(pattern).is_err(), "{pattern}");
        }
        for pattern in [r"\(?=a", r"^\\\(?!x", "(?:a)", "(?<name>a)", r"^[(?=]$"] {
            let taken = taken_apart(pattern);
            assert!(
                taken.is_ok() || pattern.contains("[(?="),
                "{pattern}: {taken:?}"
            );
        }
    }

    #[test]
    fn all_texts_but_one_match() {
        for text in ["", "a", "abc", "a-]b", "é\n"] {
            let pattern = other_than(text);
            assert_eq!(matches(&pattern, text), Some(false), "{pattern}");
            for other in ["x", "ab", "abcd", "a-]", "aXc", "é", "\n"] {
                assert_eq!(
                    matches(&pattern, other),
                    Some(other != text),
                    "{pattern} {other}"
                );
            }
        }
    }
}
