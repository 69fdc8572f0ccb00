//! GBNF, the notation of llama.cpp's grammars, turned into llguidance's Lark.
//!
//! ```text
//! text -> rules (parse) -> what is regular becomes terminals, the rest rules (split)
//!                       -> whether each terminal's end can be seen (ends) -> Lark (lark)
//! ```
//!
//! GBNF knows characters only; Lark has a lexer, which takes the longest terminal it can. Both
//! agree where a character that could go on with a terminal never follows it. A grammar without
//! recursion is one terminal, so nothing follows; for others that is looked into ([`ends`]), and
//! where it does not hold every terminal is a single character, which is right for any grammar and
//! takes more work for each token.

mod ends;
mod lark;
mod parse;

use std::fmt;

use self::lark::{Size, Split};

/// Most rules.
const RULES_MAX: usize = 1024;
/// Deepest nesting of groups.
const NESTING_MAX: usize = 64;
/// Largest count of a repetition, as in llama.cpp.
const COUNT_MAX: u32 = 2000;

/// What is wrong with a grammar, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    line: usize,
    column: usize,
    what: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { line, column, what } = self;
        write!(f, "line {line}, column {column}: {what}")
    }
}

/// What a part of a rule describes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Expr {
    /// One character of these ranges, which are sorted and apart from one another.
    Class(Vec<(char, char)>),
    /// A rule, by its number.
    Rule(usize),
    /// One behind the other; of none, the empty text.
    Seq(Vec<Expr>),
    /// One of them.
    Alt(Vec<Expr>),
    /// Again and again, so often at least and at most.
    Repeat(Box<Expr>, u32, Option<u32>),
}

/// The rules by number; `root` is the first one that counts.
#[derive(Debug, Clone)]
struct Rules {
    bodies: Vec<Expr>,
    root: usize,
}

impl Rules {
    /// Which of them can come to be inside of themselves, or use one that can.
    fn recursive(&self) -> Vec<bool> {
        let uses: Vec<Vec<usize>> = self.bodies.iter().map(used).collect();
        // A rule is regular if all that it uses is: taken away from the leaves on.
        let mut regular = vec![false; uses.len()];
        let mut users: Vec<Vec<usize>> = vec![Vec::new(); uses.len()];
        let mut open: Vec<usize> = uses.iter().map(Vec::len).collect();
        for (rule, used) in uses.iter().enumerate() {
            used.iter().for_each(|&u| users[u].push(rule));
        }
        let mut ready: Vec<usize> = (0..uses.len()).filter(|&rule| open[rule] == 0).collect();
        while let Some(rule) = ready.pop() {
            regular[rule] = true;
            for &user in &users[rule] {
                open[user] -= 1;
                if open[user] == 0 {
                    ready.push(user);
                }
            }
        }
        regular.into_iter().map(|regular| !regular).collect()
    }

    /// The rules that `root` comes to.
    fn reached(&self) -> Vec<bool> {
        let mut reached = vec![false; self.bodies.len()];
        let mut next = vec![self.root];
        while let Some(rule) = next.pop() {
            if !std::mem::replace(&mut reached[rule], true) {
                next.extend(used(&self.bodies[rule]));
            }
        }
        reached
    }
}

/// The rules that an expression names, each as often as it does.
fn used(expr: &Expr) -> Vec<usize> {
    let mut found = Vec::new();
    let mut next = vec![expr];
    while let Some(expr) = next.pop() {
        match expr {
            Expr::Class(_) => {}
            Expr::Rule(rule) => found.push(*rule),
            Expr::Seq(parts) | Expr::Alt(parts) => next.extend(parts),
            Expr::Repeat(inner, ..) => next.push(inner),
        }
    }
    found
}

/// The same language in Lark.
pub(crate) fn to_lark(text: &str) -> Result<String, Fault> {
    let rules = parse::rules(text)?;
    Ok(split(&rules).text(&rules))
}

/// The longest terminals whose ends can be seen.
fn split(rules: &Rules) -> Split {
    let seen = |size| Some(lark::split(rules, size)).filter(|split| ends::are_seen(rules, split));
    seen(Size::Runs)
        .or_else(|| seen(Size::Items))
        .unwrap_or_else(|| lark::split(rules, Size::Characters))
}

#[cfg(test)]
mod tests;
