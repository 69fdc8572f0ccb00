//! Rules, apart into terminals and what holds them together, and as text in Lark.

use std::collections::HashMap;
use std::fmt::Write as _;

use super::{Expr, Rules};

/// A rule's body with terminals for its regular parts.
#[derive(Debug, Clone)]
pub(super) enum Body {
    /// A terminal, by its number.
    Terminal(usize),
    /// A rule that is no terminal.
    Rule(usize),
    Seq(Vec<Body>),
    Alt(Vec<Body>),
    Repeat(Box<Body>, u32, Option<u32>),
}

/// How long terminals are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Size {
    /// A run of regular parts is one terminal.
    Runs,
    /// A regular part by itself.
    Items,
    /// A character.
    Characters,
}

/// A grammar, apart.
#[derive(Debug)]
pub(super) struct Split {
    /// Regular expressions, which name regular rules only.
    pub(super) terminals: Vec<Expr>,
    /// Rules that are not regular and that `root` refers to, by number.
    pub(super) bodies: Vec<(usize, Body)>,
    /// Rules that terminals are made of.
    regular: Vec<bool>,
    numbers: HashMap<Expr, usize>,
    pub(super) size: Size,
}

/// The rules with terminals of this size.
pub(super) fn split(rules: &Rules, size: Size) -> Split {
    let regular = match size {
        Size::Runs | Size::Items => rules.recursive().into_iter().map(|r| !r).collect(),
        Size::Characters => vec![false; rules.bodies.len()],
    };
    let mut split = Split {
        terminals: Vec::new(),
        bodies: Vec::new(),
        regular,
        numbers: HashMap::new(),
        size,
    };
    if split.regular[rules.root] {
        split.terminals.push(Expr::Rule(rules.root));
        split.bodies.push((rules.root, Body::Terminal(0)));
        return split;
    }
    for (rule, reached) in rules.reached().into_iter().enumerate() {
        if reached && !split.regular[rule] {
            let body = split.body(&rules.bodies[rule]);
            split.bodies.push((rule, body));
        }
    }
    split
}

impl Split {
    fn is_regular(&self, expr: &Expr) -> bool {
        if self.size == Size::Characters {
            return matches!(expr, Expr::Class(_));
        }
        match expr {
            Expr::Class(_) => true,
            Expr::Rule(rule) => self.regular[*rule],
            Expr::Seq(parts) | Expr::Alt(parts) => parts.iter().all(|e| self.is_regular(e)),
            Expr::Repeat(inner, ..) => self.is_regular(inner),
        }
    }

    /// A terminal for an expression; the same one for the same.
    fn terminal(&mut self, expr: Expr) -> Body {
        let next = self.terminals.len();
        let number = *self.numbers.entry(expr.clone()).or_insert(next);
        if number == next {
            self.terminals.push(expr);
        }
        Body::Terminal(number)
    }

    fn body(&mut self, expr: &Expr) -> Body {
        if self.is_regular(expr) && !matches!(expr, Expr::Seq(parts) if parts.is_empty()) {
            return self.terminal(expr.clone());
        }
        match expr {
            Expr::Class(_) => self.terminal(expr.clone()),
            Expr::Rule(rule) => Body::Rule(*rule),
            Expr::Seq(parts) => {
                let mut bodies = Vec::new();
                let mut run: Vec<Expr> = Vec::new();
                for part in parts {
                    if self.size == Size::Runs && self.is_regular(part) {
                        run.push(part.clone());
                        continue;
                    }
                    self.end_run(&mut run, &mut bodies);
                    bodies.push(self.body(part));
                }
                self.end_run(&mut run, &mut bodies);
                Body::Seq(bodies)
            }
            Expr::Alt(parts) => Body::Alt(parts.iter().map(|part| self.body(part)).collect()),
            Expr::Repeat(inner, min, max) => Body::Repeat(Box::new(self.body(inner)), *min, *max),
        }
    }

    /// Regular parts in a row as one terminal.
    fn end_run(&mut self, run: &mut Vec<Expr>, bodies: &mut Vec<Body>) {
        match run.len() {
            0 => {}
            1 => bodies.push(self.terminal(run.swap_remove(0))),
            _ => bodies.push(self.terminal(Expr::Seq(std::mem::take(run)))),
        }
        run.clear();
    }

    /// The grammar in Lark. A terminal is never the empty text there, so one that may be is
    /// optional where it is used.
    pub(super) fn text(&self, rules: &Rules) -> String {
        let empty = nullable(rules);
        let mut text = String::new();
        let root = rules.root;
        let _ = writeln!(text, "start: r{root}");
        for (rule, body) in &self.bodies {
            let _ = write!(text, "r{rule}: ");
            self.write_body(body, &empty, &mut text);
            text.push('\n');
        }
        let mut wanted = vec![false; rules.bodies.len()];
        for (number, terminal) in self.terminals.iter().enumerate() {
            let _ = write!(text, "T{number}: ");
            let may_be_empty = is_nullable(terminal, &empty);
            text.push_str(if may_be_empty { "(" } else { "" });
            write_expr(terminal, &mut text);
            text.push_str(if may_be_empty { ") & /(?s:.)+/" } else { "" });
            text.push('\n');
            mark(terminal, rules, &mut wanted);
        }
        for (rule, _) in wanted.iter().enumerate().filter(|(_, wanted)| **wanted) {
            let _ = write!(text, "R{rule}: ");
            write_expr(&rules.bodies[rule], &mut text);
            text.push('\n');
        }
        text
    }

