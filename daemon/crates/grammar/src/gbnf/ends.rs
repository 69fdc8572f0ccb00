//! Whether the longest terminal is always the right one.
//!
//! All terminals are read together as one automaton over characters. It ends a terminal where no
//! other character can go on with any of them. So the grammar's own reading is kept if, wherever a
//! terminal is complete and a character could go on (with it or with another), that character never
//! follows the terminal in the grammar.

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap, HashSet};

use super::lark::{Body, Split, is_nullable, nullable};
use super::parse::after;
use super::{Expr, Rules};

/// Largest automaton that is looked at: states of its parts, and what is looked at on the way to
/// them.
const PARTS_MAX: usize = 20_000;
const VISITS_MAX: usize = 200_000;
/// Steps between sets of states that are followed, and elements of what may follow a terminal:
/// some tens of milliseconds each.
const STEPS_MAX: usize = 1_000_000;
const FOLLOW_MAX: usize = 2_000_000;

/// A state: where it goes without a character, and with one.
#[derive(Debug, Default)]
struct Part {
    free: Vec<usize>,
    step: Option<(Vec<(char, char)>, usize)>,
    /// The terminal that is complete here.
    ends: Option<usize>,
}

#[derive(Debug, Default)]
struct Automaton {
    parts: Vec<Part>,
    visits: usize,
}

impl Automaton {
    fn part(&mut self) -> Option<usize> {
        (self.parts.len() < PARTS_MAX).then(|| {
            self.parts.push(Part::default());
            self.parts.len() - 1
        })
    }

    fn free(&mut self, from: usize, to: usize) {
        self.parts[from].free.push(to);
    }

    /// Adds an expression behind a state; the state behind it. `None` where it becomes too large.
    fn add(&mut self, expr: &Expr, rules: &Rules, from: usize) -> Option<usize> {
        self.visits += 1;
        if self.visits > VISITS_MAX {
            return None;
        }
        match expr {
            Expr::Class(ranges) => {
                let (begin, to) = (self.part()?, self.part()?);
                self.free(from, begin);
                self.parts[begin].step = Some((ranges.clone(), to));
                Some(to)
            }
            Expr::Rule(rule) => self.add(&rules.bodies[*rule], rules, from),
            Expr::Seq(parts) => parts
                .iter()
                .try_fold(from, |at, part| self.add(part, rules, at)),
            Expr::Alt(parts) => {
                let to = self.part()?;
                for part in parts {
                    let end = self.add(part, rules, from)?;
                    self.free(end, to);
                }
                Some(to)
            }
            Expr::Repeat(inner, min, max) => {
                let mut at = from;
                for _ in 0..*min {
                    at = self.add(inner, rules, at)?;
                }
                let to = self.part()?;
                match max {
                    None => {
                        let begin = self.part()?;
                        self.free(at, begin);
                        let end = self.add(inner, rules, begin)?;
                        self.free(end, begin);
                        self.free(begin, to);
                    }
                    Some(max) => {
                        for _ in *min..*max {
                            self.free(at, to);
                            at = self.add(inner, rules, at)?;
                        }
                        self.free(at, to);
                    }
                }
                Some(to)
            }
        }
    }

    /// What is reached without a character.
    fn closed(&self, mut next: Vec<usize>) -> BTreeSet<usize> {
        let mut reached = BTreeSet::new();
        while let Some(at) = next.pop() {
            if reached.insert(at) {
                next.extend(&self.parts[at].free);
            }
        }
        reached
    }
}

/// Characters, as numbers of the intervals that the grammar's classes make: those between two
/// neighbours of `bounds` are alike.
#[derive(Debug)]
struct Atoms {
    bounds: Vec<char>,
}

impl Atoms {
    fn of(automaton: &Automaton) -> Self {
        let steps = automaton.parts.iter().filter_map(|part| part.step.as_ref());
        let ranges = steps.flat_map(|(ranges, _)| ranges);
        let bounds: BTreeSet<char> = ranges
            .flat_map(|&(first, last)| [Some(first), after(last)])
            .flatten()
            .collect();
        Self {
            bounds: bounds.into_iter().collect(),
        }
    }

    /// The intervals of a class.
    fn in_class(&self, ranges: &[(char, char)]) -> impl Iterator<Item = usize> {
        let of = |&(first, last): &(char, char)| {
            let from = self.bounds.partition_point(|bound| *bound < first);
            let to = self.bounds.partition_point(|bound| *bound <= last);
            from..to
        };
        ranges
            .iter()
            .map(of)
            .collect::<Vec<_>>()
            .into_iter()
            .flatten()
    }
}

/// Whether the grammar's reading is the lexer's. `false` also where finding out takes too much.
pub(super) fn are_seen(rules: &Rules, split: &Split) -> bool {
    // One terminal is the whole text.
    if let [(_, Body::Terminal(_))] = split.bodies.as_slice() {
        return true;
    }
    find(rules, split).unwrap_or(false)
}

