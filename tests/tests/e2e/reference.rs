//! The yardstick itself: the numpy forward pass must solve the exam as llama.cpp
//! does with the same files.

use rocmforge_tests::fixtures::{self, TINY_LLAMA, TINY_QWEN3};
use rocmforge_tests::python::Python;

/// A right answer needs the vocabulary, the weights, the attention and the
/// positions to be read right.
#[test]
fn reference_answers_exam_questions() {
    let Some(python) = Python::find("reference_answers_exam_questions", &["numpy", "gguf"]) else {
        return;
    };
    for model in [TINY_LLAMA, TINY_QWEN3] {
        let path = fixtures::path(model);
        let path = path.to_str().expect("the fixtures' path is UTF-8");
        for question in fixtures::exam().iter().take(4) {
            let out = python.run(
                "reference.py",
                &[path, "--chat", &question.prompt, "--greedy", "80"],
            );
            let out: serde_json::Value =
                serde_json::from_str(&out).expect("reference.py prints JSON");
            let answer = out["text"].as_str().expect("a text").trim();
            assert_eq!(
                answer,
                question.answer.trim(),
                "{model}: {}",
                question.prompt
            );
        }
    }
}
