//! GBNF against a matcher of its own, that reads it character by character.

#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

use std::collections::HashMap;
use std::path::Path;

use rocmforge_gguf::{Gguf, MappedFile};
use rocmforge_tokenizer::Tokenizer;

use super::lark::Size;
use super::{Expr, Rules, parse};
use crate::{Grammar, Vocabulary};

/// Where a part of a text that begins at a place may end. Rules are not left-recursive.
struct Reference<'a> {
    rules: &'a Rules,
    text: Vec<char>,
    known: HashMap<(usize, usize), Vec<usize>>,
}

impl Reference<'_> {
    fn ends(&mut self, expr: &Expr, at: usize) -> Vec<usize> {
        let mut found = match expr {
            Expr::Class(ranges) => match self.text.get(at) {
                Some(c) if ranges.iter().any(|(a, z)| a <= c && c <= z) => vec![at + 1],
                _ => vec![],
            },
            Expr::Rule(rule) => {
                if let Some(known) = self.known.get(&(*rule, at)) {
                    return known.clone();
                }
                let body = self.rules.bodies[*rule].clone();
                let found = self.ends(&body, at);
                self.known.insert((*rule, at), found.clone());
                found
            }
            Expr::Seq(parts) => parts.iter().fold(vec![at], |from, part| {
                let mut all: Vec<_> = from
                    .into_iter()
                    .flat_map(|at| self.ends(part, at))
                    .collect();
                all.sort_unstable();
                all.dedup();
                all
            }),
            Expr::Alt(parts) => parts.iter().flat_map(|part| self.ends(part, at)).collect(),
            Expr::Repeat(inner, min, max) => {
                let (mut all, mut from) = (Vec::new(), vec![at]);
                for times in 0..=max.unwrap_or(self.text.len() as u32 + min + 1) {
                    if times >= *min {
                        all.extend(&from);
                    }
                    from = from
                        .into_iter()
                        .flat_map(|at| self.ends(inner, at))
                        .collect();
                    from.sort_unstable();
                    from.dedup();
                    if from.is_empty() {
                        break;
                    }
                }
                all
            }
        };
        found.sort_unstable();
        found.dedup();
        found
    }
}

fn is_described(rules: &Rules, text: &str) -> bool {
    let mut reference = Reference {
        rules,
        text: text.chars().collect(),
        known: HashMap::new(),
    };
    let end = reference.text.len();
    reference.ends(&Expr::Rule(rules.root), 0).contains(&end)
}

/// Numbers that look drawn.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n.max(1)
    }
}

/// A text that the grammar describes, unless it is cut where it is too deep.
fn derived(rules: &Rules, expr: &Expr, depth: usize, dice: &mut Dice, text: &mut String) {
    if depth > 40 || text.len() > 60 {
        return;
    }
    match expr {
        Expr::Class(ranges) => {
            let (first, last) = ranges[dice.below(ranges.len())];
            let span = (u32::from(last) - u32::from(first)).min(30);
            let code = u32::from(first) + dice.below(span as usize + 1) as u32;
            text.extend(char::from_u32(code));
        }
        Expr::Rule(rule) => derived(rules, &rules.bodies[*rule], depth + 1, dice, text),
        Expr::Seq(parts) => parts
            .iter()
            .for_each(|part| derived(rules, part, depth + 1, dice, text)),
        Expr::Alt(parts) => {
            let part = &parts[dice.below(parts.len())];
            derived(rules, part, depth + 1, dice, text);
        }
        Expr::Repeat(inner, min, max) => {
            let most = max.unwrap_or(min + 3).min(min + 3);
            let times = *min as usize + dice.below((most - min) as usize + 1);
            (0..times).for_each(|_| derived(rules, inner, depth + 1, dice, text));
        }
    }
}