fn find(rules: &Rules, split: &Split) -> Option<bool> {
    let mut automaton = Automaton::default();
    let start = automaton.part()?;
    let mut begins = Vec::new();
    for (number, terminal) in split.terminals.iter().enumerate() {
        let begin = automaton.part()?;
        automaton.free(start, begin);
        let end = automaton.add(terminal, rules, begin)?;
        automaton.parts[end].ends = Some(number);
        begins.push(begin);
    }
    let atoms = Atoms::of(&automaton);
    let mut steps = 0;
    let mut moves = |set: &BTreeSet<usize>| {
        let mut to: HashMap<usize, Vec<usize>> = HashMap::new();
        for part in set {
            steps += 1;
            if let Some((ranges, next)) = &automaton.parts[*part].step {
                for atom in atoms.in_class(ranges) {
                    steps += 1;
                    if steps > STEPS_MAX {
                        return None;
                    }
                    to.entry(atom).or_default().push(*next);
                }
            }
        }
        Some(to)
    };
    let first: Option<Vec<BTreeSet<usize>>> = begins
        .iter()
        .map(|&begin| Some(moves(&automaton.closed(vec![begin]))?.into_keys().collect()))
        .collect();
    let follow = follow(rules, split, &first?)?;
    let mut seen: HashSet<BTreeSet<usize>> = HashSet::new();
    let mut next = vec![automaton.closed(vec![start])];
    while let Some(set) = next.pop() {
        if seen.contains(&set) {
            continue;
        }
        let to = moves(&set)?;
        // The empty text is no terminal.
        if !set.contains(&start) {
            let mut ended = set.iter().filter_map(|&part| automaton.parts[part].ends);
            if ended.any(|terminal| to.keys().any(|atom| follow[terminal].contains(atom))) {
                return Some(false);
            }
        }
        // Many characters lead to the same states.
        let to: HashSet<Vec<usize>> = to.into_values().collect();
        next.extend(to.into_iter().map(|parts| automaton.closed(parts)));
        seen.insert(set);
    }
    Some(true)
}

/// What may follow each terminal, by the first interval of it. `None` where that takes too much.
fn follow(rules: &Rules, split: &Split, first: &[BTreeSet<usize>]) -> Option<Vec<BTreeSet<usize>>> {
    let mut grammar = Follow {
        empty: nullable(rules),
        split,
        first,
        first_of: vec![BTreeSet::new(); rules.bodies.len()],
        after_rule: vec![BTreeSet::new(); rules.bodies.len()],
        after: vec![BTreeSet::new(); split.terminals.len()],
        changed: true,
        left: Cell::new(FOLLOW_MAX),
    };
    while std::mem::take(&mut grammar.changed) {
        for (rule, body) in &split.bodies {
            let of = grammar.first(body);
            grammar.changed |= !of.is_subset(&grammar.first_of[*rule]);
            grammar.first_of[*rule].extend(of);
            grammar.goes_on()?;
        }
    }
    grammar.changed = true;
    while std::mem::take(&mut grammar.changed) {
        for (rule, body) in &split.bodies {
            let after = grammar.after_rule[*rule].clone();
            grammar.walk(body, &after);
            grammar.goes_on()?;
        }
    }
    Some(grammar.after)
}

struct Follow<'a> {
    empty: Vec<bool>,
    split: &'a Split,
    first: &'a [BTreeSet<usize>],
    first_of: Vec<BTreeSet<usize>>,
    after_rule: Vec<BTreeSet<usize>>,
    after: Vec<BTreeSet<usize>>,
    changed: bool,
    /// Elements that may yet be looked at.
    left: Cell<usize>,
}

impl Follow<'_> {
    fn goes_on(&self) -> Option<()> {
        (self.left.get() > 0).then_some(())
    }

    fn spend(&self, set: &BTreeSet<usize>) {
        self.left.set(self.left.get().saturating_sub(set.len() + 1));
    }

    fn may_be_empty(&self, body: &Body) -> bool {
        match body {
            Body::Terminal(number) => is_nullable(&self.split.terminals[*number], &self.empty),
            Body::Rule(rule) => self.empty[*rule],
            Body::Seq(parts) => parts.iter().all(|part| self.may_be_empty(part)),
            Body::Alt(parts) => parts.iter().any(|part| self.may_be_empty(part)),
            Body::Repeat(inner, min, _) => *min == 0 || self.may_be_empty(inner),
        }
    }

    fn first(&self, body: &Body) -> BTreeSet<usize> {
        let of = |set: &BTreeSet<usize>| {
            self.spend(set);
            match self.left.get() {
                0 => BTreeSet::new(),
                _ => set.clone(),
            }
        };
        match body {
            Body::Terminal(number) => of(&self.first[*number]),
            Body::Rule(rule) => of(&self.first_of[*rule]),
            Body::Seq(parts) => {
                let mut all = BTreeSet::new();
                for part in parts {
                    all.extend(self.first(part));
                    if !self.may_be_empty(part) {
                        break;
                    }
                }
                all
            }
            Body::Alt(parts) => parts.iter().flat_map(|part| self.first(part)).collect(),
            Body::Repeat(inner, ..) => self.first(inner),
        }
    }

    fn walk(&mut self, body: &Body, after: &BTreeSet<usize>) {
        self.spend(after);
        if self.left.get() == 0 {
            return;
        }
        let place = match body {
            Body::Terminal(number) => &mut self.after[*number],
            Body::Rule(rule) => &mut self.after_rule[*rule],
            Body::Seq(parts) => {
                let mut after = after.clone();
                for part in parts.iter().rev() {
                    self.walk(part, &after);
                    if !self.may_be_empty(part) {
                        after.clear();
                    }
                    after.extend(self.first(part));
                }
                return;
            }
            Body::Alt(parts) => {
                parts.iter().for_each(|part| self.walk(part, after));
                return;
            }
            Body::Repeat(inner, _, max) => {
                let mut after = after.clone();
                if *max != Some(1) {
                    after.extend(self.first(inner));
                }
                self.walk(inner, &after);
                return;
            }
        };
        if !after.is_subset(place) {
            place.extend(after);
            self.changed = true;
        }
    }
}
