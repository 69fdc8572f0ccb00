//! GBNF's text, read into rules.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::iter::Peekable;
use std::str::CharIndices;

use super::{COUNT_MAX, Expr, Fault, NESTING_MAX, RULES_MAX, Rules};

/// The first character behind those that are none.
const AFTER_SURROGATES: u32 = 0xe000;
const BEFORE_SURROGATES: u32 = 0xd7ff;

struct Reader<'a> {
    text: &'a str,
    rest: Peekable<CharIndices<'a>>,
    numbers: HashMap<String, usize>,
    bodies: Vec<Option<Expr>>,
    /// Where each rule is first named, as an offset.
    named_at: Vec<usize>,
    depth: usize,
}

/// The rules of a text.
pub(super) fn rules(text: &str) -> Result<Rules, Fault> {
    let mut reader = Reader {
        text,
        rest: text.char_indices().peekable(),
        numbers: HashMap::new(),
        bodies: Vec::new(),
        named_at: Vec::new(),
        depth: 0,
    };
    reader.space(true);
    while reader.rest.peek().is_some() {
        reader.rule()?;
    }
    let mut bodies = Vec::with_capacity(reader.bodies.len());
    for (rule, body) in std::mem::take(&mut reader.bodies).into_iter().enumerate() {
        let Some(body) = body else {
            let name = reader.numbers.iter().find(|(_, number)| **number == rule);
            let name = name.map_or("", |(name, _)| name.as_str());
            let what = format!("no rule is named '{name}'; define it with {name} ::= ...");
            return Err(reader.fault_at(reader.named_at[rule], what));
        };
        bodies.push(body);
    }
    match reader.numbers.get("root") {
        Some(&root) => Ok(Rules { bodies, root }),
        None => Err(reader.fault_at(
            0,
            "there is no rule 'root', which is the whole text; define it",
        )),
    }
}

fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_')
}

