//! From tokens to statements.

mod expression;

use std::collections::HashMap;
use std::rc::Rc;

use crate::ast::{
    Body, Expr, For, Kind, MacroNode, Name, Parameter, Specials, Stmt, StmtKind, Target,
};
use crate::lexer::{self, SyntaxError, Token};

/// Levels of statements and expressions within each other.
const DEPTH_MAX: usize = 4000;

/// A parsed template.
pub(crate) struct Parsed {
    pub(crate) body: Body,
    /// The names, by their numbers.
    pub(crate) names: Vec<Rc<str>>,
}

/// Parses a template.
///
/// # Errors
///
/// If it is none; with the line.
pub(crate) fn parse(source: &str) -> Result<Parsed, SyntaxError> {
    let mut parser = Parser {
        tokens: lexer::tokens(source)?,
        at: 0,
        depth: 0,
        names: Vec::new(),
        by_name: HashMap::new(),
        specials: Vec::new(),
        loops: 0,
    };
    let body = parser.body(&[])?;
    Ok(Parsed {
        body,
        names: parser.names,
    })
}

struct Parser {
    tokens: Vec<(Token, u32)>,
    at: usize,
    depth: usize,
    names: Vec<Rc<str>>,
    by_name: HashMap<Rc<str>, Name>,
    /// What the macros around read of special names.
    specials: Vec<Specials>,
    /// Loops around, within the macro.
    loops: usize,
}

type P<T> = Result<T, SyntaxError>;

impl Parser {
    fn token(&self) -> &Token {
        &self.tokens[self.at].0
    }

    fn ahead(&self) -> &Token {
        let at = (self.at + 1).min(self.tokens.len() - 1);
        &self.tokens[at].0
    }

    fn line(&self) -> u32 {
        self.tokens[self.at].1
    }

    fn next(&mut self) -> Token {
        let token = std::mem::replace(&mut self.tokens[self.at].0, Token::Eof);
        if self.at + 1 < self.tokens.len() {
            self.at += 1;
        }
        token
    }

    fn fail<T>(&self, message: impl Into<String>) -> P<T> {
        Err((self.line(), message.into()))
    }

    fn is_op(&self, op: &str) -> bool {
        matches!(self.token(), Token::Op(found) if *found == op)
    }

    fn is_word(&self, word: &str) -> bool {
        matches!(self.token(), Token::Name(name) if name == word)
    }

    fn skip_op(&mut self, op: &str) -> bool {
        let found = self.is_op(op);
        if found {
            self.next();
        }
        found
    }

    fn skip_word(&mut self, word: &str) -> bool {
        let found = self.is_word(word);
        if found {
            self.next();
        }
        found
    }

    fn expect_op(&mut self, op: &str) -> P<()> {
        match self.skip_op(op) {
            true => Ok(()),
            false => self.fail(format!("expected token '{op}', got {}", self.shown())),
        }
    }

    fn expect_word(&mut self, word: &str) -> P<()> {
        match self.skip_word(word) {
            true => Ok(()),
            false => self.fail(format!("expected token '{word}', got {}", self.shown())),
        }
    }

    fn expect(&mut self, token: &Token, words: &str) -> P<()> {
        if self.token() == token {
            self.next();
            return Ok(());
        }
        self.fail(format!("expected token '{words}', got {}", self.shown()))
    }

    fn expect_name(&mut self) -> P<String> {
        match self.token() {
            Token::Name(_) => match self.next() {
                Token::Name(name) => Ok(name),
                _ => self.fail("expected a name"),
            },
            _ => self.fail(format!("expected token 'name', got {}", self.shown())),
        }
    }

    /// The token, for an error.
    fn shown(&self) -> String {
        match self.token() {
            Token::Data(_) => "'template data'".to_owned(),
            Token::PrintBegin => "'begin of print statement'".to_owned(),
            Token::PrintEnd => "'end of print statement'".to_owned(),
            Token::BlockBegin => "'begin of statement block'".to_owned(),
            Token::BlockEnd => "'end of statement block'".to_owned(),
            Token::Name(name) => format!("'{name}'"),
            Token::Int(n) => format!("'{n}'"),
            Token::Float(x) => format!("'{x}'"),
            Token::Str(text) => format!("{text:?}"),
            Token::Op(op) => format!("'{op}'"),
            Token::Eof => "'end of template'".to_owned(),
        }
    }

    /// The number of a name.
    fn name(&mut self, name: &str) -> Name {
        if let Some(id) = self.by_name.get(name) {
            return *id;
        }
        let id = self.names.len() as Name;
        let name: Rc<str> = name.into();
        self.names.push(Rc::clone(&name));
        self.by_name.insert(name, id);
        id
    }

    /// One level deeper, within [`DEPTH_MAX`].
    fn deeper<T>(&mut self, parse: impl FnOnce(&mut Self) -> P<T>) -> P<T> {
        if self.depth >= DEPTH_MAX {
            return self.fail(format!("it is nested more than {DEPTH_MAX} levels deep"));
        }
        self.depth += 1;
        let result = parse(self);
        self.depth -= 1;
        result
    }

