//! From a template as it is written for Python's Jinja to one that minijinja
//! reads alike.
//!
//! - Line ends become `\n`, as Jinja's lexer makes them.
//! - `{% generation %}` and `{% endgeneration %}` mark the assistant's part
//!   for training and print their body; `if true` does the same.
//! - The line end behind `{% raw %}` is kept.
//! - `'...' % x`, Python's formatting, becomes a filter.
//! - Where lists are changed, those that get a name are [`lists`](super::lists)
//!   that can be.
//!
//! What does not look like a template is left for the parser to refuse.

/// The filter that `%` behind a string becomes.
pub(super) const PERCENT_FILTER: &str = "__percent";
/// The function whose list can be changed.
pub(super) const LIST_FUNCTION: &str = "__list";
/// What changes a list.
const CHANGES: [&str; 5] = [".append(", ".extend(", ".insert(", ".pop(", ".clear("];

/// Rewrites `text` for minijinja.
pub(super) fn prepare(text: &str) -> String {
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(text.len() + 64);
    let mut rest = text.as_str();
    let changes_lists = CHANGES.iter().any(|change| text.contains(change));
    while let Some(open) = next_tag(rest) {
        let (before, tag) = rest.split_at(open + 2);
        out.push_str(before);
        rest = match before.as_bytes().last() {
            Some(b'#') => copy_through(tag, "#}", &mut out),
            Some(b'%') => match raw_tag(tag, "raw") {
                Some(len) => copy_raw(tag, len, &mut out),
                None => copy_expression(tag, "%}", changes_lists, &mut out),
            },
            _ => copy_expression(tag, "}}", changes_lists, &mut out),
        };
    }
    out.push_str(rest);
    out
}

/// True if the template goes through the parts of a message's content; others
/// expect a text.
pub(super) fn takes_parts(text: &str) -> bool {
    // Names that stand for the content, as Kimi K2's `set c = msg.get('content')`.
    let names: Vec<&str> = statements(text)
        .filter_map(|inner| inner.strip_prefix("set ")?.split_once('='))
        .filter(|(_, value)| is_content(value))
        .map(|(name, _)| name.trim())
        .collect();
    statements(text)
        .filter_map(|inner| inner.strip_prefix("for ")?.split_once(" in "))
        .any(|(_, list)| {
            // What counts pieces of a text, or splits one, is not about parts.
            let of_text = list.contains("range(") || list.contains(".split(");
            !of_text && (list.contains("content") || starts_with_any(list, &names))
        })
}

/// A text in quotes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Quoted {
    /// As it is meant.
    pub(super) text: String,
    /// Whether it is looked for in another one.
    pub(super) is_compared: bool,
}

/// The texts that a template has in quotes.
pub(super) fn quoted(text: &str) -> Vec<Quoted> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(open) = next_tag(rest) {
        let (before, tag) = rest.split_at(open + 2);
        let close = match before.as_bytes().last() {
            Some(b'#') => {
                rest = tag.split_once("#}").map_or("", |(_, behind)| behind);
                continue;
            }
            Some(b'%') => "%}",
            _ => "}}",
        };
        let (inner, behind) = tag.split_at(expression_len(tag, close).unwrap_or(tag.len()));
        rest = behind;
        let mut inner = inner;
        while let Some(at) = inner.find(['\'', '"']) {
            let Some(len) = string_len(&inner[at..]) else {
                break;
            };
            let (before, behind) = (inner[..at].trim_end(), &inner[at + len..]);
            found.push(Quoted {
                text: unescaped(&inner[at + 1..at + len - 1]),
                is_compared: is_compared(before, behind.trim_start()),
            });
            inner = behind;
        }
    }
    found
}

/// Whether what stands between these is compared with a text, or looked for in it.
fn is_compared(before: &str, behind: &str) -> bool {
    let operators = ["in ", "not in ", "in(", "==", "!="];
    let methods = [
        "startswith",
        "endswith",
        "split",
        "find",
        "index",
        "replace",
        "count",
        "partition",
        "removeprefix",
        "removesuffix",
    ];
    let call = before.strip_suffix('(').map(str::trim_end);
    operators
        .iter()
        .any(|operator| behind.starts_with(operator))
        || before.ends_with("==")
        || before.ends_with("!=")
        || call.is_some_and(|call| methods.iter().any(|method| call.ends_with(method)))
}

/// The text that a string literal means, but for escapes by numbers.
fn unescaped(literal: &str) -> String {
    let mut out = String::with_capacity(literal.len());
    let mut chars = literal.chars();
    while let Some(c) = chars.next() {
        out.extend(match c {
            '\\' => match chars.next() {
                Some('n') => Some('\n'),
                Some('r') => Some('\r'),
                Some('t') => Some('\t'),
                other => other,
            },
            c => Some(c),
        });
    }
    out
}