fn changed(text: &str, dice: &mut Dice) -> String {
    let mut text: Vec<char> = text.chars().collect();
    for _ in 0..=dice.below(2) {
        let at = dice.below(text.len() + 1);
        let all = b"ab01 ,{}[]\"\\\n-+*()x";
        let c = all[dice.below(all.len())] as char;
        match dice.below(3) {
            0 => text.insert(at, c),
            1 if at < text.len() => text[at] = c,
            _ if at < text.len() => {
                text.remove(at);
            }
            _ => {}
        }
    }
    text.into_iter().collect()
}

fn tokenizer() -> Tokenizer {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../../tests/fixtures/tiny-llama-Q4_K_M.gguf");
    let file = MappedFile::open(&path).unwrap();
    Tokenizer::from_gguf(&Gguf::open(&file).unwrap()).unwrap()
}

/// Whether the text's tokens are allowed one behind the other, and it may end behind them.
fn is_allowed(vocabulary: &Vocabulary, tokenizer: &Tokenizer, grammar: &str, text: &str) -> bool {
    let mut matcher = vocabulary
        .matcher(&Grammar::Gbnf(grammar.to_owned()))
        .unwrap();
    for id in tokenizer.encode(text, false, false).unwrap() {
        if matcher.is_complete() || !matcher.mask().unwrap().allows(id) {
            return false;
        }
        matcher.accept(id).unwrap();
    }
    let end = tokenizer.end_of_generation()[0];
    matcher.is_complete() || matcher.mask().unwrap().allows(end)
}

const JSON: &str = r#"root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# Optional space, as little as helps.
ws ::= | " " | "\n" [ \t]{0,20}
"#;

/// Grammars, and whether the terminals of each may be long.
const GRAMMARS: [(&str, bool); 13] = [
    (JSON, true),
    ("root ::= \"yes\" | \"no\"", true),
    ("root ::= [a-c]{2,4} \"x\"?", true),
    ("root ::= [a-z]* \"foo\"", true),
    ("root ::= (\"a\" | \"ab\") (\"b\" | \"\")  \"c\"?", true),
    ("root ::= \"(\" root \")\" | \"a\"", true),
    (
        "root ::= expr\nexpr ::= term ([-+*/] term)*\nterm ::= [0-9]+ | \"(\" expr \")\"",
        true,
    ),
    // Greedy terminals would read these wrong.
    ("root ::= \"a\" root? [a-b]* \"ab\"", false),
    ("root ::= x \"!\"\nx ::= [a-z] x | \"ab\" | \"a\"", false),
    (
        "root ::= item (\",\" item)*\nitem ::= ws [a-z]+ ws | \"[\" root \"]\"\nws ::= [ \\n]*",
        true,
    ),
    ("root ::= s s\ns ::= \"x\"* (\"<\" s \">\")?", false),
    (
        "root ::= \"\\u00e9\\x41\" (\n  [^\\]\\n]\n  | . # any\n) | \"[\" root? \"]\"",
        true,
    ),
    ("a-b ::= \"0\" a-b | \"1\"\nroot ::= (a-b){,2} \"\"", true),
];

#[test]
fn texts_are_allowed_as_a_plain_reading_says() {
    let tokenizer = tokenizer();
    let vocabulary = Vocabulary::new(&tokenizer).unwrap();
    let mut dice = Dice(7);
    let mut counts = [0, 0];
    for (grammar, long) in GRAMMARS {
        let rules = parse::rules(grammar).unwrap();
        let size = super::split(&rules).size;
        assert_eq!(size != Size::Characters, long, "{grammar}\n{size:?}");
        for round in 0..60 {
            let mut text = String::new();
            derived(&rules, &Expr::Rule(rules.root), 0, &mut dice, &mut text);
            if round % 2 == 1 {
                text = changed(&text, &mut dice);
            }
            let described = is_described(&rules, &text);
            counts[usize::from(described)] += 1;
            let allowed = is_allowed(&vocabulary, &tokenizer, grammar, &text);
            assert_eq!(
                allowed,
                described,
                "{text:?} of\n{grammar}\nas\n{}",
                super::to_lark(grammar).unwrap()
            );
        }
    }
    assert!(counts.iter().all(|&count| count > 100), "{counts:?}");
}