    fn write_body(&self, body: &Body, empty: &[bool], text: &mut String) {
        let mut list = |bodies: &[Body], between: &str| {
            text.push('(');
            for (i, body) in bodies.iter().enumerate() {
                text.push_str(if i > 0 { between } else { "" });
                self.write_body(body, empty, text);
            }
            text.push_str(if bodies.is_empty() { "\"\")" } else { ")" });
        };
        match body {
            Body::Seq(bodies) => list(bodies, " "),
            Body::Alt(bodies) => list(bodies, " | "),
            Body::Terminal(number) => {
                let may_be_empty = is_nullable(&self.terminals[*number], empty);
                let _ = write!(text, "T{number}{}", if may_be_empty { "?" } else { "" });
            }
            Body::Rule(rule) => {
                let _ = write!(text, "r{rule}");
            }
            Body::Repeat(inner, min, max) => {
                text.push('(');
                self.write_body(inner, empty, text);
                text.push(')');
                write_counts(*min, *max, text);
            }
        }
    }
}

/// Marks the rules that an expression refers to.
fn mark(expr: &Expr, rules: &Rules, wanted: &mut [bool]) {
    for rule in super::used(expr) {
        if !std::mem::replace(&mut wanted[rule], true) {
            mark(&rules.bodies[rule], rules, wanted);
        }
    }
}

/// The rules that can match the empty text.
pub(super) fn nullable(rules: &Rules) -> Vec<bool> {
    let mut empty = vec![false; rules.bodies.len()];
    loop {
        let mut changed = false;
        for (rule, body) in rules.bodies.iter().enumerate() {
            if !empty[rule] && is_nullable(body, &empty) {
                (empty[rule], changed) = (true, true);
            }
        }
        if !changed {
            return empty;
        }
    }
}

/// Whether an expression can be the empty text.
pub(super) fn is_nullable(expr: &Expr, rules: &[bool]) -> bool {
    match expr {
        Expr::Class(_) => false,
        Expr::Rule(rule) => rules[*rule],
        Expr::Seq(parts) => parts.iter().all(|part| is_nullable(part, rules)),
        Expr::Alt(parts) => parts.iter().any(|part| is_nullable(part, rules)),
        Expr::Repeat(inner, min, _) => *min == 0 || is_nullable(inner, rules),
    }
}

fn write_counts(min: u32, max: Option<u32>, text: &mut String) {
    let _ = match (min, max) {
        (0, None) => write!(text, "*"),
        (1, None) => write!(text, "+"),
        (0, Some(1)) => write!(text, "?"),
        (min, None) => write!(text, "{{{min},}}"),
        (min, Some(max)) => write!(text, "{{{min},{max}}}"),
    };
}

/// A regular expression, of terminals and classes.
fn write_expr(expr: &Expr, text: &mut String) {
    match expr {
        Expr::Class(ranges) => {
            text.push_str("/[");
            for (first, last) in ranges {
                write_char(*first, text);
                if first != last {
                    text.push('-');
                    write_char(*last, text);
                }
            }
            text.push_str("]/");
        }
        Expr::Rule(rule) => {
            let _ = write!(text, "R{rule}");
        }
        Expr::Seq(parts) if parts.is_empty() => text.push_str("\"\""),
        Expr::Seq(parts) => {
            text.push('(');
            let mut parts = parts.iter().peekable();
            while let Some(part) = parts.next() {
                if let Some(first) = single(part) {
                    text.push('/');
                    write_char(first, text);
                    while let Some(next) = parts.next_if(|part| single(part).is_some()) {
                        write_char(single(next).unwrap_or(first), text);
                    }
                    text.push('/');
                } else {
                    write_expr(part, text);
                }
                text.push_str(if parts.peek().is_some() { " " } else { ")" });
            }
        }
        Expr::Alt(parts) => {
            text.push('(');
            for (i, part) in parts.iter().enumerate() {
                text.push_str(if i > 0 { " | " } else { "" });
                write_expr(part, text);
            }
            text.push(')');
        }
        Expr::Repeat(inner, min, max) => {
            text.push('(');
            write_expr(inner, text);
            text.push(')');
            write_counts(*min, *max, text);
        }
    }
}

/// The only character of an expression.
fn single(expr: &Expr) -> Option<char> {
    match expr {
        Expr::Class(ranges) => match ranges.as_slice() {
            [(first, last)] if first == last => Some(*first),
            _ => None,
        },
        _ => None,
    }
}

/// A character of a regular expression that means itself wherever it stands.
fn write_char(c: char, text: &mut String) {
    if c.is_ascii_alphanumeric() {
        text.push(c);
    } else {
        let _ = write!(text, "\\x{{{:X}}}", u32::from(c));
    }
}
