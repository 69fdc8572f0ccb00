//! One table of figures, as markdown or JSON, under the device, the commit and the ceilings.

use std::io::{self, Write};

use rocmforge_engine::api::DeviceStatus;
use serde::Serialize;

use crate::check::Check;
use crate::goal::Goal;

/// Where bounds and llama.cpp's figures come from.
const GOALS: &str = "Medians. Must and aim were set for one NVIDIA H200; llama.cpp's figures are of one, of November 2026, \
                     not of this run. A ratio above 1 is in our favour.";

/// Median and extremes of repeated measurements.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
    pub(crate) runs: usize,
}

impl Spread {
    /// # Panics
    /// If there is no figure.
    pub(crate) fn of(figures: &[f64]) -> Self {
        let mut sorted = figures.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (&min, &max) = sorted
            .first()
            .zip(sorted.last())
            .expect("something was measured");
        let half = sorted.len() / 2;
        let median = if sorted.len().is_multiple_of(2) {
            (sorted[half - 1] + sorted[half]) / 2.0
        } else {
            sorted[half]
        };
        Self {
            median,
            min,
            max,
            runs: sorted.len(),
        }
    }
}

/// A line of the table.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Row {
    pub(crate) model: String,
    pub(crate) figure: String,
    pub(crate) unit: &'static str,
    #[serde(flatten)]
    pub(crate) value: Spread,
    /// Part of the machine's ceiling, where it has one for this figure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ceiling_share: Option<f64>,
    /// Which ceiling that is, where there are several.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub(crate) ceiling: &'static str,
    /// What the figure is judged by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) goal: Option<Goal>,
    /// The same figure of llama.cpp, and how this one stands to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) llama_cpp: Option<Compared>,
}

/// llama.cpp's figure beside ours.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Compared {
    #[serde(flatten)]
    pub(crate) value: Spread,
    /// The options that gave it.
    pub(crate) options: String,
    /// Our median over its, or its over ours where less is better.
    pub(crate) ratio: f64,
}

impl Row {
    pub(crate) fn new(
        model: &str,
        figure: impl Into<String>,
        unit: &'static str,
        figures: &[f64],
    ) -> Self {
        Self {
            model: model.to_owned(),
            figure: figure.into(),
            unit,
            value: Spread::of(figures),
            ceiling_share: None,
            ceiling: "",
            goal: None,
            llama_cpp: None,
        }
    }

    /// Says that the median is this part of `ceiling`.
    pub(crate) fn share_of(mut self, ceiling: f64) -> Self {
        self.ceiling_share = Some(self.value.median / ceiling);
        self
    }

    /// Says that the median is this part of the ceiling of that name; `None` is no ceiling.
    pub(crate) fn share(mut self, part: Option<f64>, ceiling: &'static str) -> Self {
        self.ceiling_share = part.filter(|part| part.is_finite());
        if self.ceiling_share.is_some() {
            self.ceiling = ceiling;
        }
        self
    }

    /// Sets what it is judged by beside it, and llama.cpp's figure, if there is one.
    pub(crate) fn judged(mut self, goal: Option<Goal>) -> Self {
        if let Some(theirs) = goal.and_then(|goal| goal.llama_cpp) {
            self = self.against(Spread::of(&[theirs]), "");
        }
        if goal.is_some_and(|goal| goal.least_is_best) {
            self.llama_cpp = self.llama_cpp.map(|other| Compared {
                ratio: other.ratio.recip(),
                ..other
            });
        }
        self.goal = goal;
        self
    }

    /// Sets llama.cpp's figure beside it.
    pub(crate) fn against(mut self, value: Spread, options: &str) -> Self {
        self.llama_cpp = Some(Compared {
            ratio: self.value.median / value.median,
            value,
            options: options.to_owned(),
        });
        self
    }
}

/// A whole measurement.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// `host`, `hip` or `cuda`.
    pub(crate) device: String,
    /// Processor or card, with the instruction set or driver in use.
    pub(crate) device_name: String,
    pub(crate) memory_bytes: u64,
    /// The driver's library and version, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) driver: Option<String>,
    pub(crate) system: String,
    pub(crate) commit: &'static str,
    /// The day in UTC.
    pub(crate) date: String,
    /// What the device found when it was opened.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) findings: Vec<String>,
    /// What all else is measured against.
    pub(crate) ceilings: Vec<Ceiling>,
    pub(crate) rows: Vec<Row>,
    /// What must hold besides.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) checks: Vec<Check>,
}

/// A limit of the machine.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Ceiling {
    pub(crate) name: String,
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
}

