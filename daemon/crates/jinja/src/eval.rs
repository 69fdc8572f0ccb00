//! Expressions, as they are evaluated.

use std::rc::Rc;

use crate::access;
use crate::args::Args;
use crate::ast::{Arguments, Comparison, Expr, Kind};
use crate::compare;
use crate::fault::{R, fail};
use crate::filters;
use crate::is_tests;
use crate::objects::Scope;
use crate::operators;
use crate::repr;
use crate::run::Run;
use crate::value::{Dict, Value};

/// Error for a conditional expression without `else` whose condition is false.
const NO_ELSE: &str =
    "the inline if-expression evaluated to false and no else section was defined.";

impl Run<'_> {
    pub(crate) fn eval(&self, expr: &Expr, scope: &Rc<Scope>) -> R<Value> {
        self.eval_on(expr, None, scope)
    }

    /// The value of an expression; `input` is what its first filter is applied to, where that
    /// stands before a block.
    pub(crate) fn eval_on(&self, expr: &Expr, input: Option<Value>, scope: &Rc<Scope>) -> R<Value> {
        self.step()?;
        let value = self.kind(&expr.kind, input, scope);
        value.map_err(|fault| fault.at(expr.line))
    }

    fn kind(&self, kind: &Kind, input: Option<Value>, scope: &Rc<Scope>) -> R<Value> {
        Ok(match kind {
            Kind::Const(value) => value.clone(),
            Kind::Name(name) => self.lookup(*name, scope),
            Kind::List(items) => Value::list(self.all(items, scope)?),
            Kind::Tuple(items) => Value::tuple(self.all(items, scope)?),
            Kind::Dict(pairs) => {
                let mut dict = Dict::default();
                for (key, value) in pairs {
                    let key = self.eval(key, scope)?;
                    dict.insert(key, self.eval(value, scope)?)?;
                }
                Value::dict(dict)
            }
            Kind::Attr(of, name) => access::attribute(self, &self.eval(of, scope)?, name)?,
            Kind::Item(of, at) => {
                let of = self.eval(of, scope)?;
                access::item(self, &of, &self.eval(at, scope)?)?
            }
            Kind::Slice(of, places) => self.slice(of, places, scope)?,
            Kind::Call(of, arguments) => {
                let called = self.eval(of, scope)?;
                access::call(self, &called, self.arguments(arguments, scope)?)?
            }
            Kind::Filter(of, name, arguments) => {
                let value = match (of, input) {
                    (Some(of), input) => self.eval_on(of, input, scope)?,
                    (None, Some(input)) => input,
                    (None, None) => return fail("a filter has nothing to be applied to"),
                };
                filters::apply(self, name, value, self.arguments(arguments, scope)?)?
            }
            Kind::Test(of, name, arguments) => {
                let value = self.eval(of, scope)?;
                let args = self.arguments(arguments, scope)?;
                Value::Bool(is_tests::test(name, &value, args)?)
            }
            Kind::Not(of) => Value::Bool(!self.eval(of, scope)?.is_true()),
            Kind::Sign(negative, of) => operators::unary(*negative, &self.eval(of, scope)?)?,
            Kind::Binary(operator, a, b) => {
                let a = self.eval(a, scope)?;
                operators::binary(*operator, &a, &self.eval(b, scope)?)?
            }
            Kind::Concat(items) => {
                let values = self.all(items, scope)?;
                match self.escapes.get() {
                    true => self.concat_escaped(&values)?,
                    false => operators::concat(&values)?,
                }
            }
            Kind::And(a, b) => match self.eval(a, scope)? {
                a if a.is_true() => self.eval(b, scope)?,
                a => a,
            },
            Kind::Or(a, b) => match self.eval(a, scope)? {
                a if a.is_true() => a,
                _ => self.eval(b, scope)?,
            },
            Kind::Compare(first, others) => self.comparison(first, others, scope)?,
            Kind::If(test, value, other) => match (self.eval(test, scope)?.is_true(), other) {
                (true, _) => self.eval(value, scope)?,
                (false, Some(other)) => self.eval(other, scope)?,
                (false, None) => Value::undefined(NO_ELSE),
            },
        })
    }

    fn slice(&self, of: &Expr, places: &[Option<Expr>; 3], scope: &Rc<Scope>) -> R<Value> {
        let of = self.eval(of, scope)?;
        let mut bounds = [Value::None, Value::None, Value::None];
        for (bound, place) in bounds.iter_mut().zip(places) {
            if let Some(place) = place {
                *bound = self.eval(place, scope)?;
            }
        }
        access::slice(&of, &bounds)
    }

    fn all(&self, items: &[Expr], scope: &Rc<Scope>) -> R<Vec<Value>> {
        items.iter().map(|item| self.eval(item, scope)).collect()
    }

    /// Texts that are joined where texts are escaped: those that are not safe are.
    fn concat_escaped(&self, values: &[Value]) -> R<Value> {
        let mut out = String::new();
        for value in values {
            match value {
                Value::Str(text) if text.safe => out.push_str(&text.text),
                other => {
                    let text = repr::text(other)?;
                    out.push_str(&crate::html::escaped(self.host, &text));
                }
            }
        }
        Ok(Value::safe(out))
    }

    fn comparison(
        &self,
        first: &Expr,
        others: &[(Comparison, Expr)],
        scope: &Rc<Scope>,
    ) -> R<Value> {
        let mut left = self.eval(first, scope)?;
        for (comparison, right) in others {
            let right = self.eval(right, scope)?;
            if !compared(*comparison, &left, &right)? {
                return Ok(Value::Bool(false));
            }
            left = right;
        }
        Ok(Value::Bool(true))
    }

    pub(crate) fn arguments(&self, arguments: &Arguments, scope: &Rc<Scope>) -> R<Args> {
        let mut args = Args::of(self.all(&arguments.positional, scope)?);
        if let Some(rest) = &arguments.rest {
            args.positional.extend(self.eval(rest, scope)?.items()?);
        }
        for (name, value) in &arguments.named {
            args.named.push((Rc::clone(name), self.eval(value, scope)?));
        }
        if let Some(rest) = &arguments.named_rest {
            let Value::Dict(members) = self.eval(rest, scope)? else {
                return fail("argument after ** must be a mapping");
            };
            for (name, value) in members.borrow().iter() {
                match name {
                    Value::Str(name) => args.named.push((Rc::clone(&name.text), value.clone())),
                    _ => return fail("keywords must be strings"),
                }
            }
        }
        Ok(args)
    }

    /// The value of a call, which gets `caller`, too.
    pub(crate) fn call_with(
        &self,
        call: &Expr,
        scope: &Rc<Scope>,
        caller: Option<Value>,
    ) -> R<Value> {
        let Kind::Call(of, arguments) = &call.kind else {
            return fail("expected call");
        };
        let called = self.eval(of, scope)?;
        let mut args = self.arguments(arguments, scope)?;
        if let Some(caller) = caller {
            args.named.push(("caller".into(), caller));
        }
        access::call(self, &called, args)
    }
}

/// Whether the comparison of `a` with `b` is true.
pub(crate) fn compared(comparison: Comparison, a: &Value, b: &Value) -> R<bool> {
    let ordered = |sign: &str, holds: fn(std::cmp::Ordering) -> bool| -> R<bool> {
        Ok(compare::order(a, b, sign)?.is_some_and(holds))
    };
    match comparison {
        Comparison::Eq => compare::equal(a, b),
        Comparison::Ne => compare::equal(a, b).map(|equal| !equal),
        Comparison::Lt => ordered("<", std::cmp::Ordering::is_lt),
        Comparison::Le => ordered("<=", std::cmp::Ordering::is_le),
        Comparison::Gt => ordered(">", std::cmp::Ordering::is_gt),
        Comparison::Ge => ordered(">=", std::cmp::Ordering::is_ge),
        Comparison::In => compare::contains(b, a),
        Comparison::NotIn => compare::contains(b, a).map(|is_in| !is_in),
    }
}
