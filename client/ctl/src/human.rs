//! Numbers and tables for people.

/// Bytes in the unit that fits: "2.00 GiB", "512.0 MiB", "12.0 KiB", "7 B".
pub(crate) fn size(bytes: u64) -> String {
    const KIB: f64 = 1024.0;
    let b = bytes as f64;
    if bytes >= 1 << 30 {
        format!("{:.2} GiB", b / (KIB * KIB * KIB))
    } else if bytes >= 1 << 20 {
        format!("{:.1} MiB", b / (KIB * KIB))
    } else if bytes >= 1 << 10 {
        format!("{:.1} KiB", b / KIB)
    } else {
        format!("{bytes} B")
    }
}

/// A count in the unit that fits: "1.24 B", "5.01 M", "12.3 K", "999".
pub(crate) fn count(n: u64) -> String {
    let x = n as f64;
    match n {
        1_000_000_000.. => format!("{:.2} B", x / 1e9),
        1_000_000.. => format!("{:.2} M", x / 1e6),
        10_000.. => format!("{:.1} K", x / 1e3),
        _ => n.to_string(),
    }
}

/// A span of time in its two largest units: "2d 3h", "1h 2m", "4m 5s", "6s".
pub(crate) fn span(ms: u64) -> String {
    let s = ms / 1000;
    let (d, h, m) = (s / 86_400, s / 3600 % 24, s / 60 % 60);
    match (d, h, m) {
        (0, 0, 0) => format!("{s}s"),
        (0, 0, _) => format!("{m}m {}s", s % 60),
        (0, _, _) => format!("{h}h {m}m"),
        _ => format!("{d}d {h}h"),
    }
}

/// Part of a whole in percent, "-" where there is no whole.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".to_owned();
    }
    format!("{:.1} %", part as f64 / whole as f64 * 100.0)
}

/// "1 segment", "2 segments".
pub(crate) fn plural(n: u64, noun: &str) -> String {
    let s = if n == 1 { "" } else { "s" };
    format!("{n} {noun}{s}")
}

/// Token bytes on one line: quoted, bytes that are no UTF-8 as U+FFFD.
pub(crate) fn piece(bytes: &[u8]) -> String {
    format!("{:?}", String::from_utf8_lossy(bytes))
}

/// Whether a terminal would interpret the character: control characters, line breaks, directional
/// marks.
pub(crate) fn is_obeyed(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Text from outside on one line: what a terminal would obey (escape sequences, line breaks, marks
/// of direction) is shown as an escape.
pub(crate) fn clean(text: &str) -> String {
    if !text.contains(is_obeyed) {
        return text.to_owned();
    }
    let shown = |c: char| match is_obeyed(c) {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    text.chars().map(shown).collect()
}

/// Generated text for a terminal: what it would obey is shown, but for line breaks and tabs.
pub(crate) fn clean_lines(text: &str) -> String {
    let obeyed = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(obeyed) {
        return text.to_owned();
    }
    let shown = |c: char| match obeyed(c) {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    text.chars().map(shown).collect()
}

/// How the cells of a column are set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

/// A table with a heading, columns apart by two spaces.
#[derive(Debug)]
pub(crate) struct Table {
    align: Vec<Align>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these columns and no rows.
    pub(crate) fn new<const N: usize>(columns: [(&str, Align); N]) -> Table {
        Table {
            align: columns.iter().map(|(_, align)| *align).collect(),
            rows: vec![columns.iter().map(|(name, _)| (*name).to_owned()).collect()],
        }
    }

    /// Appends a row, which has as many cells as there are columns.
    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        assert_eq!(N, self.align.len(), "a row has a cell for each column");
        self.rows
            .push(cells.iter().map(|cell| clean(cell)).collect());
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let width = |column: usize| {
            let widths = self.rows.iter().map(|row| row[column].chars().count());
            widths.max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.align.len()).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, align), width) in row.iter().zip(&self.align).zip(&widths) {
                match align {
                    Align::Left => line.push_str(&format!("{cell:<width$}  ")),
                    Align::Right => line.push_str(&format!("{cell:>width$}  ")),
                }
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Names and values, the values in one column.
pub(crate) fn fields(fields: &[(&str, String)]) -> String {
    let width = fields.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    fields
        .iter()
        .map(|(name, value)| format!("{name:<width$}  {}\n", clean(value)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_take_the_unit_that_fits() {
        assert_eq!(size(0), "0 B");
        assert_eq!(size(1023), "1023 B");
        assert_eq!(size(1536), "1.5 KiB");
        assert_eq!(size(512 << 20), "512.0 MiB");
        assert_eq!(size(2 << 30), "2.00 GiB");
        assert_eq!(count(9_999), "9999");
        assert_eq!(count(5_012_345), "5.01 M");
        assert_eq!(count(1_235_814_432), "1.24 B");
        assert_eq!(span(999), "0s");
        assert_eq!(span(245_000), "4m 5s");
        assert_eq!(span(3_723_000), "1h 2m");
        assert_eq!(span(183_600_000), "2d 3h");
        assert_eq!(percent(3, 4), "75.0 %");
        assert_eq!(percent(0, 0), "-");
    }

    #[test]
    fn what_a_terminal_would_obey_is_shown() {
        let title = "\u{1b}]0;owned\u{7}\nfake: line\u{202e}";
        assert_eq!(clean(title), "\\u{1b}]0;owned\\u{7}\\nfake: line\\u{202e}");
        assert_eq!(fields(&[("title", title.into())]).lines().count(), 1);
        let mut table = Table::new([("NAME", Align::Left)]);
        table.row([title.to_owned()]);
        assert_eq!(table.to_string().lines().count(), 2);
        assert_eq!(clean("h\u{e9}llo"), "h\u{e9}llo");
        assert_eq!(clean_lines("a\n\tb\u{1b}[2Jc\r"), "a\n\tb\\u{1b}[2Jc\\r");
    }

    #[test]
    fn columns_are_aligned_and_lines_end_clean() {
        let mut table = Table::new([
            ("NAME", Align::Left),
            ("SIZE", Align::Right),
            ("S", Align::Left),
        ]);
        table.row(["é".into(), "1".into(), "x".into()]);
        table.row(["longer".into(), "12345".into(), String::new()]);
        assert_eq!(
            table.to_string(),
            "NAME     SIZE  S\né           1  x\nlonger  12345\n"
        );
        assert_eq!(
            fields(&[("a", "1".into()), ("long", "2".into())]),
            "a     1\nlong  2\n"
        );
    }
}
