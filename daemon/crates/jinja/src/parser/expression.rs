//! Expressions, by Jinja's grammar.

use crate::ast::{Arguments, Comparison, Expr, Kind, Operator};
use crate::lexer::Token;
use crate::value::Value;

use super::{P, Parser};

impl Parser {
    /// An expression, or several with commas between them.
    pub(super) fn tuple(&mut self, with_condition: bool) -> P<Expr> {
        self.tuple_in(with_condition, false)
    }

    fn tuple_in(&mut self, with_condition: bool, in_parentheses: bool) -> P<Expr> {
        let line = self.line();
        let mut items = Vec::new();
        let mut is_tuple = false;
        loop {
            if !items.is_empty() {
                self.expect_op(",")?;
            }
            let ends = matches!(self.token(), Token::BlockEnd | Token::PrintEnd | Token::Eof)
                || self.is_op(")")
                || !with_condition && self.is_word("recursive");
            if ends {
                break;
            }
            items.push(match with_condition {
                true => self.expression()?,
                false => self.deeper(Self::or)?,
            });
            if !self.is_op(",") {
                break;
            }
            is_tuple = true;
        }
        if !is_tuple {
            if let Some(only) = items.pop() {
                return Ok(only);
            }
            if !in_parentheses {
                return self.fail(format!("Expected an expression, got {}", self.shown()));
            }
        }
        let kind = Kind::Tuple(items);
        Ok(Expr { line, kind })
    }

    pub(super) fn expression(&mut self) -> P<Expr> {
        self.deeper(Self::condition)
    }

    fn condition(&mut self) -> P<Expr> {
        let line = self.line();
        let mut value = self.or()?;
        while self.skip_word("if") {
            let test = self.or()?;
            let other = match self.skip_word("else") {
                true => Some(Box::new(self.deeper(Self::condition)?)),
                false => None,
            };
            let kind = Kind::If(Box::new(test), Box::new(value), other);
            value = Expr { line, kind };
        }
        Ok(value)
    }

    /// Terms of one operator, joined from the left; each counts as a level.
    fn chain(
        &mut self,
        term: fn(&mut Self) -> P<Expr>,
        next: fn(&mut Self) -> Option<Operator>,
    ) -> P<Expr> {
        let line = self.line();
        let mut left = term(self)?;
        let depth = self.depth;
        while let Some(operator) = next(self) {
            let right = self.deeper(term)?;
            self.depth += 1;
            let kind = Kind::Binary(operator, Box::new(left), Box::new(right));
            left = Expr { line, kind };
        }
        self.depth = depth;
        Ok(left)
    }

    fn or(&mut self) -> P<Expr> {
        let line = self.line();
        let mut left = self.and()?;
        let depth = self.depth;
        while self.skip_word("or") {
            let right = self.deeper(Self::and)?;
            self.depth += 1;
            let kind = Kind::Or(Box::new(left), Box::new(right));
            left = Expr { line, kind };
        }
        self.depth = depth;
        Ok(left)
    }

    fn and(&mut self) -> P<Expr> {
        let line = self.line();
        let mut left = self.not()?;
        let depth = self.depth;
        while self.skip_word("and") {
            let right = self.deeper(Self::not)?;
            self.depth += 1;
            let kind = Kind::And(Box::new(left), Box::new(right));
            left = Expr { line, kind };
        }
        self.depth = depth;
        Ok(left)
    }

    fn not(&mut self) -> P<Expr> {
        let line = self.line();
        if self.skip_word("not") {
            let kind = Kind::Not(Box::new(self.deeper(Self::not)?));
            return Ok(Expr { line, kind });
        }
        self.compare()
    }

