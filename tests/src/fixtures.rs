//! The committed models and texts, and where they are.

use std::path::{Path, PathBuf};

use serde::Deserialize;

/// tiny-llama: 6 layers of 256, Q4_K and Q6_K.
pub const TINY_LLAMA: &str = "tiny-llama-Q4_K_M.gguf";

/// tiny-qwen3: 6 layers of 256, Q8_0, QK-norm.
pub const TINY_QWEN3: &str = "tiny-qwen3-Q8_0.gguf";

/// The workspace's root directory.
pub fn workspace() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests
        .parent()
        .expect("the crate lies below the workspace")
        .to_path_buf()
}

/// The directory of the fixtures.
pub fn dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// The absolute path of one fixture.
pub fn path(name: &str) -> PathBuf {
    dir().join(name)
}

/// A prompt with its one right answer.
#[derive(Debug, Clone, Deserialize)]
pub struct Question {
    /// What to ask, as a single user message.
    pub prompt: String,
    /// The right answer, compared after trimming.
    pub answer: String,
}

/// The 120 questions of exam.json.
///
/// # Panics
/// When the file is not as it was committed.
pub fn exam() -> Vec<Question> {
    let text =
        std::fs::read_to_string(path("exam.json")).expect("tests/fixtures/exam.json is committed");
    serde_json::from_str(&text).expect("exam.json is a list of questions")
}

/// The 200 stories of text.txt, one document a line.
///
/// # Panics
/// When the file is not as it was committed.
pub fn stories() -> Vec<String> {
    let text =
        std::fs::read_to_string(path("text.txt")).expect("tests/fixtures/text.txt is committed");
    text.lines()
        .filter(|line| !line.is_empty())
        .map(str::to_owned)
        .collect()
}