    /// Statements up to a tag that begins with one of `ends`, whose word is the next token then.
    fn body(&mut self, ends: &[&str]) -> P<Body> {
        let begun = self.line();
        let mut body = Body::new();
        loop {
            let line = self.line();
            match self.next() {
                Token::Data(text) => body.push(Stmt {
                    line,
                    kind: StmtKind::Data(text.into()),
                }),
                Token::PrintBegin => {
                    let printed = self.tuple(true)?;
                    self.expect(&Token::PrintEnd, "end of print statement")?;
                    body.push(Stmt {
                        line,
                        kind: StmtKind::Print(printed),
                    });
                }
                Token::BlockBegin => {
                    if ends.iter().any(|end| self.is_word(end)) {
                        return Ok(body);
                    }
                    let kind = self.deeper(Self::statement)?;
                    self.expect(&Token::BlockEnd, "end of statement block")?;
                    body.push(Stmt { line, kind });
                }
                _ if ends.is_empty() => return Ok(body),
                _ => {
                    let expected = ends.join("' or '");
                    return Err((
                        begun,
                        format!("Unexpected end of template: expected '{expected}'"),
                    ));
                }
            }
        }
    }

    /// A body with the end of the tag before it and the word of the one behind, which is taken.
    fn block(&mut self, ends: &[&str]) -> P<(Body, String)> {
        self.skip_op(":");
        self.expect(&Token::BlockEnd, "end of statement block")?;
        let body = self.body(ends)?;
        let end = self.expect_name()?;
        Ok((body, end))
    }

    fn statement(&mut self) -> P<StmtKind> {
        let line = self.line();
        let word = match self.token() {
            Token::Name(_) => self.expect_name()?,
            _ => return self.fail(format!("tag name expected, got {}", self.shown())),
        };
        Ok(match word.as_str() {
            "set" => self.set()?,
            "if" => self.if_()?,
            "for" => self.for_()?,
            "with" => self.with()?,
            "macro" => self.macro_()?,
            "call" => self.call_block()?,
            "filter" => {
                let filter = self.filters(None, true)?;
                let (body, _) = self.block(&["endfilter"])?;
                StmtKind::Filter(filter, body)
            }
            "generation" => StmtKind::Scope(self.block(&["endgeneration"])?.0),
            "block" => {
                let name = self.expect_name()?;
                self.skip_word("scoped");
                self.skip_word("required");
                let (body, _) = self.block(&["endblock"])?;
                self.skip_word(&name);
                StmtKind::Scope(body)
            }
            "autoescape" => {
                let is_on = self.expression()?;
                let (body, _) = self.block(&["endautoescape"])?;
                StmtKind::Autoescape(is_on, body)
            }
            "print" => {
                let mut items = Vec::new();
                while *self.token() != Token::BlockEnd {
                    if !items.is_empty() {
                        self.expect_op(",")?;
                    }
                    items.push(self.expression()?);
                }
                let kind = Kind::Concat(items);
                StmtKind::Print(Expr { line, kind })
            }
            "do" => StmtKind::Do(self.tuple(true)?),
            "break" | "continue" if self.loops == 0 => {
                return Err((line, format!("'{word}' outside loop")));
            }
            "break" => StmtKind::Break,
            "continue" => StmtKind::Continue,
            "include" | "import" | "from" | "extends" => {
                while !matches!(self.token(), Token::BlockEnd | Token::Eof) {
                    self.next();
                }
                StmtKind::Foreign(match word.as_str() {
                    "include" => "include",
                    "extends" => "extends",
                    _ => "import",
                })
            }
            _ => return Err((line, format!("Encountered unknown tag '{word}'."))),
        })
    }

    fn set(&mut self) -> P<StmtKind> {
        let target = self.targets(true, false)?;
        if self.skip_op("=") {
            let value = self.tuple(true)?;
            return Ok(StmtKind::Set(target, value));
        }
        let filter = match self.is_op("|") {
            true => Some(self.filters(None, false)?),
            false => None,
        };
        let (body, _) = self.block(&["endset"])?;
        Ok(StmtKind::SetBlock(target, filter, body))
    }

    fn if_(&mut self) -> P<StmtKind> {
        let mut branches = Vec::new();
        loop {
            let test = self.tuple(false)?;
            let (body, end) = self.block(&["elif", "else", "endif"])?;
            branches.push((test, body));
            match end.as_str() {
                "elif" => {}
                "else" => {
                    let (otherwise, _) = self.block(&["endif"])?;
                    return Ok(StmtKind::If(branches, otherwise));
                }
                _ => return Ok(StmtKind::If(branches, Body::new())),
            }
        }
    }

    fn for_(&mut self) -> P<StmtKind> {
        let target = self.targets(false, true)?;
        self.expect_word("in")?;
        let iter = self.tuple(false)?;
        let test = match self.skip_word("if") {
            true => Some(self.expression()?),
            false => None,
        };
        let is_recursive = self.skip_word("recursive");
        self.loops += 1;
        let (body, end) = self.block(&["endfor", "else"])?;
        self.loops -= 1;
        let otherwise = match end.as_str() {
            "else" => self.block(&["endfor"])?.0,
            _ => Body::new(),
        };
        Ok(StmtKind::For(Rc::new(For {
            target,
            iter,
            test,
            is_recursive,
            body,
            otherwise,
        })))
    }