    fn compare(&mut self) -> P<Expr> {
        let line = self.line();
        let first = self.sum()?;
        let mut others = Vec::new();
        loop {
            let by_sign = match self.token() {
                Token::Op("==") => Some(Comparison::Eq),
                Token::Op("!=") => Some(Comparison::Ne),
                Token::Op("<") => Some(Comparison::Lt),
                Token::Op("<=") => Some(Comparison::Le),
                Token::Op(">") => Some(Comparison::Gt),
                Token::Op(">=") => Some(Comparison::Ge),
                _ => None,
            };
            let not_in =
                self.is_word("not") && matches!(self.ahead(), Token::Name(name) if name == "in");
            let comparison = match by_sign {
                Some(comparison) => comparison,
                None if self.is_word("in") => Comparison::In,
                None if not_in => Comparison::NotIn,
                None => break,
            };
            self.next();
            if not_in {
                self.next();
            }
            others.push((comparison, self.sum()?));
        }
        if others.is_empty() {
            return Ok(first);
        }
        let kind = Kind::Compare(Box::new(first), others);
        Ok(Expr { line, kind })
    }

    fn sum(&mut self) -> P<Expr> {
        self.chain(Self::concat, |parser| {
            parser.operator(&[("+", Operator::Add), ("-", Operator::Sub)])
        })
    }

    fn operator(&mut self, known: &[(&str, Operator)]) -> Option<Operator> {
        let (sign, operator) = known.iter().find(|(sign, _)| self.is_op(sign))?;
        self.skip_op(sign);
        Some(*operator)
    }

    fn concat(&mut self) -> P<Expr> {
        let line = self.line();
        let first = self.product()?;
        if !self.is_op("~") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.skip_op("~") {
            items.push(self.product()?);
        }
        let kind = Kind::Concat(items);
        Ok(Expr { line, kind })
    }

    fn product(&mut self) -> P<Expr> {
        self.chain(Self::power, |parser| {
            parser.operator(&[
                ("*", Operator::Mul),
                ("/", Operator::Div),
                ("//", Operator::FloorDiv),
                ("%", Operator::Mod),
            ])
        })
    }

    fn power(&mut self) -> P<Expr> {
        self.chain(
            |parser| parser.unary(true),
            |parser| parser.operator(&[("**", Operator::Pow)]),
        )
    }

    fn unary(&mut self, with_filters: bool) -> P<Expr> {
        let line = self.line();
        let sign = match self.token() {
            Token::Op("-") => Some(true),
            Token::Op("+") => Some(false),
            _ => None,
        };
        let value = match sign {
            Some(negative) => {
                self.next();
                let value = self.deeper(|parser| parser.unary(false))?;
                let kind = Kind::Sign(negative, Box::new(value));
                Expr { line, kind }
            }
            None => self.primary()?,
        };
        let value = self.postfix(value)?;
        match with_filters {
            true => self.filter_expression(value),
            false => Ok(value),
        }
    }

    fn primary(&mut self) -> P<Expr> {
        let line = self.line();
        let kind = match self.token() {
            Token::Name(_) => {
                let name = self.expect_name()?;
                match name.as_str() {
                    "true" | "True" => Kind::Const(Value::Bool(true)),
                    "false" | "False" => Kind::Const(Value::Bool(false)),
                    "none" | "None" => Kind::Const(Value::None),
                    _ => {
                        self.note_special(&name);
                        Kind::Name(self.name(&name))
                    }
                }
            }
            Token::Str(_) => {
                let mut text = String::new();
                while let Token::Str(_) = self.token() {
                    if let Token::Str(more) = self.next() {
                        text.push_str(&more);
                    }
                }
                Kind::Const(Value::text(text))
            }
            Token::Int(_) | Token::Float(_) => Kind::Const(match self.next() {
                Token::Int(n) => Value::Int(n),
                Token::Float(x) => Value::Float(x),
                _ => Value::None,
            }),
            Token::Op("(") => {
                self.next();
                let inner = self.deeper(|parser| parser.tuple_in(true, true))?;
                self.expect_op(")")?;
                return Ok(inner);
            }
            Token::Op("[") => {
                self.next();
                Kind::List(self.items("]")?)
            }
            Token::Op("{") => {
                self.next();
                Kind::Dict(self.pairs()?)
            }
            _ => return self.fail(format!("unexpected {}", self.shown())),
        };
        Ok(Expr { line, kind })
    }