/// What is in the tags of statements.
fn statements(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        rest = &rest[rest.find("{%")? + 2..];
        let inner = &rest[..rest.find("%}").unwrap_or(rest.len())];
        Some(inner.trim_start_matches(['-', '+']).trim_start())
    })
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// True if `list` is one of the names, whatever filters or conditions follow.
fn starts_with_any(list: &str, names: &[&str]) -> bool {
    let list = list.trim_start();
    let len = list.find(|c| !is_name(c)).unwrap_or(list.len());
    let (name, behind) = list.split_at(len);
    names.contains(&name) && !behind.starts_with(['.', '('])
}

/// True if `value` is the content of a message as it is, or that or something else.
fn is_content(value: &str) -> bool {
    let value = value.trim_matches(['-', '+', ' ', '\t', '\n']);
    // `message`, `messages[0]`, `loop.previtem`.
    let path = |c: char| is_name(c) || matches!(c, '.' | '[' | ']' | '-');
    let end = value.find(|c| !path(c)).unwrap_or(value.len());
    let (read, behind) = value.split_at(end);
    let behind = if read.ends_with('[') {
        content_key(behind).and_then(|behind| behind.strip_prefix(']'))
    } else if read.ends_with(".get") {
        // What there is without content does not matter.
        let behind = behind.strip_prefix('(').and_then(content_key);
        behind.and_then(|behind| Some(behind.split_once(')')?.1))
    } else if read == "content" || read.ends_with(".content") {
        Some(behind)
    } else {
        None
    };
    behind.is_some_and(|behind| {
        let behind = behind.trim_start();
        let filter = behind.strip_prefix('|').map(str::trim_start);
        behind.is_empty()
            || behind.starts_with("if ")
            || behind.starts_with("or ")
            || filter.is_some_and(|filter| filter.starts_with("default"))
    })
}

/// What follows the name of the content as a string literal.
fn content_key(text: &str) -> Option<&str> {
    let quoted = |quote| {
        text.strip_prefix(quote)?
            .strip_prefix("content")?
            .strip_prefix(quote)
    };
    quoted('\'').or_else(|| quoted('"'))
}

/// Byte at which the next tag opens.
fn next_tag(text: &str) -> Option<usize> {
    text.as_bytes()
        .windows(2)
        .position(|pair| matches!(pair, b"{{" | b"{%" | b"{#"))
}

/// Copies up to and with `end`, or everything; returns what is left.
fn copy_through<'t>(text: &'t str, end: &str, out: &mut String) -> &'t str {
    let len = text.find(end).map_or(text.len(), |at| at + end.len());
    out.push_str(&text[..len]);
    &text[len..]
}

/// Bytes of a tag that is only `name`, from behind its `{%` to behind its `%}`.
fn raw_tag(text: &str, name: &str) -> Option<usize> {
    let inner = text.trim_start_matches(['-', '+']).trim_start();
    let inner = inner.strip_prefix(name)?.trim_start();
    let inner = inner.strip_prefix(['-', '+']).unwrap_or(inner);
    Some(text.len() - inner.strip_prefix("%}")?.len())
}

/// Copies a raw block, whose first tag has `len` bytes.
fn copy_raw<'t>(text: &'t str, len: usize, out: &mut String) -> &'t str {
    out.push_str(&text[..len]);
    let body = &text[len..];
    if body.starts_with('\n') && !text[..len - 2].ends_with(['-', '+']) {
        // minijinja takes one line end; Jinja takes none.
        out.push('\n');
    }
    let mut at = 0;
    while let Some(open) = body[at..].find("{%") {
        at += open + 2;
        if let Some(end) = raw_tag(&body[at..], "endraw") {
            out.push_str(&body[..at + end]);
            return &body[at + end..];
        }
    }
    out.push_str(body);
    ""
}

/// Copies an expression or a statement with the `close` behind it.
fn copy_expression<'t>(
    text: &'t str,
    close: &str,
    changes_lists: bool,
    out: &mut String,
) -> &'t str {
    let Some(len) = expression_len(text, close) else {
        out.push_str(text);
        return "";
    };
    let (inner, rest) = text.split_at(len);
    match inner.trim_matches(['-', '+', ' ', '\t', '\n']) {
        "generation" if close == "%}" => out.push_str(&inner.replace("generation", "if true")),
        "endgeneration" if close == "%}" => {
            out.push_str(&inner.replace("endgeneration", "endif"));
        }
        _ if changes_lists => copy_with_percent(&with_lists(inner), out),
        _ => copy_with_percent(inner, out),
    }
    out.push_str(close);
    &rest[close.len()..]
}