    fn with(&mut self) -> P<StmtKind> {
        let mut values = Vec::new();
        while *self.token() != Token::BlockEnd {
            if !values.is_empty() {
                self.expect_op(",")?;
            }
            let target = self.targets(false, false)?;
            self.expect_op("=")?;
            values.push((target, self.expression()?));
        }
        let (body, _) = self.block(&["endwith"])?;
        Ok(StmtKind::With(values, body))
    }

    fn macro_(&mut self) -> P<StmtKind> {
        let name = self.expect_name()?;
        let node = self.macro_node(Some(&name), &["endmacro"], true)?.0;
        Ok(StmtKind::Macro(node))
    }

    fn call_block(&mut self) -> P<StmtKind> {
        let has_parameters = self.is_op("(");
        let (node, call) = self.macro_node(None, &["endcall"], has_parameters)?;
        match call {
            Some(call) => Ok(StmtKind::Call(node, call)),
            None => self.fail("expected call"),
        }
    }

    /// A macro from its parameters on; of a call block, with the call.
    fn macro_node(
        &mut self,
        name: Option<&str>,
        ends: &[&str],
        has_parameters: bool,
    ) -> P<(Rc<MacroNode>, Option<Expr>)> {
        let id = self.name(name.unwrap_or("caller"));
        // A special name within is a read of all macros around, but for the call of a call block.
        self.specials.push(Specials::default());
        let loops = std::mem::take(&mut self.loops);
        let parameters = match has_parameters {
            true => self.parameters()?,
            false => Vec::new(),
        };
        let call = match name {
            Some(_) => None,
            None => {
                let call = self.expression()?;
                if !matches!(call.kind, Kind::Call(..)) {
                    return self.fail("expected call");
                }
                Some(call)
            }
        };
        let (body, _) = self.block(ends)?;
        self.loops = loops;
        let reads = self.specials.pop().unwrap_or_default();
        let is_bare = |(_, name, default): &Parameter| &**name == "caller" && default.is_none();
        if reads.caller && parameters.iter().any(is_bare) {
            return self.fail("the parameter \"caller\" must be omitted or be given a default");
        }
        if let Some(outer) = self.specials.last_mut() {
            outer.caller |= reads.caller;
            outer.varargs |= reads.varargs;
            outer.kwargs |= reads.kwargs;
        }
        let node = MacroNode {
            name: name.map(Rc::from),
            id,
            parameters,
            body,
            reads,
        };
        Ok((Rc::new(node), call))
    }

    fn parameters(&mut self) -> P<Vec<Parameter>> {
        self.expect_op("(")?;
        let mut parameters: Vec<Parameter> = Vec::new();
        while !self.is_op(")") {
            if !parameters.is_empty() {
                self.expect_op(",")?;
            }
            let name = self.expect_name()?;
            let default = match self.skip_op("=") {
                true => Some(self.expression()?),
                false if parameters.iter().any(|(_, _, default)| default.is_some()) => {
                    return self.fail("non-default argument follows default argument");
                }
                false => None,
            };
            parameters.push((self.name(&name), name.as_str().into(), default));
        }
        self.expect_op(")")?;
        Ok(parameters)
    }

    /// What is assigned to: names, tuples of them, and members of namespaces.
    fn targets(&mut self, with_members: bool, before_in: bool) -> P<Target> {
        let mut targets = Vec::new();
        let mut is_tuple = false;
        loop {
            if !targets.is_empty() && !self.skip_op(",") {
                break;
            }
            let ends = matches!(self.token(), Token::BlockEnd | Token::PrintEnd)
                || self.is_op(")")
                || self.is_op("=")
                || before_in && self.is_word("in");
            if ends && !targets.is_empty() {
                break;
            }
            targets.push(self.target(with_members, before_in)?);
            if !self.is_op(",") {
                break;
            }
            is_tuple = true;
        }
        Ok(match targets.pop() {
            Some(only) if targets.is_empty() && !is_tuple => only,
            last => {
                targets.extend(last);
                Target::Tuple(targets)
            }
        })
    }

    fn target(&mut self, with_members: bool, before_in: bool) -> P<Target> {
        if self.skip_op("(") {
            let inner = self.deeper(|parser| parser.targets(with_members, before_in))?;
            self.expect_op(")")?;
            return Ok(inner);
        }
        let name = self.expect_name()?;
        if matches!(
            name.as_str(),
            "true" | "false" | "none" | "True" | "False" | "None"
        ) {
            return self.fail("can't assign to 'const'");
        }
        let id = self.name(&name);
        if with_members && self.skip_op(".") {
            let member = self.expect_name()?;
            return Ok(Target::Member(id, member.into()));
        }
        Ok(Target::Name(id))
    }
}
