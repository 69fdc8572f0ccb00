//! How the board is drawn.
//!
//! A cell of a model's map is a segment (a part of a layer, an expert, the output head); of a model
//! with many segments, a group of neighbours.
//!
//! ```text
//! # resident   * resident and pinned   > in flight   @ in use   . absent   1-9 tenths resident
//! ```

use console::Style;
use rocmforge_client::proto::Word as _;
use rocmforge_client::proto::v1::{LiveRequest, Model, Segment, SegmentState};

use super::{Board, Sample};
use crate::human::{clean, percent, plural, size, span};
use crate::top::line::{Line, Span};

/// Lines of a model's map.
const MAP_LINES_MAX: usize = 4;
/// Requests that are shown.
const REQUESTS_MAX: usize = 20;
/// The last line of the screen.
pub(super) const HELP: &str =
    "up/down choose  p pin  P unpin  l preload  e evict  u unload  b budget  q quit";

impl Board {
    /// Lines of the board, `columns` wide, and the index of the chosen model's line.
    fn lines(&self, columns: usize) -> (Vec<Line>, Option<usize>) {
        let Some(sample) = &self.now else {
            return (vec![Line::from("no answer yet")], None);
        };
        let mut lines = self.head(sample, columns);
        let mut chosen = None;
        for (place, model) in sample.models.iter().enumerate() {
            let is_chosen = place == self.chosen;
            lines.push(Line::default());
            if is_chosen {
                chosen = Some(lines.len());
            }
            lines.extend(model_lines(sample, model, is_chosen, columns));
        }
        if sample.models.is_empty() {
            lines.push(Line::default());
            lines.push(Line::from("no models; `rocmforgectl load FILE` opens one"));
        }
        lines.extend(request_lines(&sample.status.requests));
        if !self.events.is_empty() {
            lines.push(Line::default());
            let events = self.events.iter().rev().cloned();
            lines.extend(events.map(Line::from));
        }
        (lines, chosen)
    }

    fn head(&self, sample: &Sample, columns: usize) -> Vec<Line> {
        let (status, total) = (&sample.status, sample.total());
        let device = status.device.as_ref().map_or("", |device| &device.name);
        let state = status.state().word().replace('_', " ");
        let up = span(status.uptime_ms);
        let title = format!(
            "rocmforged {}  {}  up {up}  {state}",
            clean(&status.version),
            clean(device)
        );
        let used = [
            ("weights", total.resident_bytes, Style::new().green()),
            ("in flight", total.in_flight_bytes, Style::new().yellow()),
            ("kv", total.kv_bytes, Style::new().blue()),
            ("prefix", total.prefix_bytes, Style::new().cyan()),
            ("scratch", total.scratch_bytes, Style::new().magenta()),
        ];
        let held: u64 = used.iter().map(|(_, bytes, _)| bytes).sum();
        let budget = sample.cache.budget_bytes;
        let width = columns.saturating_sub(2).min(60);
        let mut bar = vec![Span::from("[")];
        let mut filled = 0;
        for (_, bytes, colour) in &used {
            let cells = cells_of(*bytes, budget, width).min(width - filled);
            filled += cells;
            bar.push(Span::styled("=".repeat(cells), colour.clone()));
        }
        bar.push(Span::from(" ".repeat(width - filled)));
        bar.push(Span::from("]"));
        let parts: Vec<String> = used
            .iter()
            .map(|(name, bytes, _)| format!("{name} {}", size(*bytes)))
            .collect();
        let rate = self
            .upload_rate()
            .map_or("-".to_owned(), |rate| format!("{}/s", size(rate)));
        let mut lines = vec![
            Line::styled(title, Style::new().bold()),
            Line::from(format!(
                "memory {} of {} ({}), pinned {}",
                size(held),
                size(budget),
                percent(held, budget),
                size(total.pinned_bytes)
            )),
            Line::from(bar),
            Line::from(parts.join("  ")),
            Line::from(format!(
                "uploads {rate}  hits {}  evictions {}  requests {} running, {} queued",
                self.hit_ratio(),
                total.evictions,
                status.running,
                status.queue_depth
            )),
        ];
        if let Some(tier) = &sample.cache.host_tier {
            lines.push(Line::from(format!(
                "kv in host memory {} of {}  saved {}  restored {}  dropped {}",
                size(tier.bytes),
                size(tier.budget_bytes),
                tier.saved,
                tier.restored,
                tier.dropped
            )));
        }
        if let Some(wait) = &status.waits_for {
            lines.push(Line::styled(
                format!(
                    "waits for {} ({}) for {}",
                    clean(&wait.path),
                    clean(&wait.model),
                    span(wait.waited_ms)
                ),
                Style::new().red(),
            ));
        }
        lines
    }

    /// The last lines of the screen.
    fn foot(&self) -> [Line; 2] {
        let typed = self.typed.as_ref();
        let message = typed.map_or_else(
            || self.message.clone(),
            |typed| format!("budget, such as 8GiB or 80%, Enter sets it: {typed}_"),
        );
        [Line::from(message), Line::styled(HELP, Style::new().dim())]
    }

    /// The whole screen, `rows` lines of it, scrolled so that the chosen model is visible.
    pub(crate) fn rows(&self, columns: usize, rows: usize) -> Vec<Line> {
        let (mut lines, chosen) = self.lines(columns);
        let foot = rows.min(2);
        let body = rows - foot;
        let scroll = chosen.map_or(0, |at| (at + 1 + MAP_LINES_MAX).saturating_sub(body));
        lines.drain(..scroll.min(lines.len()));
        lines.resize_with(body, Line::default);
        lines.extend(self.foot().into_iter().take(foot));
        lines
    }

