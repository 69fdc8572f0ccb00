//! The whole terminal: its mode, what is drawn on it, and the keys that come from it.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::sync::{Mutex, Once, PoisonError};

use console::Term;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use nix::unistd::read;

use super::line::Line;

/// Begins the alternate screen, without a cursor. Letters that are wider than known end at its
/// edge: lines that did not change are not drawn again.
const BEGIN: &str = "\u{1b}[?1049h\u{1b}[?25l\u{1b}[?7l\u{1b}[2J";
/// Puts back what was on the terminal before.
const END: &str = "\u{1b}[?7h\u{1b}[?25h\u{1b}[?1049l";
/// How long the rest of an escape sequence may take, before its beginning is the key Esc.
const REST_MS: u8 = 25;
/// Bytes of keys that are read at once.
const KEYS_BYTES: usize = 256;

/// The terminal's mode before it was raw; nothing while it is as it was.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// Restores the terminal, if it is not as it was.
fn restore() {
    let before = BEFORE.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(before) = before else { return };
    // Where the terminal is gone, nobody sees what is left on it.
    let _ = tcsetattr(io::stdin(), SetArg::TCSANOW, &before);
    let _ = write(END);
}

fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// The terminal in raw mode, with the alternate screen, until it is dropped or the program panics.
pub(super) struct Screen {
    size: (usize, usize),
    /// The lines that are on the screen.
    shown: Vec<String>,
}

impl Screen {
    pub(super) fn open() -> io::Result<Screen> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let print = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                restore();
                print(panic);
            }));
        });
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        *BEFORE.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
        let screen = Screen {
            size: (0, 0),
            shown: Vec::new(),
        };
        tcsetattr(io::stdin(), SetArg::TCSANOW, &raw)?;
        write(BEGIN)?;
        Ok(screen)
    }

    /// Draws the lines that `lines` makes for a number of columns and rows. Written is what is not
    /// on the screen yet.
    pub(super) fn draw(&mut self, lines: impl FnOnce(usize, usize) -> Vec<Line>) -> io::Result<()> {
        // A terminal without a size, such as that of a serial line, is taken for a usual one.
        let size = Term::stdout().size_checked().unwrap_or((24, 80));
        let (rows, columns) = (size.0.into(), size.1.into());
        let mut out = String::new();
        if self.size != (rows, columns) {
            self.size = (rows, columns);
            self.shown.clear();
            out.push_str("\u{1b}[2J");
        }
        let lines = lines(columns, rows);
        let lines: Vec<_> = lines.iter().map(|line| line.painted(columns)).collect();
        out += &changed(&self.shown, &lines);
        self.shown = lines;
        write(&out)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

/// Writes the lines that are others than before. A line is cleared before its words are written:
/// behind words up to the last column, clearing would take the last of them.
fn changed(shown: &[String], lines: &[String]) -> String {
    let mut out = String::new();
    for (row, line) in lines.iter().enumerate() {
        if shown.get(row) != Some(line) {
            // Writing to a String does not fail.
            let _ = write!(out, "\u{1b}[{};1H\u{1b}[2K{line}", row + 1);
        }
    }
    out
}

/// A key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Key {
    Char(char),
    Up,
    Down,
    Enter,
    Esc,
    Backspace,
    /// Ctrl-C, which is no signal in raw mode.
    Interrupt,
}

/// The keys that come within a time; none where the time is over.
///
/// # Errors
/// Where the terminal is gone.
pub(super) fn read_keys(within_ms: u16) -> io::Result<Vec<Key>> {
    let mut bytes = Vec::new();
    let mut within = PollTimeout::from(within_ms);
    loop {
        let stdin = io::stdin();
        let mut asked = [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
        // A signal, such as that of a new size, ends the wait as its time does.
        let ready = poll(&mut asked, within);
        if matches!(ready, Ok(0) | Err(Errno::EINTR)) {
            return Ok(keys(&bytes).0);
        }
        ready?;
        let mut more = [0; KEYS_BYTES];
        // Not by the buffer of `Stdin`, in which bytes would lie that no poll knows of.
        let length = match read(&stdin, &mut more)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            length => length,
        };
        bytes.extend_from_slice(&more[..length]);
        if keys(&bytes).1 || bytes.len() >= KEYS_BYTES {
            return Ok(keys(&bytes).0);
        }
        within = PollTimeout::from(REST_MS);
    }
}

