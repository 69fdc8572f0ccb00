//! What can be seen in a template's text without executing it.
//!
//! What does not look like a template is left for the parser to refuse.

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
    /// Whether the text is searched in another one.
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
        /// Whatever is in a template, it is looked at without a panic.
        #[test]
        fn any_text_is_looked_at(text in "([{}%#'\"()|.\\-+=\\[\\] é\n\r]|raw|endraw|generation|x|\\.pop\\(){0,40}") {
            let _ = quoted(&text);
            let _ = takes_parts(&text);
        }
    }
}