/// Bytes before the `close` that ends an expression: not within brackets or a
/// string.
fn expression_len(text: &str, close: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let (mut at, mut depth) = (0, 0usize);
    while at < bytes.len() {
        if depth == 0 && text.is_char_boundary(at) && text[at..].starts_with(close) {
            return Some(at);
        }
        at += match bytes[at] {
            b'\'' | b'"' => string_len(&text[at..])?,
            b'(' | b'[' | b'{' => {
                depth += 1;
                1
            }
            b')' | b']' | b'}' => {
                depth = depth.saturating_sub(1);
                1
            }
            _ => 1,
        };
    }
    None
}

/// Bytes of the string literal that `text` begins with.
fn string_len(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let quote = bytes.first()?;
    let mut at = 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            byte if byte == *quote => return Some(at + 1),
            _ => at += 1,
        }
    }
    None
}

/// With calls of [`LIST_FUNCTION`] around the lists that get a name: behind a single `=`.
fn with_lists(inner: &str) -> String {
    let bytes = inner.as_bytes();
    let mut out = String::with_capacity(inner.len() + 16);
    let (mut copied, mut at) = (0, 0);
    while at < bytes.len() {
        let len = match bytes[at] {
            b'\'' | b'"' => string_len(&inner[at..]),
            b'[' if is_named(&inner[..at]) => bracket_len(&inner[at..]),
            _ => Some(1),
        };
        let Some(len) = len else {
            break;
        };
        if bytes[at] == b'[' && len > 1 {
            out.push_str(&inner[copied..at]);
            out.push_str(LIST_FUNCTION);
            out.push('(');
            out.push_str(&inner[at..at + len]);
            out.push(')');
            copied = at + len;
        }
        at += len;
    }
    out.push_str(&inner[copied..]);
    out
}

/// True behind the `=` of an assignment or an argument.
fn is_named(before: &str) -> bool {
    let name = before.trim_end().strip_suffix('=');
    name.is_some_and(|name| !name.ends_with(['=', '!', '<', '>']))
}

fn copy_with_percent(inner: &str, out: &mut String) {
    let bytes = inner.as_bytes();
    let (mut copied, mut at) = (0, 0);
    while at < bytes.len() {
        if !matches!(bytes[at], b'\'' | b'"') {
            at += 1;
            continue;
        }
        let Some(len) = string_len(&inner[at..]) else {
            break;
        };
        at += len;
        let behind = inner[at..].trim_start();
        let Some(operand) = behind.strip_prefix('%') else {
            continue;
        };
        let Some(len) = operand_len(operand) else {
            continue;
        };
        out.push_str(&inner[copied..at]);
        out.push('|');
        out.push_str(PERCENT_FILTER);
        out.push('(');
        out.push_str(operand[..len].trim());
        out.push(')');
        at = inner.len() - operand.len() + len;
        copied = at;
    }
    out.push_str(&inner[copied..]);
}

/// Bytes of the operand of `%`: a value with its members, calls and filters.
fn operand_len(text: &str) -> Option<usize> {
    let name = |text: &str| {
        text.find(|c: char| !c.is_alphanumeric() && c != '_')
            .unwrap_or(text.len())
    };
    let mut at = text.len() - text.trim_start().len();
    at += match *text.as_bytes().get(at)? {
        b'\'' | b'"' => string_len(&text[at..])?,
        b'(' | b'[' | b'{' => bracket_len(&text[at..])?,
        _ => match name(&text[at..]) {
            0 => return None,
            len => len,
        },
    };
    loop {
        let rest = &text[at..];
        let filter = rest.trim_start().strip_prefix('|').map(str::trim_start);
        at += match (rest.as_bytes().first(), filter) {
            (Some(b'('), _) | (Some(b'['), _) => bracket_len(rest)?,
            (Some(b'.'), _) => 1 + name(&rest[1..]),
            (_, Some(filter)) => rest.len() - filter.len() + name(filter),
            _ => return Some(at),
        };
    }
}