#[test]
fn faults_are_named_with_their_place() {
    for (grammar, expected) in [
        ("", "line 1, column 1: there is no rule 'root'"),
        ("a ::= \"b\"", "there is no rule 'root'"),
        (
            "root ::= \"a\"\n  | b",
            "line 2, column 3: a rule begins with its name",
        ),
        (
            "root ::= (\"a\"\n  | b)",
            "line 2, column 5: no rule is named 'b'",
        ),
        ("root := \"a\"", "line 1, column 7: ::= was expected"),
        ("root ::= \"a", "line 1, column 10: the text has no closing"),
        ("root ::= [a", "line 1, column 10: the class has no closing"),
        (
            "root ::= [z-a]",
            "line 1, column 11: the range runs backwards",
        ),
        ("root ::= []", "an empty class"),
        ("root ::= (\"a\"", "a ) was expected"),
        ("root ::= \"a\"{3,2}", "at most fewer than at least"),
        ("root ::= \"a\"{2001}", "at most 2000"),
        ("root ::= \"a\"{x}", "a number was expected"),
        ("root ::= \"\\q\"", "\\q is no escape"),
        ("root ::= \"\\ud800\"", "U+D800 is no character"),
        ("root ::= <think>", "tokens (<name>) are not read here"),
        (
            "root ::= \"a\"\nroot ::= \"b\"",
            "line 2, column 1: the rule 'root' is defined twice",
        ),
        ("root ::= \"a\" ; b", "';' was not expected here"),
    ] {
        let fault = super::to_lark(grammar).unwrap_err().to_string();
        assert!(fault.contains(expected), "{grammar:?}: {fault}");
    }
}

/// Rules that name the next one, of which the last is `last`.
fn chain(n: usize, body: &str, last: &str) -> String {
    let mut text = "root ::= r0\n".to_owned();
    for i in 0..n {
        let next = format!("r{}", i + 1);
        text += &format!("r{i} ::= {}\n", body.replace('@', &next));
    }
    text + &format!("r{n} ::= {last}")
}

/// Looking for what comes next passes over all that may be empty.
#[test]
fn rules_that_may_be_empty_have_few_places() {
    let eight = "@ ".repeat(8);
    let fault = super::to_lark(&chain(5, &eight, "\"x\"?")).unwrap_err();
    assert!(
        fault
            .to_string()
            .contains("may be empty has more than 8192")
    );
    for taken in [
        chain(4, &eight, "\"x\"?"),
        // One place that is repeated, and what cannot be empty.
        chain(900, "@", "\"x\"{0,2000}"),
        chain(20, "\"a\" @ @", "\"x\"?"),
        "root ::= item*\nitem ::= [a-z] ws root?\nws ::= [ \\t]*".to_owned(),
    ] {
        assert!(super::to_lark(&taken).is_ok(), "{taken}");
    }
}

/// What would take long or go deep ends, refused or not.
#[test]
fn hostile_grammars_end() {
    let tokenizer = tokenizer();
    let vocabulary = Vocabulary::new(&tokenizer).unwrap();
    for grammar in [
        chain(1000, "@", "\"a\""),
        chain(40, "@ @", "\"\""),
        chain(40, "@ @", "\"a\" | root"),
        chain(10, "(@){2000}", "\"a\""),
        chain(900, "@ | \"x\" r0?", "\"a\""),
        format!("root ::= {}\"a\"{}", "(".repeat(60), ")".repeat(60)),
        format!("root ::= {}\"a\"{}", "(".repeat(70), ")".repeat(70)),
        format!("root ::= \"a\"{}", "*".repeat(50)),
        format!("root ::= [{}] root?", "a-zA-Z0-9".repeat(5000)),
        format!("root ::= {} root | \"\"", "[^a] ".repeat(5000)),
        "root ::= root | \"a\"".to_owned(),
        "root ::= root".to_owned(),
        "root ::= \"\"".to_owned(),
    ] {
        if let Ok(mut matcher) = vocabulary.matcher(&Grammar::Gbnf(grammar)) {
            let _ = matcher.mask();
        }
    }
}