    /// The board as text, without the help for keys.
    pub(crate) fn as_text(&self, columns: usize, lines_max: usize) -> String {
        let (lines, _) = self.lines(columns);
        let mut text = String::new();
        for line in lines.iter().take(lines_max) {
            text += line.text().trim_end();
            text.push('\n');
        }
        text
    }
}

/// The requests that wait or run, a line each below their headings; nothing if there are none.
fn request_lines(requests: &[LiveRequest]) -> Vec<Line> {
    if requests.is_empty() {
        return Vec::new();
    }
    let row = |[id, state, tokens, rate, gap, age]: [&str; 6], whose: &str| {
        Line::from(format!(
            "{id:>7}  {state:<9}  {tokens:>13}  {rate:>8}  {gap:>9}  {age:>7}  {whose}"
        ))
    };
    let heads = ["REQUEST", "STATE", "TOKENS", "TOKENS/S", "LONG GAP", "AGE"];
    let mut lines = vec![Line::default(), row(heads, "MODEL, CLIENT")];
    let shown = requests.iter().take(REQUESTS_MAX).map(|request| {
        let computed = request.computed_tokens.min(request.prompt_tokens);
        let tokens = match request.generated_tokens {
            0 => format!("{computed} of {}", request.prompt_tokens),
            n => format!("{} + {n}", request.prompt_tokens),
        };
        let rate = request.tokens_per_s.map(|rate| format!("{rate:.1}"));
        let gap = request.longest_gap_ms.map(|ms| match ms < 10_000.0 {
            true => format!("{ms:.1} ms"),
            false => format!("{:.1} s", ms / 1e3),
        });
        let cells = [
            &*request.number.to_string(),
            &*clean(&request.state),
            &*tokens,
            rate.as_deref().unwrap_or("-"),
            gap.as_deref().unwrap_or("-"),
            &*span(request.age_ms),
        ];
        let whose = format!("{}, {}", clean(&request.model), clean(&request.client));
        row(cells, &whose)
    });
    lines.extend(shown);
    if let Some(more) = requests.len().checked_sub(REQUESTS_MAX).filter(|n| *n > 0) {
        lines.push(Line::from(format!(
            "and {}",
            plural(more as u64, "request")
        )));
    }
    lines
}

fn model_lines(sample: &Sample, model: &Model, is_chosen: bool, columns: usize) -> Vec<Line> {
    let usage = sample
        .cache
        .models
        .iter()
        .find(|usage| usage.name == model.name);
    let usage = usage.and_then(|usage| usage.usage).unwrap_or_default();
    let mark = if is_chosen { "> " } else { "  " };
    let text = format!(
        "{mark}{}  {} of {} ({})  {}  kv {}  hits {}",
        clean(&model.name),
        size(model.resident_bytes),
        size(model.weight_bytes),
        percent(model.resident_bytes, model.weight_bytes),
        plural(model.active_requests.into(), "request"),
        size(usage.kv_bytes),
        percent(usage.hits, usage.hits + usage.misses),
    );
    let style = match is_chosen {
        true => Style::new().bold(),
        false => Style::new(),
    };
    let mut lines = vec![Line::styled(text, style)];
    let width = columns.saturating_sub(4).max(8);
    let group = model.segments.len().div_ceil(width * MAP_LINES_MAX).max(1);
    let cells: Vec<Span> = model.segments.chunks(group).map(cell).collect();
    lines.extend(cells.chunks(width).map(|cells| {
        let mut spans = vec![Span::from("    ")];
        spans.extend_from_slice(cells);
        Line::from(spans)
    }));
    lines
}

/// Cells of a bar for `part`: at least one where it is not 0.
fn cells_of(part: u64, whole: u64, width: usize) -> usize {
    if part == 0 || whole == 0 {
        return 0;
    }
    let cells = (part as f64 / whole as f64 * width as f64).round();
    (cells as usize).max(1).min(width)
}

/// The cell of one segment or of a group. In a group, the state that needs attention wins: in
/// flight, in use, pinned; else a digit gives the tenths of it that are resident.
fn cell(segments: &[Segment]) -> Span {
    let resident = |segment: &&Segment| segment.state() == SegmentState::Resident;
    let is_in_flight = segments
        .iter()
        .any(|segment| segment.state() == SegmentState::Uploading);
    let is_in_use = segments
        .iter()
        .filter(resident)
        .any(|segment| segment.in_use);
    let is_pinned = segments
        .iter()
        .filter(resident)
        .any(|segment| segment.pinned);
    let count = segments.iter().filter(resident).count();
    let (text, colour) = if is_in_flight {
        (">".to_owned(), Style::new().yellow())
    } else if is_in_use {
        ("@".to_owned(), Style::new().white())
    } else if is_pinned {
        ("*".to_owned(), Style::new().cyan())
    } else if count == segments.len() {
        ("#".to_owned(), Style::new().green())
    } else if count == 0 {
        (".".to_owned(), Style::new().black().bright())
    } else {
        let tenths = (count * 10 / segments.len()).max(1);
        (tenths.to_string(), Style::new().green())
    };
    Span::styled(text, colour)
}