impl Reader<'_> {
    fn offset(&mut self) -> usize {
        self.rest.peek().map_or(self.text.len(), |&(at, _)| at)
    }

    fn fault_at(&self, offset: usize, what: impl Into<String>) -> Fault {
        let before = &self.text[..offset];
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        Fault {
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
            what: what.into(),
        }
    }

    fn fault(&mut self, what: impl Into<String>) -> Fault {
        let offset = self.offset();
        self.fault_at(offset, what)
    }

    fn peek(&mut self) -> Option<char> {
        self.rest.peek().map(|&(_, c)| c)
    }

    fn eats(&mut self, wanted: char) -> bool {
        self.rest.next_if(|&(_, c)| c == wanted).is_some()
    }

    /// White space and comments; line ends where they mean nothing.
    fn space(&mut self, line_ends: bool) {
        while let Some(c) = self.peek() {
            match c {
                ' ' | '\t' => {}
                '\r' | '\n' if line_ends => {}
                '#' => {
                    while self
                        .rest
                        .next_if(|&(_, c)| !matches!(c, '\r' | '\n'))
                        .is_some()
                    {}
                    continue;
                }
                _ => return,
            }
            self.rest.next();
        }
    }

    fn name(&mut self) -> String {
        let mut name = String::new();
        while let Some((_, c)) = self.rest.next_if(|&(_, c)| is_of_name(c)) {
            name.push(c);
        }
        name
    }

    /// The number of a rule, by its name.
    fn number(&mut self, name: String, offset: usize) -> Result<usize, Fault> {
        let next = self.bodies.len();
        match self.numbers.entry(name) {
            Entry::Occupied(found) => Ok(*found.get()),
            Entry::Vacant(_) if next >= RULES_MAX => {
                Err(self.fault_at(offset, format!("more than {RULES_MAX} rules")))
            }
            Entry::Vacant(place) => {
                place.insert(next);
                self.bodies.push(None);
                self.named_at.push(offset);
                Ok(next)
            }
        }
    }

    fn rule(&mut self) -> Result<(), Fault> {
        let offset = self.offset();
        let name = self.name();
        if name.is_empty() {
            return Err(self.fault("a rule begins with its name, as in root ::= \"a\""));
        }
        let rule = self.number(name.clone(), offset)?;
        self.space(false);
        for wanted in "::=".chars() {
            if !self.eats(wanted) {
                return Err(self.fault(format!("::= was expected behind '{name}'")));
            }
        }
        if self.bodies[rule].is_some() {
            return Err(self.fault_at(offset, format!("the rule '{name}' is defined twice")));
        }
        self.space(true);
        let body = self.alternates(false)?;
        self.bodies[rule] = Some(body);
        match self.peek() {
            None | Some('\r' | '\n') => {
                self.space(true);
                Ok(())
            }
            Some(c) => Err(self.fault(format!(
                "'{c}' was not expected here; a rule ends with its line"
            ))),
        }
    }

    fn alternates(&mut self, nested: bool) -> Result<Expr, Fault> {
        let mut all = vec![self.sequence(nested)?];
        while self.eats('|') {
            self.space(true);
            all.push(self.sequence(nested)?);
        }
        Ok(match all.len() {
            1 => all.swap_remove(0),
            _ => Expr::Alt(all),
        })
    }

    fn sequence(&mut self, nested: bool) -> Result<Expr, Fault> {
        let mut parts = Vec::new();
        while let Some(c) = self.peek() {
            // A repetition is of the last character of a text in quotes no more than of all of it.
            let part = match c {
                '"' => self.quoted()?,
                '[' => self.class()?,
                '.' => {
                    self.rest.next();
                    Expr::Class(complement(Vec::new()))
                }
                '(' => self.group()?,
                '<' | '!' => {
                    return Err(
                        self.fault("tokens (<name>) are not read here; write their text in quotes")
                    );
                }
                c if is_of_name(c) => {
                    let offset = self.offset();
                    let name = self.name();
                    Expr::Rule(self.number(name, offset)?)
                }
                _ => break,
            };
            self.space(nested);
            parts.push(self.repeated(part, nested)?);
        }
        Ok(match parts.len() {
            1 => parts.swap_remove(0),
            _ => Expr::Seq(parts),
        })
    }

    fn group(&mut self) -> Result<Expr, Fault> {
        let offset = self.offset();
        self.rest.next();
        self.depth += 1;
        if self.depth > NESTING_MAX {
            return Err(self.fault_at(
                offset,
                format!("groups are nested deeper than {NESTING_MAX}"),
            ));
        }
        self.space(true);
        let inner = self.alternates(true)?;
        self.depth -= 1;
        match self.eats(')') {
            true => Ok(inner),
            false => Err(self.fault("a ) was expected, or more of the group")),
        }
    }

    /// `part` with the repetitions behind it.
    fn repeated(&mut self, mut part: Expr, nested: bool) -> Result<Expr, Fault> {
        let mut times = 0;
        loop {
            let offset = self.offset();
            let (min, max) = match self.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => self.counts()?,
                _ => return Ok(part),
            };
            if matches!(self.peek(), Some('*' | '+' | '?')) {
                self.rest.next();
            }
            times += 1;
            if times > NESTING_MAX {
                return Err(self.fault_at(
                    offset,
                    format!("more than {NESTING_MAX} repetitions of one part"),
                ));
            }
            part = match max {
                Some(0) => Expr::Seq(Vec::new()),
                _ => Expr::Repeat(Box::new(part), min, max),
            };
            self.space(nested);
        }
    }

    /// `{m}`, `{m,}`, `{m,n}` or `{,n}`; stops behind it.
    fn counts(&mut self) -> Result<(u32, Option<u32>), Fault> {
        let offset = self.offset();
        self.rest.next();
        self.space(false);
        let min = self.count()?;
        self.space(false);
        let (min, max) = match (min, self.eats(',')) {
            (Some(n), false) => (n, Some(n)),
            (None, false) => return Err(self.fault("a number was expected, as in {2,5}")),
            (min, true) => {
                self.space(false);
                (min.unwrap_or(0), self.count()?)
            }
        };
        self.space(false);
        if !self.eats('}') {
            return Err(self.fault("a } was expected"));
        }
        if max.is_some_and(|max| max < min) {
            return Err(self.fault_at(offset, "at most fewer than at least"));
        }
        Ok((min, max))
    }

    fn count(&mut self) -> Result<Option<u32>, Fault> {
        let offset = self.offset();
        let mut digits = String::new();
        while let Some((_, digit)) = self.rest.next_if(|(_, c)| c.is_ascii_digit()) {
            digits.push(digit);
        }
        if digits.is_empty() {
            return Ok(None);
        }
        match digits.parse() {
            Ok(n) if n <= COUNT_MAX => Ok(Some(n)),
            _ => Err(self.fault_at(offset, format!("at most {COUNT_MAX} repetitions"))),
        }
    }

    fn quoted(&mut self) -> Result<Expr, Fault> {
        let offset = self.offset();
        self.rest.next();
        let mut text = Vec::new();
        loop {
            match self.peek() {
                Some('"') => break,
                None | Some('\n') => {
                    return Err(self.fault_at(offset, "the text has no closing \""));
                }
                Some(_) => {
                    let c = self.character()?;
                    text.push(Expr::Class(vec![(c, c)]));
                }
            }
        }
        self.rest.next();
        Ok(match text.len() {
            1 => text.swap_remove(0),
            _ => Expr::Seq(text),
        })
    }

    fn class(&mut self) -> Result<Expr, Fault> {
        let offset = self.offset();
        self.rest.next();
        let negated = self.eats('^');
        let mut ranges = Vec::new();
        loop {
            match self.peek() {
                Some(']') => break,
                None | Some('\n') => {
                    return Err(self.fault_at(offset, "the class has no closing ]"));
                }
                Some(_) => {}
            }
            let at = self.offset();
            let first = self.character()?;
            let mut last = first;
            if self.peek() == Some('-') {
                self.rest.next();
                if self.peek() == Some(']') {
                    ranges.push(('-', '-'));
                } else {
                    last = self.character()?;
                }
            }
            if last < first {
                return Err(self.fault_at(at, "the range runs backwards"));
            }
            ranges.push((first, last));
        }
        self.rest.next();
        if ranges.is_empty() && !negated {
            return Err(self.fault_at(offset, "an empty class, which nothing is in"));
        }
        let ranges = joined(ranges);
        Ok(Expr::Class(match negated {
            true => complement(ranges),
            false => ranges,
        }))
    }

    /// One character, or what an escape stands for.
    fn character(&mut self) -> Result<char, Fault> {
        let offset = self.offset();
        let Some((_, c)) = self.rest.next() else {
            return Err(self.fault("a character was expected"));
        };
        if c != '\\' {
            return Ok(c);
        }
        let Some((_, escape)) = self.rest.next() else {
            return Err(self.fault("a character was expected behind \\"));
        };
        let digits = match escape {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            't' => return Ok('\t'),
            'r' => return Ok('\r'),
            'n' => return Ok('\n'),
            '\\' | '"' | '[' | ']' | '-' | '^' | '/' => return Ok(escape),
            other => {
                let what = format!(
                    "\\{other} is no escape here; known are \\n \\r \\t \\\\ \\\" \\[ \\] \\x \\u \\U"
                );
                return Err(self.fault_at(offset, what));
            }
        };
        let mut code = 0u32;
        for _ in 0..digits {
            let digit = self.rest.next().and_then(|(_, c)| c.to_digit(16));
            let Some(digit) = digit else {
                return Err(
                    self.fault_at(offset, format!("{digits} hexadecimal digits were expected"))
                );
            };
            code = code.wrapping_mul(16).wrapping_add(digit);
        }
        char::from_u32(code)
            .ok_or_else(|| self.fault_at(offset, format!("U+{code:X} is no character")))
    }
}