    /// Notes a name that macros treat in a way of their own.
    fn note_special(&mut self, name: &str) {
        if let Some(reads) = self.specials.last_mut() {
            match name {
                "caller" => reads.caller = true,
                "varargs" => reads.varargs = true,
                "kwargs" => reads.kwargs = true,
                _ => {}
            }
        }
    }

    fn items(&mut self, close: &str) -> P<Vec<Expr>> {
        let mut items = Vec::new();
        while !self.is_op(close) {
            if !items.is_empty() {
                self.expect_op(",")?;
                if self.is_op(close) {
                    break;
                }
            }
            items.push(self.expression()?);
        }
        self.expect_op(close)?;
        Ok(items)
    }

    fn pairs(&mut self) -> P<Vec<(Expr, Expr)>> {
        let mut pairs = Vec::new();
        while !self.is_op("}") {
            if !pairs.is_empty() {
                self.expect_op(",")?;
                if self.is_op("}") {
                    break;
                }
            }
            let key = self.expression()?;
            self.expect_op(":")?;
            pairs.push((key, self.expression()?));
        }
        self.expect_op("}")?;
        Ok(pairs)
    }

    fn postfix(&mut self, mut value: Expr) -> P<Expr> {
        let depth = self.depth;
        loop {
            value = match self.token() {
                Token::Op(".") => self.attribute(value)?,
                Token::Op("[") => self.subscript(value)?,
                Token::Op("(") => self.call(value)?,
                _ => break,
            };
            self.one_more()?;
        }
        self.depth = depth;
        Ok(value)
    }

    /// Counts a link of a chain as a level, until the chain ends.
    fn one_more(&mut self) -> P<()> {
        self.deeper(|_| Ok(()))?;
        self.depth += 1;
        Ok(())
    }

    fn filter_expression(&mut self, mut value: Expr) -> P<Expr> {
        let depth = self.depth;
        loop {
            value = if self.is_op("|") {
                self.filters(Some(value), false)?
            } else if self.is_word("is") {
                self.test(value)?
            } else if self.is_op("(") {
                self.call(value)?
            } else {
                break;
            };
            self.one_more()?;
        }
        self.depth = depth;
        Ok(value)
    }

    fn attribute(&mut self, value: Expr) -> P<Expr> {
        let line = self.line();
        self.next();
        let value = Box::new(value);
        let kind = match self.next() {
            Token::Name(name) => Kind::Attr(value, name.into()),
            Token::Int(n) => {
                let at = Expr {
                    line,
                    kind: Kind::Const(Value::Int(n)),
                };
                Kind::Item(value, Box::new(at))
            }
            _ => return Err((line, "expected name or number".to_owned())),
        };
        Ok(Expr { line, kind })
    }

    fn subscript(&mut self, value: Expr) -> P<Expr> {
        let line = self.line();
        self.next();
        let mut places = Vec::new();
        while !self.is_op("]") {
            if !places.is_empty() {
                self.expect_op(",")?;
            }
            places.push(self.subscribed()?);
        }
        self.expect_op("]")?;
        let value = Box::new(value);
        let kind = match (places.pop(), places.is_empty()) {
            (Some(Place::Slice(slice)), true) => Kind::Slice(value, slice),
            (Some(Place::At(at)), true) => Kind::Item(value, Box::new(at)),
            (last, _) => {
                let mut items = Vec::new();
                for place in places.into_iter().chain(last) {
                    match place {
                        Place::At(at) => items.push(at),
                        Place::Slice(_) => return self.fail("a slice among other places"),
                    }
                }
                let kind = Kind::Tuple(items);
                Kind::Item(value, Box::new(Expr { line, kind }))
            }
        };
        Ok(Expr { line, kind })
    }

    fn subscribed(&mut self) -> P<Place> {
        let begin = match self.is_op(":") {
            true => None,
            false => Some(self.expression()?),
        };
        if !self.skip_op(":") {
            return match begin {
                Some(at) => Ok(Place::At(at)),
                None => self.fail("expected subscript expression"),
            };
        }
        let is_end = |parser: &Self| parser.is_op("]") || parser.is_op(",");
        let end = match is_end(self) || self.is_op(":") {
            true => None,
            false => Some(self.expression()?),
        };
        let step = match self.skip_op(":") && !is_end(self) {
            true => Some(self.expression()?),
            false => None,
        };
        Ok(Place::Slice(Box::new([begin, end, step])))
    }

