//! llama.cpp's llama-bench on the same file, for comparison side by side.
//!
//! It repacks weights at load by default, which helps some types and hurts others; where it
//! can be told not to, both ways are run and the better one counts, so that the comparison is
//! with what its users can have.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::report::Spread;

/// A llama-bench binary and the ways to run it.
#[derive(Debug)]
pub(crate) struct LlamaBench {
    binary: PathBuf,
    threads: usize,
    /// Options of each way, the default first.
    ways: Vec<&'static [&'static str]>,
}

/// One test of its JSON output.
#[derive(Debug, Deserialize)]
struct Test {
    n_prompt: u32,
    n_gen: u32,
    samples_ts: Vec<f64>,
}

/// Tokens a second of prefill and decode, of every run so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct Samples {
    prefill: Vec<f64>,
    decode: Vec<f64>,
}

/// The samples of each way.
#[derive(Debug, Default)]
pub(crate) struct Gathered(Vec<Samples>);

impl LlamaBench {
    /// # Errors
    /// The binary does not run.
    pub(crate) fn find(binary: &Path, threads: usize) -> Result<Self> {
        let output = Command::new(binary).arg("--help").output();
        let output = output.with_context(|| format!("--compare {}", binary.display()))?;
        let help = String::from_utf8_lossy(&output.stdout);
        ensure!(
            help.contains("--n-prompt"),
            "--compare {}: its --help is not llama-bench's: {}",
            binary.display(),
            String::from_utf8_lossy(&output.stderr).trim()
        );
        let mut ways: Vec<&[&str]> = vec![&[]];
        if help.contains("--repack") {
            ways.push(&["--repack", "0"]);
        }
        Ok(Self {
            binary: binary.to_owned(),
            threads,
            ways,
        })
    }

    /// Runs every way once with `runs` repetitions and adds what came out.
    ///
    /// # Errors
    /// It fails, or prints something else than expected.
    pub(crate) fn run(
        &self,
        model: &Path,
        n_prompt: u32,
        n_gen: u32,
        runs: usize,
        into: &mut Gathered,
    ) -> Result<()> {
        into.0.resize(self.ways.len(), Samples::default());
        for (way, samples) in self.ways.iter().zip(&mut into.0) {
            let output = Command::new(&self.binary)
                .arg("-m")
                .arg(model)
                .args(["-t", &self.threads.to_string()])
                .args(["-p", &n_prompt.to_string(), "-n", &n_gen.to_string()])
                .args(["-r", &runs.to_string(), "-o", "json"])
                .args(*way)
                .stdin(Stdio::null())
                .output()?;
            if !output.status.success() {
                let errors = String::from_utf8_lossy(&output.stderr);
                let last = errors.lines().last().unwrap_or("it said nothing");
                bail!(
                    "{} ended with {}: {last}",
                    self.binary.display(),
                    output.status
                );
            }
            samples.add(&output.stdout)?;
        }
        Ok(())
    }

    fn best(&self, gathered: &Gathered, figures: fn(&Samples) -> &[f64]) -> (Spread, String) {
        let ways = self.ways.iter().zip(&gathered.0);
        ways.map(|(way, samples)| (Spread::of(figures(samples)), way.join(" ")))
            .max_by(|a, b| a.0.median.total_cmp(&b.0.median))
            .expect("there is a default way")
    }

    /// The better way's prefill, with its options.
    pub(crate) fn prefill(&self, gathered: &Gathered) -> (Spread, String) {
        self.best(gathered, |samples| &samples.prefill)
    }

    /// The better way's decode, with its options.
    pub(crate) fn decode(&self, gathered: &Gathered) -> (Spread, String) {
        self.best(gathered, |samples| &samples.decode)
    }
}

impl Samples {
    fn add(&mut self, json: &[u8]) -> Result<()> {
        let tests: Vec<Test> =
            serde_json::from_slice(json).context("llama-bench's JSON has another form")?;
        for test in tests {
            match (test.n_prompt, test.n_gen) {
                (_, 0) => self.prefill.extend(test.samples_ts),
                (0, _) => self.decode.extend(test.samples_ts),
                _ => {}
            }
        }
        ensure!(
            !self.prefill.is_empty() && !self.decode.is_empty(),
            "llama-bench's JSON lacks prefill or decode"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_better_way_counts_for_each_figure() {
        let bench = LlamaBench {
            binary: PathBuf::new(),
            threads: 1,
            ways: vec![&[], &["--repack", "0"]],
        };
        let mut gathered = Gathered(vec![Samples::default(); 2]);
        let json = |prefill: &str, decode: &str| {
            format!(
                r#"[{{"n_prompt": 128, "n_gen": 0, "samples_ts": [{prefill}], "avg_ts": 1}},
                    {{"n_prompt": 0, "n_gen": 32, "samples_ts": [{decode}]}}]"#
            )
        };
        for (way, text) in [
            (0, json("100, 120", "40, 42")),
            (1, json("200, 220", "30, 30")),
        ] {
            gathered.0[way].add(text.as_bytes()).unwrap();
        }
        let (prefill, options) = bench.prefill(&gathered);
        assert_eq!((prefill.median, options.as_str()), (210.0, "--repack 0"));
        let (decode, options) = bench.decode(&gathered);
        assert_eq!((decode.median, options.as_str()), (41.0, ""));
        assert!(Samples::default().add(b"[]").is_err());
    }
}