/// The keys that these bytes are, and whether the last one is whole. Keys that mean nothing here
/// are left out.
fn keys(bytes: &[u8]) -> (Vec<Key>, bool) {
    let (mut keys, mut rest) = (Vec::new(), bytes);
    while let Some((&first, behind)) = rest.split_first() {
        rest = behind;
        match first {
            0x1b => {
                let length = sequence(rest);
                match rest.get(..length.unwrap_or(rest.len())) {
                    Some([b'[' | b'O', .., b'A']) => keys.push(Key::Up),
                    Some([b'[' | b'O', .., b'B']) => keys.push(Key::Down),
                    // With Alt, a letter has an escape before it, and means nothing here.
                    Some([]) if matches!(rest.first(), Some(0x20..0x7f)) => rest = &rest[1..],
                    Some([]) | None => keys.push(Key::Esc),
                    Some(_) => {}
                }
                let Some(length) = length else {
                    return (keys, false);
                };
                rest = &rest[length..];
            }
            0x03 => keys.push(Key::Interrupt),
            b'\r' | b'\n' => keys.push(Key::Enter),
            0x08 | 0x7f => keys.push(Key::Backspace),
            0x20..0x7f => keys.push(Key::Char(char::from(first))),
            // Neither a budget nor a key of the board has others.
            _ => {}
        }
    }
    (keys, true)
}

/// The length of the escape sequence that these bytes behind an escape begin with: 0 where they
/// begin with none, nothing where its end is still to come.
fn sequence(bytes: &[u8]) -> Option<usize> {
    match bytes.first()? {
        b'[' => {
            let end = bytes[1..]
                .iter()
                .position(|byte| matches!(byte, 0x40..=0x7e))?;
            Some(end + 2)
        }
        b'O' => (bytes.len() >= 2).then_some(2),
        _ => Some(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_told_from_the_bytes_that_terminals_send() {
        use Key::{Backspace, Char, Down, Enter, Esc, Interrupt, Up};
        for (bytes, expected) in [
            (&b"pP"[..], &[Char('p'), Char('P')][..]),
            (
                b"b8%\x7f\r",
                &[Char('b'), Char('8'), Char('%'), Backspace, Enter],
            ),
            (b"\x1b[A\x1b[B\x1bOA\x1bOB", &[Up, Down, Up, Down]),
            (b"\x1b[1;5Aj", &[Up, Char('j')]),
            // Home, F5 and a paste's marks are no keys of the board.
            (b"\x1b[H\x1b[15~\x1b[200~q", &[Char('q')]),
            (b"\x03", &[Interrupt]),
            (b"\x1b\x1b[B", &[Esc, Down]),
            (b"\x1bqj", &[Char('j')]),
            (b"\0\x01\xc3\xbc\xff", &[]),
            (b"", &[]),
        ] {
            assert_eq!(keys(bytes), (expected.to_vec(), true), "{bytes:?}");
        }
        // What is not whole is waited for, and an escape alone is a key.
        for (bytes, expected) in [
            (&b"a\x1b"[..], &[Char('a'), Esc][..]),
            (b"\x1b[", &[]),
            (b"\x1b[1;", &[]),
            (b"\x1bO", &[]),
        ] {
            assert_eq!(keys(bytes), (expected.to_vec(), false), "{bytes:?}");
        }
    }

    #[test]
    fn lines_that_are_shown_are_not_written_again() {
        let [a, b, c] = ["a", "b", "c"].map(str::to_owned);
        let first = changed(&[], &[a.clone(), b.clone()]);
        assert_eq!(first, "\u{1b}[1;1H\u{1b}[2Ka\u{1b}[2;1H\u{1b}[2Kb");
        let shown = [a.clone(), b];
        assert_eq!(changed(&shown, &[a.clone(), c]), "\u{1b}[2;1H\u{1b}[2Kc");
        assert_eq!(changed(&shown, &shown), "");
        assert_eq!(changed(&shown, &[a]), "");
    }
}
