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

/// Maximum number of rules of a GBNF grammar.
const RULES_MAX: usize = 1024;
/// Deepest nesting of groups of a GBNF grammar.
const NESTING_MAX: usize = 64;
/// Maximum number of places of a rule that may be empty, its rules' counted wherever they are
/// named: looking for what comes next passes over all of them. 4,096 take 0.2 s, 32,768 ten.
const EMPTY_PLACES_MAX: usize = 8192;
/// Largest count of a repetition, as in llama.cpp.
const COUNT_MAX: u32 = 2000;

/// An error in a grammar, with its place.
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
    /// These expressions in sequence; an empty list is the empty text.
    Seq(Vec<Expr>),
    /// One of these alternatives.
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
    /// Which rules are recursive, or use a recursive one.
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

    /// The most places of a rule that may be empty: characters, and those of the rules that it
    /// names as often as it does.
    fn empty_places(&self) -> usize {
        // Which may be empty: more become so until none does.
        let mut empty = vec![false; self.bodies.len()];
        loop {
            let now: Vec<bool> = self
                .bodies
                .iter()
                .map(|b| may_be_empty(b, &empty))
                .collect();
            if now == empty {
                break;
            }
            empty = now;
        }
        let mut places = vec![None; self.bodies.len()];
        let of_rules = (0..self.bodies.len()).filter(|&rule| empty[rule]);
        of_rules
            .map(|rule| self.places(rule, &mut places))
            .max()
            .unwrap_or(0)
    }

    /// Places of a rule; inside of itself it is one.
    fn places(&self, rule: usize, known: &mut Vec<Option<usize>>) -> usize {
        if let Some(places) = known[rule] {
            return places;
        }
        known[rule] = Some(1);
        let (mut places, mut next) = (0usize, vec![&self.bodies[rule]]);
        while let Some(expr) = next.pop() {
            match expr {
                Expr::Class(_) => places = places.saturating_add(1),
                Expr::Rule(rule) => places = places.saturating_add(self.places(*rule, known)),
                Expr::Seq(parts) | Expr::Alt(parts) => next.extend(parts),
                Expr::Repeat(inner, ..) => next.push(inner),
            }
        }
        known[rule] = Some(places);
        places
    }

    /// Which rules `root` refers to, directly or not.
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

/// Whether an expression may be empty, if these rules may.
fn may_be_empty(expr: &Expr, rules: &[bool]) -> bool {
    match expr {
        Expr::Class(_) => false,
        Expr::Rule(rule) => rules[*rule],
        Expr::Seq(parts) => parts.iter().all(|part| may_be_empty(part, rules)),
        Expr::Alt(parts) => parts.iter().any(|part| may_be_empty(part, rules)),
        Expr::Repeat(inner, least, _) => *least == 0 || may_be_empty(inner, rules),
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

/// Converts a GBNF grammar to Lark.
pub(crate) fn to_lark(text: &str) -> Result<String, Fault> {
    let rules = parse::rules(text)?;
    if rules.empty_places() > EMPTY_PLACES_MAX {
        return Err(Fault {
            line: 1,
            column: 1,
            what: format!(
                "a rule that may be empty has more than {EMPTY_PLACES_MAX} places, those of its \
                 rules among them; name fewer rules in it, or write a repetition"
            ),
        });
    }
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