/// Ranges in order, those that touch as one.
fn joined(mut ranges: Vec<(char, char)>) -> Vec<(char, char)> {
    ranges.sort_unstable();
    let mut all: Vec<(char, char)> = Vec::with_capacity(ranges.len());
    for (first, last) in ranges {
        match all.last_mut() {
            Some(before) if first <= after(before.1).unwrap_or(before.1) => {
                before.1 = before.1.max(last);
            }
            _ => all.push((first, last)),
        }
    }
    all
}

/// All characters but those of these ranges, which are in order.
fn complement(ranges: Vec<(char, char)>) -> Vec<(char, char)> {
    let mut all = Vec::with_capacity(ranges.len() + 1);
    let mut next = Some('\0');
    for (first, last) in ranges {
        if let (Some(from), Some(to)) = (next, before(first))
            && from <= to
        {
            all.push((from, to));
        }
        next = after(last);
    }
    if let Some(from) = next {
        all.push((from, char::MAX));
    }
    all
}

/// The next character; none behind the last.
pub(super) fn after(c: char) -> Option<char> {
    match u32::from(c) {
        BEFORE_SURROGATES => char::from_u32(AFTER_SURROGATES),
        code => char::from_u32(code + 1),
    }
}

fn before(c: char) -> Option<char> {
    match u32::from(c) {
        AFTER_SURROGATES => char::from_u32(BEFORE_SURROGATES),
        code => char::from_u32(code.checked_sub(1)?),
    }
}
