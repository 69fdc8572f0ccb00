//! Statements, as they are executed.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::Host;
use crate::args::Args;
use crate::ast::{Body, Expr, For, MacroNode, Name, Stmt, StmtKind, Target};
use crate::fault::{Fault, R, fail};
use crate::html;
use crate::objects::{Function, Loop, Macro, Scope};
use crate::repr;
use crate::value::{Dict, Value};

/// What ends a body early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flow {
    On,
    Break,
    Continue,
}

/// Macros and loops within each other.
const CALLS_MAX: usize = 500;

/// The state of one rendering.
pub(crate) struct Run<'h> {
    pub(crate) host: &'h Host<'h>,
    names: &'h [Rc<str>],
    steps: Cell<u64>,
    bytes: Cell<usize>,
    calls: Cell<usize>,
    pub(crate) escapes: Cell<bool>,
    /// The name `loop`, if the template has it.
    loop_name: Option<Name>,
    caller_name: Option<Name>,
    varargs_name: Option<Name>,
    kwargs_name: Option<Name>,
    /// Scopes that macros hold, which hold the macros: they are emptied at the end.
    closures: RefCell<Vec<Rc<Scope>>>,
    /// A state for `random`.
    pub(crate) seed: Cell<u64>,
}

impl<'h> Run<'h> {
    pub(crate) fn new(names: &'h [Rc<str>], host: &'h Host<'h>) -> Run<'h> {
        let id = |name: &str| {
            let at = names.iter().position(|known| &**known == name);
            at.map(|at| at as Name)
        };
        Run {
            host,
            names,
            steps: Cell::new(0),
            bytes: Cell::new(0),
            calls: Cell::new(0),
            escapes: Cell::new(false),
            loop_name: id("loop"),
            caller_name: id("caller"),
            varargs_name: id("varargs"),
            kwargs_name: id("kwargs"),
            closures: RefCell::default(),
            seed: Cell::new(0x9e37_79b9_7f4a_7c15),
        }
    }

    /// Renders a whole template.
    pub(crate) fn template(&self, body: &Body, variables: &serde_json::Value) -> R<String> {
        let scope = Scope::new(None);
        if let Some(variables) = variables.as_object() {
            for (at, name) in self.names.iter().enumerate() {
                if let Some(value) = variables.get(&**name) {
                    scope.set(at as Name, Value::of_json(value));
                }
            }
        }
        let mut out = String::new();
        let done = self.body(body, &scope, &mut out);
        for closure in self.closures.take() {
            closure.clear();
        }
        done.map(|_| out)
    }

    /// Counts a step.
    pub(crate) fn step(&self) -> R<()> {
        let steps = self.steps.get() + 1;
        self.steps.set(steps);
        match steps > self.host.max_steps {
            true => Err(Fault::Steps),
            false => Ok(()),
        }
    }

    fn write(&self, text: &str, out: &mut String) -> R<()> {
        let written = self.bytes.get() + text.len();
        self.bytes.set(written);
        if out.len() + text.len() > self.host.max_output {
            return Err(Fault::Output);
        }
        // What macros write is written once more where they are called.
        if written > self.host.max_output.saturating_mul(16) {
            return Err(Fault::Output);
        }
        out.push_str(text);
        Ok(())
    }

    /// One call deeper.
    fn within<T>(&self, work: impl FnOnce() -> R<T>) -> R<T> {
        if self.calls.get() >= CALLS_MAX {
            return fail("maximum recursion depth exceeded");
        }
        self.calls.set(self.calls.get() + 1);
        let result = work();
        self.calls.set(self.calls.get() - 1);
        result
    }

    /// The value of a name.
    pub(crate) fn lookup(&self, name: Name, scope: &Scope) -> Value {
        if let Some(value) = scope.get(name) {
            return value;
        }
        let text = &self.names[name as usize];
        match Function::ALL.iter().find(|(known, _)| *known == &**text) {
            Some((_, function)) => Value::Function(*function),
            None => Value::undefined(format!("'{text}' is undefined")),
        }
    }

    pub(crate) fn body(&self, body: &Body, scope: &Rc<Scope>, out: &mut String) -> R<Flow> {
        for stmt in body {
            let flow = self.stmt(stmt, scope, out);
            let flow = flow.map_err(|fault| fault.at(stmt.line))?;
            if flow != Flow::On {
                return Ok(flow);
            }
        }
        Ok(Flow::On)
    }

    fn stmt(&self, stmt: &Stmt, scope: &Rc<Scope>, out: &mut String) -> R<Flow> {
        self.step()?;
        match &stmt.kind {
            StmtKind::Data(text) => self.write(text, out)?,
            StmtKind::Print(expr) => {
                let value = self.eval(expr, scope)?;
                self.print(&value, out)?;
            }
            StmtKind::Set(target, value) => {
                let value = self.eval(value, scope)?;
                self.assign(target, value, scope)?;
            }
            StmtKind::SetBlock(target, filter, body) => {
                let value = self.written(body, scope)?;
                let value = match filter {
                    Some(filter) => self.filtered(filter, value, scope)?,
                    None => value,
                };
                self.assign(target, value, scope)?;
            }
            StmtKind::If(branches, otherwise) => {
                for (test, body) in branches {
                    if self.eval(test, scope)?.is_true() {
                        return self.body(body, scope, out);
                    }
                }
                return self.body(otherwise, scope, out);
            }
            StmtKind::For(node) => {
                let iterable = self.eval(&node.iter, scope)?;
                self.for_each(node, &iterable, scope, 0, out)?;
            }
            StmtKind::With(values, body) => {
                let inner = Scope::new(Some(scope));
                for (target, value) in values {
                    let value = self.eval(value, scope)?;
                    self.assign(target, value, &inner)?;
                }
                return self.body(body, &inner, out);
            }
            StmtKind::Scope(body) => return self.body(body, &Scope::new(Some(scope)), out),
            StmtKind::Filter(filter, body) => {
                let value = self.filtered(filter, self.written(body, scope)?, scope)?;
                self.print(&value, out)?;
            }
            StmtKind::Macro(node) => {
                scope.set(node.id, self.macro_of(node, scope));
            }
            StmtKind::Call(node, call) => {
                let caller = self.macro_of(node, scope);
                let value = self.call_with(call, scope, Some(caller))?;
                self.print(&value, out)?;
            }
            StmtKind::Autoescape(is_on, body) => {
                let before = self.escapes.replace(self.eval(is_on, scope)?.is_true());
                let flow = self.body(body, &Scope::new(Some(scope)), out);
                self.escapes.set(before);
                return flow;
            }
            StmtKind::Do(expr) => drop(self.eval(expr, scope)?),
            StmtKind::Break => return Ok(Flow::Break),
            StmtKind::Continue => return Ok(Flow::Continue),
            StmtKind::Foreign(tag) => {
                return fail(format!(
                    "{{% {tag} %}} names another template; there is none"
                ));
            }
        }
        Ok(Flow::On)
    }

    /// What a body writes, as a value.
    fn written(&self, body: &Body, scope: &Rc<Scope>) -> R<Value> {
        let mut text = String::new();
        self.body(body, &Scope::new(Some(scope)), &mut text)?;
        Ok(self.markup(text))
    }

    fn print(&self, value: &Value, out: &mut String) -> R<()> {
        match value {
            Value::Str(text) if self.escapes.get() && !text.safe => {
                self.write(&html::escaped(self.host, &text.text), out)
            }
            Value::Str(text) => self.write(&text.text, out),
            Value::Undefined(_) => Ok(()),
            other => {
                let text = repr::repr(other)?;
                match self.escapes.get() {
                    true => self.write(&html::escaped(self.host, &text), out),
                    false => self.write(&text, out),
                }
            }
        }
    }

    /// What a block wrote: safe where texts are escaped.
    pub(crate) fn markup(&self, text: String) -> Value {
        match self.escapes.get() {
            true => Value::safe(text),
            false => Value::text(text),
        }
    }

    fn macro_of(&self, node: &Rc<MacroNode>, scope: &Rc<Scope>) -> Value {
        let mut closures = self.closures.borrow_mut();
        // A loop that defines macros makes a scope each time.
        if closures.last().is_none_or(|last| !Rc::ptr_eq(last, scope)) {
            closures.push(Rc::clone(scope));
        }
        Value::Macro(Rc::new(Macro {
            node: Rc::clone(node),
            scope: Rc::clone(scope),
        }))
    }

    pub(crate) fn assign(&self, target: &Target, value: Value, scope: &Rc<Scope>) -> R<()> {
        match target {
            Target::Name(name) => scope.set(*name, value),
            Target::Member(name, member) => match self.lookup(*name, scope) {
                Value::Namespace(members) => {
                    members.borrow_mut().insert_str(member, value);
                }
                _ => return fail("cannot assign attribute on non-namespace object"),
            },
            Target::Tuple(targets) => {
                let Ok(items) = value.items() else {
                    let name = value.type_name();
                    return fail(format!("cannot unpack non-iterable {name} object"));
                };
                let (n, wanted) = (items.len(), targets.len());
                if n > wanted {
                    return fail(format!("too many values to unpack (expected {wanted})"));
                }
                if n < wanted {
                    return fail(format!(
                        "not enough values to unpack (expected {wanted}, got {n})"
                    ));
                }
                for (target, item) in targets.iter().zip(items) {
                    self.assign(target, item, scope)?;
                }
            }
        }
        Ok(())
    }

    /// Goes through a loop.
    pub(crate) fn for_each(
        &self,
        node: &Rc<For>,
        iterable: &Value,
        scope: &Rc<Scope>,
        depth0: i64,
        out: &mut String,
    ) -> R<()> {
        let items = iterable.items()?;
        let length = match node.test {
            None => iterable.len(),
            Some(_) => None,
        };
        let state = Rc::new(Loop {
            node: Rc::clone(node),
            scope: Rc::clone(scope),
            rest: RefCell::new(items.into_iter()),
            length: Cell::new(length),
            index0: Cell::new(-1),
            depth0,
            after: RefCell::default(),
            current: RefCell::default(),
            before: RefCell::default(),
            changed: RefCell::default(),
        });
        // As Jinja's: `else` is for a loop none of whose turns came to its end, even if a `break`
        // or a `continue` is why.
        let mut has_ended_a_turn = false;
        while let Some(item) = self.advance(&state)? {
            self.step()?;
            let inner = Scope::new(Some(scope));
            self.assign(&node.target, item, &inner)?;
            if let Some(name) = self.loop_name {
                inner.set(name, Value::Loop(Rc::clone(&state)));
            }
            match self.body(&node.body, &inner, out)? {
                Flow::Break => break,
                Flow::Continue => {}
                Flow::On => has_ended_a_turn = true,
            }
        }
        if !has_ended_a_turn {
            self.body(&node.otherwise, &Scope::new(Some(scope)), out)?;
        }
        Ok(())
    }

    /// The next item of a loop, which becomes its current one.
    fn advance(&self, state: &Loop) -> R<Option<Value>> {
        let ahead = state.after.borrow_mut().take();
        let next = match ahead {
            Some(item) => Some(item),
            None => self.pull(state)?,
        };
        if let Some(item) = &next {
            state.index0.set(state.index0.get() + 1);
            let last = state.current.borrow_mut().replace(item.clone());
            *state.before.borrow_mut() = last;
        }
        Ok(next)
    }

    /// The next item that passes the loop's test.
    fn pull(&self, state: &Loop) -> R<Option<Value>> {
        loop {
            let Some(item) = state.rest.borrow_mut().next() else {
                return Ok(None);
            };
            let Some(test) = &state.node.test else {
                return Ok(Some(item));
            };
            self.step()?;
            let inner = Scope::new(Some(&state.scope));
            self.assign(&state.node.target, item.clone(), &inner)?;
            if self.eval(test, &inner)?.is_true() {
                return Ok(Some(item));
            }
        }
    }

    /// The item that comes next, which stays.
    pub(crate) fn peek(&self, state: &Loop) -> R<Option<Value>> {
        if let Some(item) = &*state.after.borrow() {
            return Ok(Some(item.clone()));
        }
        let next = self.pull(state)?;
        state.after.borrow_mut().clone_from(&next);
        Ok(next)
    }

    /// The length of what a loop goes through.
    pub(crate) fn loop_length(&self, state: &Loop) -> R<i128> {
        if let Some(length) = state.length.get() {
            return Ok(length as i128);
        }
        let mut rest = Vec::new();
        while let Some(item) = self.pull(state)? {
            rest.push(item);
        }
        let passed = usize::try_from(state.index0.get() + 1).unwrap_or(0);
        let length = passed + rest.len() + usize::from(state.after.borrow().is_some());
        // What was pulled has passed the test; it is not asked again.
        *state.rest.borrow_mut() = Vec::new().into_iter();
        let mut ahead = state.after.borrow_mut().take().into_iter().chain(rest);
        *state.after.borrow_mut() = ahead.next();
        *state.rest.borrow_mut() = ahead.collect::<Vec<_>>().into_iter();
        state.length.set(Some(length));
        Ok(length as i128)
    }

    /// `loop(items)`, of a loop that is recursive.
    pub(crate) fn recurse(&self, state: &Rc<Loop>, iterable: &Value) -> R<Value> {
        if !state.node.is_recursive {
            return fail("The loop must have the 'recursive' marker to be called recursively.");
        }
        let mut out = String::new();
        self.within(|| {
            let depth = state.depth0 + 1;
            self.for_each(&state.node, iterable, &state.scope, depth, &mut out)
        })?;
        Ok(self.markup(out))
    }

    /// Calls a macro.
    pub(crate) fn call_macro(&self, it: &Macro, mut args: Args) -> R<Value> {
        let node = &it.node;
        let name = node.name.as_deref().unwrap_or("None");
        let scope = Scope::new(Some(&it.scope));
        let mut given = std::mem::take(&mut args.positional).into_iter();
        let mut has_caller = false;
        for (id, parameter, default) in &node.parameters {
            has_caller |= &**parameter == "caller";
            let value = match given.next().or_else(|| args.take(parameter)) {
                Some(value) => value,
                None => match default {
                    // A default sees the parameters before it.
                    Some(default) => self.eval(default, &scope)?,
                    None => Value::undefined(format!("parameter '{parameter}' was not provided")),
                },
            };
            scope.set(*id, value);
        }
        if node.reads.caller && !has_caller {
            let caller = args.take("caller").filter(|caller| !caller.is_none());
            let caller = caller.unwrap_or_else(|| Value::undefined("No caller defined"));
            if let Some(id) = self.caller_name {
                scope.set(id, caller);
            }
        }
        match (node.reads.kwargs, self.kwargs_name) {
            (true, Some(id)) => {
                let mut members = Dict::default();
                for (name, value) in args.named {
                    members.insert_str(&name, value);
                }
                scope.set(id, Value::dict(members));
            }
            _ => {
                if let Some((unknown, _)) = args.named.first() {
                    return fail(format!(
                        "macro '{name}' takes no keyword argument '{unknown}'"
                    ));
                }
            }
        }
        let rest: Vec<Value> = given.collect();
        match (node.reads.varargs, self.varargs_name) {
            (true, Some(id)) => scope.set(id, Value::tuple(rest)),
            _ if !rest.is_empty() => {
                let most = node.parameters.len();
                return fail(format!(
                    "macro '{name}' takes not more than {most} argument(s)"
                ));
            }
            _ => {}
        }
        let mut out = String::new();
        self.within(|| self.body(&node.body, &scope, &mut out))?;
        Ok(self.markup(out))
    }

    /// Applies the filters of a block to what it wrote.
    fn filtered(&self, filter: &Expr, value: Value, scope: &Rc<Scope>) -> R<Value> {
        self.eval_on(filter, Some(value), scope)
    }
}