/// Bytes of the brackets that `text` begins with, and of what is in them.
fn bracket_len(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let (mut at, mut depth) = (0, 0usize);
    while at < bytes.len() {
        at += match bytes[at] {
            b'\'' | b'"' => string_len(&text[at..])?,
            b'(' | b'[' | b'{' => {
                depth += 1;
                1
            }
            b')' | b']' | b'}' if depth == 1 => return Some(at + 1),
            b')' | b']' | b'}' => {
                depth -= 1;
                1
            }
            _ => 1,
        };
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn generation_tags_become_true_conditions() {
        assert_eq!(
            prepare("{% if a %}{%- generation -%}x{% endgeneration %}{{ generation }}{% endif %}"),
            "{% if a %}{%- if true -%}x{% endif %}{{ generation }}{% endif %}"
        );
        assert_eq!(prepare("a {% b"), "a {% b");
    }

    #[test]
    fn formatting_with_percent_becomes_a_filter() {
        for (text, expected) in [
            (
                "{{ 'a%s' % x.y[0](1)|e ~ 'b' }}",
                "{{ 'a%s'|__percent(x.y[0](1)|e) ~ 'b' }}",
            ),
            (
                "{% set a = '%d-%s' % (1, \")\") %}",
                "{% set a = '%d-%s'|__percent((1, \")\")) %}",
            ),
            (
                "{{ 'a' }}{% if b == 'c' %}{{ 7 % 2 }}",
                "{{ 'a' }}{% if b == 'c' %}{{ 7 % 2 }}",
            ),
            ("{{ 'é' % 'ü' }}", "{{ 'é'|__percent('ü') }}"),
            ("{% set a = 'b'%}%s", "{% set a = 'b'%}%s"),
        ] {
            assert_eq!(prepare(text), expected);
        }
    }

    #[test]
    fn lists_that_get_a_name_can_change_where_any_does() {
        let text = "{% set a = ['[', [1]] %}{{ f(x=[], y==[1])[0] ~ '=[' }}{{ a[0] }}";
        assert_eq!(prepare(text), text);
        assert_eq!(
            prepare(&format!("{text}{{% set _ = a.append(1) %}}")),
            "{% set a = __list(['[', [1]]) %}{{ f(x=__list([]), y==[1])[0] ~ '=[' }}{{ a[0] }}{% set _ = a.append(1) %}"
        );
        for text in ["{{ a=[ }}", "{{ a=[' }}", "{{ =[]] }}"] {
            let _ = prepare(&format!("{text}{{{{ a.pop() }}}}"));
        }
    }

    #[test]
    fn raw_blocks_and_comments_are_left_alone() {
        let text = "{# {{ 'a' % b #}{%- raw %}{{ 'a' % b }}{% generation %}{% endraw -%}\n";
        assert_eq!(prepare(text), text);
        assert_eq!(
            prepare("{% raw %}\r\na{% endraw %}"),
            "{% raw %}\n\na{% endraw %}"
        );
        assert_eq!(
            prepare("{% raw -%}\na{% endraw %}"),
            "{% raw -%}\na{% endraw %}"
        );
    }

    #[test]
    fn templates_that_go_through_parts() {
        assert!(takes_parts("{%- for part in message['content'] if part %}"));
        assert!(takes_parts("{% for p in message.content %}"));
        assert!(!takes_parts(
            "{% for m in messages %}{{ m.content }}{% if 'a' in content %}"
        ));
        assert!(!takes_parts(
            "{% for i in range(1, content_parts|length) %}{% for t in content.split('x') %}"
        ));
        for value in [
            "m.content",
            "m['content']",
            "messages[0][\"content\"]",
            "msg.get('content')",
            "m.get('content', '')",
            "content",
            "m.content or ''",
            "m['content'] if m['content'] else []",
            "m.content | default('')",
        ] {
            for list in ["c", "c if p", "c|list", "c -"] {
                let text = format!("{{%- set c = {value} -%}}{{% for p in {list}%}}{{% endfor %}}");
                assert!(takes_parts(&text), "{text}");
            }
            let others =
                format!("{{% set c = {value} %}}{{% for p in cs %}}{{% for p in c.split() %}}");
            assert!(!takes_parts(&others), "{others}");
        }
        for value in [
            "m.content.split('x')",
            "m.content|trim",
            "m.content ~ 'x'",
            "m.content[1:]",
            "m.reasoning_content",
            "m.get('reasoning_content')",
            "[{'role': 'system', 'content': x}] + messages",
            "'content' in m",
            "m['contents']",
            "m.content is string",
        ] {
            let text = format!("{{% set c = {value} %}}{{% for p in c %}}{{% endfor %}}");
            assert!(!takes_parts(&text), "{text}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        /// Whatever is in a template, it is rewritten without a panic, and
        /// text outside of tags stays.
        #[test]
        fn any_text_is_rewritten(text in "([{}%#'\"()|.\\-+=\\[\\] é\n\r]|raw|endraw|generation|x|\\.pop\\(){0,40}") {
            let _ = prepare(&text);
            let _ = takes_parts(&text);
        }
    }
}
