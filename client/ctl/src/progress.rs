//! Progress bars on standard error, where that is a terminal; nothing elsewhere.

use indicatif::{ProgressBar, ProgressStyle};
use rocmforge_client::proto::v1::{LoadProgress, LoadStage, PreloadProgress};

/// A bar that shows bytes, once there are any; it vanishes when it is dropped.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// A bar for `what`, which stays in front of it.
    pub(crate) fn new(what: &str) -> Progress {
        // indicatif itself hides the bar where standard error is no terminal.
        let bar = ProgressBar::no_length();
        bar.set_prefix(what.to_owned());
        Progress(bar)
    }

    /// Shows the stage of a load.
    pub(crate) fn load(&self, progress: &LoadProgress) {
        let stage = match progress.stage() {
            LoadStage::Unspecified => "loading",
            LoadStage::Metadata => "reading metadata",
            LoadStage::Tokenizer => "building the tokenizer",
            LoadStage::Plan => "planning",
            LoadStage::Preload => "uploading",
        };
        self.show(stage, progress.done_bytes, progress.total_bytes);
    }

    /// Shows how far a preload is.
    pub(crate) fn preload(&self, progress: &PreloadProgress) {
        self.show("uploading", progress.done_bytes, progress.total_bytes);
    }

    /// Begins the progress of a download of which `done_bytes` are there; the rate counts later
    /// bytes only.
    pub(crate) fn begin_at(&self, done_bytes: u64) {
        self.0.set_position(done_bytes);
        self.0.reset_eta();
    }

    /// Shows how far a download is, its rate, and when it will be done.
    pub(crate) fn download(&self, stage: &'static str, done_bytes: u64, total_bytes: u64) {
        let template = "{prefix}: {msg} [{bar:30}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}, {eta} left";
        self.show_as(template, stage, done_bytes, total_bytes);
    }

    /// Prints a line above the bar, where there is one.
    pub(crate) fn note(&self, line: &str) {
        self.0.println(line);
    }

    fn show(&self, stage: &'static str, done_bytes: u64, total_bytes: u64) {
        let template = if total_bytes == 0 {
            "{prefix}: {msg} {spinner}"
        } else {
            "{prefix}: {msg} [{bar:30}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}"
        };
        self.show_as(template, stage, done_bytes, total_bytes);
    }

    fn show_as(&self, template: &str, stage: &'static str, done_bytes: u64, total_bytes: u64) {
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.0.set_style(style.progress_chars("=> "));
        }
        self.0.set_length(total_bytes);
        self.0.set_message(stage);
        self.0.set_position(done_bytes);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