impl Report {
    pub(crate) fn new(device: &DeviceStatus) -> Self {
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            device: device.kind.name().to_owned(),
            device_name: device.name.clone(),
            memory_bytes: device.memory_bytes,
            driver: None,
            system: format!("{} {}", std::env::consts::OS, kernel.trim()),
            commit: env!("ROCMFORGE_COMMIT"),
            date: crate::date::today(),
            findings: device.findings.clone(),
            ceilings: Vec::new(),
            rows: Vec::new(),
            checks: Vec::new(),
        }
    }

    /// Prints the report.
    ///
    /// # Errors
    /// What writing gives, except that a reader who has left is no error.
    pub(crate) fn print(&self, json: bool) -> io::Result<()> {
        let text = if json {
            serde_json::to_string(self)? + "\n"
        } else {
            self.markdown()
        };
        let mut out = io::stdout().lock();
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            other => other,
        }
    }

    pub(crate) fn markdown(&self) -> String {
        let gib = self.memory_bytes as f64 / f64::from(1 << 30);
        let driver = self.driver.as_ref();
        let driver = driver.map_or_else(String::new, |driver| format!("; driver {driver}"));
        let mut lines = vec![
            format!(
                "{}: {}, {gib:.1} GiB{driver}; {}; commit {}; {}",
                self.device, self.device_name, self.system, self.commit, self.date
            ),
            String::new(),
        ];
        lines.extend(self.findings.iter().map(|found| format!("- {found}")));
        for ceiling in &self.ceilings {
            let value = figure(ceiling.value);
            lines.push(format!("- {}: {value} {}", ceiling.name, ceiling.unit));
        }
        if !(self.ceilings.is_empty() && self.findings.is_empty()) {
            lines.push(String::new());
        }
        let columns = Columns {
            goal: self.rows.iter().any(|row| row.goal.is_some()),
            llama_cpp: self.rows.iter().any(|row| row.llama_cpp.is_some()),
        };
        let mut head = "| model | figure | median | min | max | unit | of ceiling |".to_owned();
        let mut rule = "|---|---|---:|---:|---:|---|---:|".to_owned();
        if columns.goal {
            head += " must | aim | met |";
            rule += "---:|---:|---|";
        }
        if columns.llama_cpp {
            head += " llama.cpp | ratio |";
            rule += "---:|---:|";
        }
        if !self.rows.is_empty() {
            lines.extend([head, rule]);
            lines.extend(self.rows.iter().map(|row| line(row, columns)));
        }
        if columns.goal {
            lines.extend([String::new(), GOALS.to_owned()]);
        }
        for check in &self.checks {
            lines.push(String::new());
            lines.extend(check.lines());
        }
        lines.join("\n") + "\n"
    }
}

/// Columns that a table has where a row fills them.
#[derive(Debug, Clone, Copy)]
struct Columns {
    goal: bool,
    llama_cpp: bool,
}

fn line(row: &Row, columns: Columns) -> String {
    let Spread {
        median, min, max, ..
    } = row.value;
    let share = row.ceiling_share.map_or_else(String::new, |share| {
        let name = row.ceiling;
        format!("{:.0} % {name}", share * 100.0)
            .trim_end()
            .to_owned()
    });
    let mut line = format!(
        "| {} | {} | {} | {} | {} | {} | {share} |",
        row.model,
        row.figure,
        figure(median),
        figure(min),
        figure(max),
        row.unit
    );
    match &row.goal {
        Some(goal) => {
            let bound = |bound: Option<f64>| bound.map_or_else(String::new, figure);
            let met = goal.met(median);
            line += &format!(" {} | {} | {met} |", bound(goal.must), bound(goal.aim));
        }
        None if columns.goal => line += " | | |",
        None => {}
    }
    match &row.llama_cpp {
        Some(other) => {
            let options = match other.options.as_str() {
                "" => String::new(),
                options => format!(" ({options})"),
            };
            let value = figure(other.value.median);
            line += &format!(" {value}{options} | {:.2} |", other.ratio);
        }
        None if columns.llama_cpp => line += " | |",
        None => {}
    }
    line
}

/// Three digits that count.
pub(crate) fn figure(value: f64) -> String {
    let decimals = match value.abs() {
        v if v >= 99.95 || v == 0.0 => 0,
        v if v >= 9.995 => 1,
        v if v >= 0.9995 => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_the_middle_and_the_ends() {
        let odd = Spread::of(&[3.0, 1.0, 2.0]);
        assert_eq!((odd.median, odd.min, odd.max, odd.runs), (2.0, 1.0, 3.0, 3));
        assert_eq!(Spread::of(&[4.0, 1.0, 2.0, 3.0]).median, 2.5);
    }

    #[test]
    fn rows_have_the_columns_of_the_head() {
        let device = DeviceStatus {
            kind: rocmforge_engine::api::DeviceKind::Host,
            name: "a processor".to_owned(),
            arch: "scalar".to_owned(),
            ordinal: 0,
            driver: String::new(),
            findings: Vec::new(),
            unused_gpu: None,
            compute_units: 0,
            memory_bytes: 8 << 30,
            allocations: 1,
            memory: None,
            free_bytes: None,
        };
        let mut report = Report::new(&device);
        let plain = Row::new("m", "decode", "tokens/s", &[10.0]).share_of(40.0);
        report.rows = vec![
            plain.clone(),
            plain.against(Spread::of(&[8.0]), "--repack 0"),
        ];
        let text = report.markdown();
        let columns: Vec<usize> = text
            .lines()
            .filter(|l| l.starts_with('|'))
            .map(|l| l.matches('|').count())
            .collect();
        assert_eq!(columns, [10; 4], "{text}");
        assert!(
            text.contains("| 25 % | 8.00 (--repack 0) | 1.25 |"),
            "{text}"
        );
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["rows"][1]["llama_cpp"]["ratio"], 1.25);
    }
}
