//! A line of the board: words, each in a style.

use console::{Style, measure_text_width, truncate_str};

/// Words in one style. They hold nothing that a terminal would obey.
#[derive(Debug, Clone)]
pub(crate) struct Span {
    text: String,
    style: Style,
}

impl Span {
    pub(crate) fn styled(text: impl Into<String>, style: Style) -> Span {
        let text = text.into();
        Span { text, style }
    }
}

impl From<&str> for Span {
    fn from(text: &str) -> Span {
        Span::styled(text, Style::new())
    }
}

impl From<String> for Span {
    fn from(text: String) -> Span {
        Span::styled(text, Style::new())
    }
}

/// A line of styled spans.
#[derive(Debug, Clone, Default)]
pub(crate) struct Line(Vec<Span>);

impl Line {
    pub(crate) fn styled(text: impl Into<String>, style: Style) -> Line {
        Line(vec![Span::styled(text, style)])
    }

    /// The words alone.
    pub(crate) fn text(&self) -> String {
        self.0.iter().map(|span| &*span.text).collect()
    }

    /// For a terminal: what does not fit the columns is left out. Without colours where the
    /// environment asks for none (`NO_COLOR`).
    pub(crate) fn painted(&self, columns: usize) -> String {
        let (mut painted, mut left) = (String::new(), columns);
        for span in &self.0 {
            let text = truncate_str(&span.text, left, "");
            left = left.saturating_sub(measure_text_width(&text));
            painted += &span.style.apply_to(text).to_string();
        }
        painted
    }
}

impl From<&str> for Line {
    fn from(text: &str) -> Line {
        Line(vec![text.into()])
    }
}

impl From<String> for Line {
    fn from(text: String) -> Line {
        Line(vec![text.into()])
    }
}

impl From<Vec<Span>> for Line {
    fn from(spans: Vec<Span>) -> Line {
        Line(spans)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn red(text: &str) -> Span {
        Span::styled(text, Style::new().red().force_styling(true))
    }

    #[test]
    fn what_does_not_fit_is_left_out() {
        let line = Line::from(vec![Span::from("ab"), red("cd"), Span::from("ef")]);
        assert_eq!(line.text(), "abcdef");
        let painted = [0, 1, 3, 5, 6, 100].map(|columns| line.painted(columns));
        let plain = painted.map(|line| console::strip_ansi_codes(&line).into_owned());
        assert_eq!(plain, ["", "a", "abc", "abcde", "abcdef", "abcdef"]);
        assert_eq!(line.painted(3), "ab\u{1b}[31mc\u{1b}[0m");
        // One that takes two columns has no half.
        assert_eq!(Line::from("a\u{6f22}b").painted(2), "a");
    }
}
