//! What answers take of the program's memory.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use crate::program::{Daemon, PATIENCE, host, start};

/// The most memory that the program had so far, in bytes.
fn peak_bytes(daemon: &Daemon) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.0.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    kib.unwrap().trim().parse::<usize>().unwrap() << 10
}

#[test]
fn a_long_list_takes_a_small_multiple_of_its_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("h");
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    let mut command = host(dir.path(), &dir.path().join("s"));
    command.arg("--model-dir").arg(fixtures);
    command.arg("--http-socket").arg(&socket);
    let (daemon, _notify) = start(dir.path(), &mut command);
    let ask = |path: &str, body: &str| {
        let mut stream = UnixStream::connect(&socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n");
        write!(stream, "{head}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        assert!(answer.starts_with(b"HTTP/1.1 200"), "{path}");
        answer.len()
    };
    let model = "\"model\": \"tiny-llama-Q4_K_M\"";
    let texts = vec!["\"a\""; 2048].join(",");
    let embeddings = format!("{{{model}, \"input\": [{texts}]}}");
    let text = "ab ".repeat(1 << 19);
    let pieces = format!("{{{model}, \"with_pieces\": true, \"content\": \"{text}\"}}");
    let chat = |n_tokens: u32| {
        format!(
            "{{\"model\": \"tiny-qwen3-Q8_0\", \"messages\": [{{\"role\": \"user\", \"content\": \"a\"}}], \
             \"logprobs\": true, \"top_logprobs\": 20, \"n\": 4, \"max_tokens\": {n_tokens}, \"ignore_eos\": true}}"
        )
    };
    // What the first request of a model takes is no answer's.
    ask("/v1/embeddings", &format!("{{{model}, \"input\": \"a\"}}"));
    ask("/v1/chat/completions", &chat(1));
    // Scores are a fifth of their JSON, and the keys of the tokens are there, too.
    for (path, body, times) in [
        ("/v1/embeddings", embeddings, 4),
        ("/tokenize", pieces, 4),
        ("/v1/chat/completions", chat(1000), 10),
    ] {
        let before = peak_bytes(&daemon);
        let bytes = ask(path, &body);
        let grown = peak_bytes(&daemon) - before;
        assert!(bytes > 5 << 20, "{path}: {bytes}");
        assert!(grown < times * bytes, "{path}: {grown} for {bytes}");
    }
}
