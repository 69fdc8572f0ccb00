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

    fn show(&self, stage: &'static str, done_bytes: u64, total_bytes: u64) {
        let template = if total_bytes == 0 {
            "{prefix}: {msg} {spinner}"
        } else {
            "{prefix}: {msg} [{bar:30}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}"
        };
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