    fn call(&mut self, value: Expr) -> P<Expr> {
        let line = self.line();
        let arguments = self.arguments()?;
        let kind = Kind::Call(Box::new(value), arguments);
        Ok(Expr { line, kind })
    }

    fn arguments(&mut self) -> P<Arguments> {
        const INVALID: &str = "invalid syntax for function call expression";
        self.expect_op("(")?;
        let mut arguments = Arguments::default();
        let mut is_first = true;
        while !self.is_op(")") {
            if !is_first {
                self.expect_op(",")?;
                if self.is_op(")") {
                    break;
                }
            }
            is_first = false;
            let has_rest = arguments.rest.is_some();
            let has_named_rest = arguments.named_rest.is_some();
            let is_named =
                matches!(self.token(), Token::Name(_)) && matches!(self.ahead(), Token::Op("="));
            if has_named_rest {
                return self.fail(INVALID);
            }
            if self.skip_op("*") {
                if has_rest {
                    return self.fail(INVALID);
                }
                arguments.rest = Some(Box::new(self.expression()?));
            } else if self.skip_op("**") {
                arguments.named_rest = Some(Box::new(self.expression()?));
            } else if is_named {
                let name = self.expect_name()?;
                self.next();
                arguments.named.push((name.into(), self.expression()?));
            } else if has_rest || !arguments.named.is_empty() {
                return self.fail(INVALID);
            } else {
                arguments.positional.push(self.expression()?);
            }
        }
        self.expect_op(")")?;
        Ok(arguments)
    }

    /// A name of a filter or a test, which may have dots.
    fn dotted(&mut self) -> P<String> {
        let mut name = self.expect_name()?;
        while self.skip_op(".") {
            name.push('.');
            name.push_str(&self.expect_name()?);
        }
        Ok(name)
    }

    /// Filters behind each other; `inline` where the first has no bar before it.
    pub(super) fn filters(&mut self, value: Option<Expr>, inline: bool) -> P<Expr> {
        let mut value = value;
        let mut inline = inline;
        let depth = self.depth;
        while inline || self.is_op("|") {
            if !inline {
                self.next();
            }
            inline = false;
            let line = self.line();
            let name = self.dotted()?;
            let arguments = match self.is_op("(") {
                true => self.arguments()?,
                false => Arguments::default(),
            };
            let kind = Kind::Filter(value.map(Box::new), name.into(), arguments);
            value = Some(Expr { line, kind });
            self.one_more()?;
        }
        self.depth = depth;
        match value {
            Some(value) => Ok(value),
            None => self.fail("expected a filter"),
        }
    }

    fn test(&mut self, value: Expr) -> P<Expr> {
        let line = self.line();
        self.next();
        let negated = self.skip_word("not");
        let name = self.dotted()?;
        let ends = ["else", "or", "and"].iter().any(|word| self.is_word(word));
        let mut arguments = Arguments::default();
        if self.is_op("(") {
            arguments = self.arguments()?;
        } else {
            let begins = match self.token() {
                Token::Name(_) => !ends,
                Token::Str(_) | Token::Int(_) | Token::Float(_) => true,
                Token::Op("[" | "{") => true,
                _ => false,
            };
            if begins {
                if self.is_word("is") {
                    return self.fail("You cannot chain multiple tests with is");
                }
                let argument = self.primary()?;
                arguments.positional.push(self.postfix(argument)?);
            }
        }
        let kind = Kind::Test(Box::new(value), name.into(), arguments);
        let test = Expr { line, kind };
        if !negated {
            return Ok(test);
        }
        let kind = Kind::Not(Box::new(test));
        Ok(Expr { line, kind })
    }
}

/// What stands in brackets.
enum Place {
    At(Expr),
    Slice(Box<[Option<Expr>; 3]>),
}
