//! The parts of a template.

use std::rc::Rc;

use crate::value::Value;

/// A name, by its number in the template.
pub(crate) type Name = u32;

/// An expression, and its line.
pub(crate) struct Expr {
    pub(crate) line: u32,
    pub(crate) kind: Kind,
}

pub(crate) enum Kind {
    Const(Value),
    Name(Name),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    /// A member by a name behind a dot.
    Attr(Box<Expr>, Rc<str>),
    /// A member in brackets.
    Item(Box<Expr>, Box<Expr>),
    Slice(Box<Expr>, Box<[Option<Expr>; 3]>),
    Call(Box<Expr>, Arguments),
    Filter(Option<Box<Expr>>, Rc<str>, Arguments),
    Test(Box<Expr>, Rc<str>, Arguments),
    Not(Box<Expr>),
    /// A sign: true for minus.
    Sign(bool, Box<Expr>),
    Binary(Operator, Box<Expr>, Box<Expr>),
    Concat(Vec<Expr>),
    And(Box<Expr>, Box<Expr>),
    Or(Box<Expr>, Box<Expr>),
    Compare(Box<Expr>, Vec<(Comparison, Expr)>),
    /// `value if test else other`.
    If(Box<Expr>, Box<Expr>, Option<Box<Expr>>),
}

/// Arguments of a call.
#[derive(Default)]
pub(crate) struct Arguments {
    pub(crate) positional: Vec<Expr>,
    pub(crate) named: Vec<(Rc<str>, Expr)>,
    pub(crate) rest: Option<Box<Expr>>,
    pub(crate) named_rest: Option<Box<Expr>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operator {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Mod,
    Pow,
}

impl Operator {
    pub(crate) fn sign(self) -> &'static str {
        match self {
            Operator::Add => "+",
            Operator::Sub => "-",
            Operator::Mul => "*",
            Operator::Div => "/",
            Operator::FloorDiv => "//",
            Operator::Mod => "%",
            Operator::Pow => "** or pow()",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Comparison {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    NotIn,
}

/// What may be assigned to.
pub(crate) enum Target {
    Name(Name),
    /// A member of a namespace.
    Member(Name, Rc<str>),
    Tuple(Vec<Target>),
}

/// A statement, and its line.
pub(crate) struct Stmt {
    pub(crate) line: u32,
    pub(crate) kind: StmtKind,
}

pub(crate) type Body = Vec<Stmt>;

pub(crate) enum StmtKind {
    Data(Rc<str>),
    Print(Expr),
    Set(Target, Expr),
    /// A block whose text is assigned, after the filters.
    SetBlock(Target, Option<Expr>, Body),
    /// Branches, and what is done otherwise.
    If(Vec<(Expr, Body)>, Body),
    For(Rc<For>),
    With(Vec<(Target, Expr)>, Body),
    Scope(Body),
    Filter(Expr, Body),
    Macro(Rc<MacroNode>),
    Call(Rc<MacroNode>, Expr),
    Autoescape(Expr, Body),
    Do(Expr),
    Break,
    Continue,
    /// What names another template: there is none.
    Foreign(&'static str),
}

pub(crate) struct For {
    pub(crate) target: Target,
    pub(crate) iter: Expr,
    pub(crate) test: Option<Expr>,
    pub(crate) is_recursive: bool,
    pub(crate) body: Body,
    pub(crate) otherwise: Body,
}

/// A parameter of a macro: its number, its name, and its default.
pub(crate) type Parameter = (Name, Rc<str>, Option<Expr>);

/// A macro, or the body of a call block.
pub(crate) struct MacroNode {
    /// `None` for a call block's.
    pub(crate) name: Option<Rc<str>>,
    pub(crate) id: Name,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) body: Body,
    /// Special names that the macro's body reads.
    pub(crate) reads: Specials,
}

/// Special names of macros.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Specials {
    pub(crate) caller: bool,
    pub(crate) varargs: bool,
    pub(crate) kwargs: bool,
}
