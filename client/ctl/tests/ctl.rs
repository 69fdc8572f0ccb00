//! The program itself against a daemon of the generated traits: what it prints
//! where, and how it ends.

use std::process::{Output, Stdio};
use std::time::Duration;

use crate::fake::{FakeDaemon, STORY};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rocmforge_client::proto::v1::set_budget_request::Budget;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

fn command(daemon: &FakeDaemon, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rocmforgectl"));
    command
        .env_remove("ROCMFORGE_SOCKET")
        .arg("--socket")
        .arg(&daemon.socket)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// Waits for the end, but not for ever.
async fn ended(child: Child) -> Output {
    tokio::time::timeout(Duration::from_secs(30), child.wait_with_output())
        .await
        .expect("rocmforgectl hangs")
        .expect("rocmforgectl was started")
}

pub(crate) async fn ctl(daemon: &FakeDaemon, args: &[&str]) -> Output {
    ended(command(daemon, args).spawn().expect("rocmforgectl starts")).await
}

async fn with_input(daemon: &FakeDaemon, args: &[&str], input: &str) -> Output {
    let mut child = command(daemon, args)
        .stdin(Stdio::piped())
        .spawn()
        .expect("rocmforgectl starts");
    let mut stdin = child.stdin.take().expect("piped");
    stdin.write_all(input.as_bytes()).await.expect("it reads");
    drop(stdin);
    ended(child).await
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).expect("UTF-8")
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).expect("UTF-8")
}

/// The standard output of a success, on which nothing else was said.
pub(crate) fn success(output: &Output) -> &str {
    assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
    assert_eq!(stderr(output), "", "noise on standard error");
    stdout(output)
}

/// The lines of the standard output of a success as JSON.
fn json_lines(output: &Output) -> Vec<Value> {
    let lines = success(output).lines();
    lines
        .map(|line| serde_json::from_str(line).expect(line))
        .collect()
}

fn json(output: &Output) -> Value {
    let mut lines = json_lines(output);
    assert_eq!(lines.len(), 1, "not one object");
    lines.remove(0)
}

#[tokio::test]
async fn generate_prints_the_text_and_nothing_else() {
    let daemon = FakeDaemon::start();
    let output = ctl(&daemon, &["generate", "tiny", "Tell <|me|>"]).await;
    assert_eq!(success(&output), format!("{}\n", STORY.concat()));
    let seen = daemon.seen.generate.lock().unwrap();
    assert_eq!(seen[0].parse_special, Some(true));
    let sampling = seen[0].sampling.clone().unwrap();
    assert_eq!(sampling, Default::default(), "flags that were not given");
}

#[tokio::test]
async fn generate_json_has_an_object_a_line_and_the_outcome_last() {
    let daemon = FakeDaemon::start();
    let args = ["generate", "tiny", "Tell", "--max-tokens", "3", "--json"];
    let lines = json_lines(&ctl(&daemon, &args).await);
    let (last, pieces) = lines.split_last().unwrap();
    let text: String = pieces
        .iter()
        .map(|piece| piece["text"].as_str().unwrap())
        .collect();
    assert_eq!(text, STORY[..3].concat());
    assert_eq!(last["finish_reason"], "max_tokens");
    assert_eq!(last["prompt_tokens"], 3);
    assert_eq!(last["generated_tokens"], 3);
    assert_eq!(last["ttft_ms"], 12.5);
    assert_eq!(last["decode_tokens_per_s"], 80.0);
    assert_eq!(last["cache_hits"], 7);
    assert_eq!(last["cache_misses"], 2);
    assert_eq!(last["uploaded_bytes"], 2 << 20);
}

#[tokio::test]
async fn sampling_flags_reach_the_daemon() {
    let daemon = FakeDaemon::start();
    let args = [
        "generate",
        "tiny",
        "x",
        "--temperature",
        "0",
        "--seed",
        "7",
        "--stop",
        "END",
        "--n-ctx",
        "64",
    ];
    success(&ctl(&daemon, &args).await);
    let seen = daemon.seen.generate.lock().unwrap();
    let sampling = seen[0].sampling.clone().unwrap();
    assert_eq!(sampling.temperature, Some(0.0));
    assert_eq!(sampling.seed, Some(7));
    assert_eq!(sampling.stop, ["END"]);
    assert_eq!(sampling.top_k, None);
    assert_eq!(seen[0].n_ctx, Some(64));
}

#[tokio::test]
async fn a_dash_reads_the_prompt_from_standard_input() {
    let daemon = FakeDaemon::start();
    let prompt = "a long\nstory".repeat(20_000);
    success(&with_input(&daemon, &["generate", "tiny", "-"], &prompt).await);
    let seen = daemon.seen.generate.lock().unwrap();
    let sent = seen[0].prompt.clone().unwrap();
    assert_eq!(
        sent,
        rocmforge_client::proto::v1::generate_request::Prompt::Text(prompt)
    );
}

#[tokio::test]
async fn an_error_in_mid_stream_keeps_the_text_and_exits_with_its_code() {
    let daemon = FakeDaemon::start();
    let output = ctl(&daemon, &["generate", "tiny", "changed"]).await;
    assert_eq!(output.status.code(), Some(6));
    assert_eq!(stdout(&output), "Once\n");
    assert!(stderr(&output).contains("changed"), "{}", stderr(&output));
    // The daemon's message says what to do, and nothing says it twice.
    let hints = stderr(&output).matches("load it again").count();
    assert_eq!(hints, 1, "{}", stderr(&output));
}

#[tokio::test]
async fn errors_name_the_flag_or_the_command_that_mends_them() {
    let daemon = FakeDaemon::start();
    for (args, code, parts) in [
        (
            &["generate", "nope", "x"][..],
            5,
            &["\"nope\"", "loaded: tiny", "rocmforgectl load FILE"][..],
        ),
        (
            &["generate", "tiny", "x", "--temperature", "-1"],
            6,
            &["--temperature: must be at least 0"],
        ),
        (
            &["generate", "tiny", "full"],
            4,
            &["queue is full", "try again in 1.5 s"],
        ),
        (
            &["load", "/m/missing.gguf"],
            5,
            &["no file /m/missing.gguf", "check the path"],
        ),
        (&["load", "/m/x.gguf", "--name", "taken"], 6, &["--name"]),
        (&["unload", "tiny"], 6, &["pinned", "--force"]),
        (
            &["run", "/nonexistent.gguf", "x"],
            5,
            &["/nonexistent.gguf", "No such file"],
        ),
    ] {
        let output = ctl(&daemon, args).await;
        assert_eq!(output.status.code(), Some(code), "{args:?}");
        assert_eq!(stdout(&output), "", "{args:?}");
        for part in parts {
            assert!(
                stderr(&output).contains(part),
                "{args:?}: {}",
                stderr(&output)
            );
        }
    }
}

#[tokio::test]
async fn wrong_usage_exits_with_2() {
    let daemon = FakeDaemon::start();
    for args in [&["frobnicate"][..], &["load"], &["cache", "budget", "lots"]] {
        let output = ctl(&daemon, args).await;
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert_eq!(stdout(&output), "");
    }
    let output = ctl(&daemon, &["--help"]).await;
    assert_eq!(output.status.code(), Some(0));
}

#[tokio::test]
async fn without_a_daemon_it_says_what_to_start() {
    let daemon = FakeDaemon::start();
    let socket = daemon.socket.clone();
    drop(daemon);
    let mut command = Command::new(env!("CARGO_BIN_EXE_rocmforgectl"));
    let output = command
        .arg("ls")
        .env("ROCMFORGE_SOCKET", &socket)
        .output()
        .await
        .unwrap();
    assert_eq!(output.status.code(), Some(3));
    for part in ["no daemon", "`rocmforged`", "--socket", "fake.sock"] {
        assert!(stderr(&output).contains(part), "{}", stderr(&output));
    }
}

#[tokio::test]
async fn a_closed_pipe_is_success_and_cancels_the_request() {
    let daemon = FakeDaemon::start();
    let mut child = command(&daemon, &["generate", "tiny", "endless"])
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = ended(child).await;
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(stderr(&output), "");
    daemon.cancelled(1).await;
}

#[tokio::test]
async fn an_interrupt_cancels_the_request_and_ends_with_130() {
    let daemon = FakeDaemon::start();
    let mut child = command(&daemon, &["generate", "tiny", "hang"])
        .spawn()
        .unwrap();
    let mut first = [0; 4];
    child
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut first)
        .await
        .unwrap();
    assert_eq!(&first, b"Once");
    let pid = Pid::from_raw(child.id().unwrap() as i32);
    kill(pid, Signal::SIGINT).unwrap();
    let output = ended(child).await;
    assert_eq!(output.status.code(), Some(130));
    daemon.cancelled(1).await;
}

#[tokio::test]
async fn a_conversation_keeps_its_history_until_the_input_ends() {
    let daemon = FakeDaemon::start();
    let args = ["chat", "tiny", "--system", "Be kind."];
    let output = with_input(&daemon, &args, "Hello\n\nAnd you?\n").await;
    let story = STORY.concat();
    assert_eq!(success(&output), format!("{story}\n{story}\n"));
    let seen = daemon.seen.chat.lock().unwrap();
    let said: Vec<(&str, &str)> = seen[1]
        .messages
        .iter()
        .map(|message| (message.role.as_str(), message.content.as_str()))
        .collect();
    assert_eq!(
        said,
        [
            ("system", "Be kind."),
            ("user", "Hello"),
            ("assistant", &story),
            ("user", "And you?"),
        ]
    );
}

#[tokio::test]
async fn chat_takes_one_message() {
    let daemon = FakeDaemon::start();
    let lines = json_lines(&ctl(&daemon, &["chat", "tiny", "Hello", "--json"]).await);
    assert_eq!(lines.len(), STORY.len() + 1);
    assert_eq!(lines.last().unwrap()["finish_reason"], "stop");
    assert_eq!(daemon.seen.chat.lock().unwrap()[0].messages.len(), 1);
}

#[tokio::test]
async fn load_sends_a_path_as_given_and_leaves_the_name_to_the_daemon() {
    let daemon = FakeDaemon::start();
    let output = ctl(&daemon, &["load", "some/model.Q4_K.gguf", "--pin"]).await;
    let line = success(&output);
    assert!(
        line.starts_with("model.Q4_K: llama, 5.01 M parameters, 3.0 MiB in 3 segments"),
        "{line}"
    );
    {
        let seen = daemon.seen.load.lock().unwrap();
        assert_eq!(seen[0].path, "some/model.Q4_K.gguf", "no such file is here");
        assert_eq!(seen[0].name, "");
        assert!(seen[0].pin && !seen[0].preload);
    }
    let model = json(&ctl(&daemon, &["load", "/m/b.gguf", "--name", "n", "--json"]).await);
    assert_eq!(model["name"], "n");
    assert_eq!(model["draft"], serde_json::Value::Null);
    ctl(&daemon, &["load", "/m/b.gguf", "--draft", "small"]).await;
    ctl(&daemon, &["load", "/m/b.gguf", "--mmproj", "b/mmproj.gguf"]).await;
    let seen = daemon.seen.load.lock().unwrap();
    let drafts: Vec<_> = seen.iter().map(|r| r.draft.as_str()).collect();
    assert_eq!(drafts, ["", "", "small", ""]);
    let projectors: Vec<_> = seen.iter().map(|r| r.mmproj.as_str()).collect();
    assert_eq!(projectors, ["", "", "", "b/mmproj.gguf"]);
    assert_eq!(model["segments"][0]["state"], "resident");
}

#[tokio::test]
async fn run_uses_a_running_daemon_and_the_chat_template() {
    let daemon = FakeDaemon::start();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("story.gguf");
    std::fs::write(&file, b"GGUF").unwrap();
    let output = ctl(&daemon, &["run", file.to_str().unwrap(), "Tell me"]).await;
    assert_eq!(success(&output), format!("{}\n", STORY.concat()));
    assert_eq!(daemon.seen.load.lock().unwrap()[0].name, "");
    let seen = daemon.seen.chat.lock().unwrap();
    assert_eq!(seen[0].model, "story");
    assert_eq!(seen[0].messages[0].content, "Tell me");
}

#[tokio::test]
async fn run_takes_another_name_where_the_files_is_taken() {
    let daemon = FakeDaemon::start();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("taken.gguf");
    std::fs::write(&file, b"GGUF").unwrap();
    success(&ctl(&daemon, &["run", file.to_str().unwrap(), "x"]).await);
    let name = daemon.seen.chat.lock().unwrap()[0].model.clone();
    assert!(name.starts_with("taken-"), "{name}");
}

#[tokio::test]
async fn what_is_said_on_standard_input_ends_before_its_last_line_break() {
    let daemon = FakeDaemon::start();
    for input in ["What is 2 + 2?\n", "What is 2 + 2?\r\n", "What is 2 + 2?"] {
        success(&with_input(&daemon, &["chat", "tiny", "-"], input).await);
    }
    let seen = daemon.seen.chat.lock().unwrap();
    assert_eq!(seen.len(), 3);
    for request in &*seen {
        assert_eq!(request.messages[0].content, "What is 2 + 2?");
    }
}

#[tokio::test]
async fn generate_takes_ids_and_says_how_special_tokens_are_read() {
    let daemon = FakeDaemon::start();
    success(&ctl(&daemon, &["generate", "tiny", "--ids", "1,15043"]).await);
    let plain = [
        "generate",
        "tiny",
        "x",
        "--no-add-special",
        "--no-parse-special",
    ];
    success(&ctl(&daemon, &plain).await);
    let seen = daemon.seen.generate.lock().unwrap();
    let ids = rocmforge_client::proto::v1::TokenIds {
        ids: vec![1, 15043],
    };
    assert_eq!(
        seen[0].prompt,
        Some(rocmforge_client::proto::v1::generate_request::Prompt::Tokens(ids))
    );
    assert_eq!(
        (seen[1].add_special, seen[1].parse_special),
        (Some(false), Some(false))
    );
}

#[tokio::test]
async fn a_text_that_is_cut_says_so_on_standard_error() {
    let daemon = FakeDaemon::start();
    let args = ["generate", "tiny", "Tell", "--max-tokens", "3"];
    let output = ctl(&daemon, &args).await;
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(stdout(&output), format!("{}\n", STORY[..3].concat()));
    assert!(
        stderr(&output).contains("--max-tokens"),
        "{}",
        stderr(&output)
    );
    let output = ctl(&daemon, &["generate", "tiny", "Tell", "--stats"]).await;
    assert!(
        stderr(&output).contains("80.0 tokens/s"),
        "{}",
        stderr(&output)
    );
}

#[tokio::test]
async fn errors_are_one_json_object_where_json_is_asked_for() {
    let daemon = FakeDaemon::start();
    let output = ctl(&daemon, &["--json", "generate", "tiny", "full"]).await;
    assert_eq!(output.status.code(), Some(4));
    assert_eq!(stdout(&output), "");
    let value: Value = serde_json::from_str(stderr(&output)).unwrap();
    assert_eq!(value["error"]["code"], "RESOURCE_EXHAUSTED");
    assert_eq!(value["error"]["retry_after_ms"], 1500);
}

#[tokio::test]
async fn files_are_listed_and_their_names_do_nothing_to_the_terminal() {
    let daemon = FakeDaemon::start();
    let output = ctl(&daemon, &["files"]).await;
    assert_eq!(
        success(&output),
        "   SIZE  NAME  LOADED AS  FILE\n\
         3.0 MiB  tiny  tiny       /models/tiny.gguf\n\
         3.0 MiB  tiny  -          /models/\\u{1b}[2J.gguf\n\
         (there are more)\n\
         not offered: /models/l.gguf: it is a link to /nvme/l.gguf; name /nvme\n\
         not offered: /models/mmproj.gguf: it is a projector; give the model\n\
         model directory /usb is not there; mount or create it\n\
         /models: 2 models, 6.0 MiB\n"
    );
}

#[tokio::test]
async fn tables_are_aligned() {
    let daemon = FakeDaemon::start();
    assert_eq!(
        success(&ctl(&daemon, &["ls"]).await),
        "NAME  ARCH   PARAMS  QUANT     SIZE  RESIDENT  SEGMENTS  PINNED  BUSY\n\
         tiny  llama  5.01 M  Q4_K   3.0 MiB   1.0 MiB       1/3       1     0\n"
    );
    let stats = ctl(&daemon, &["cache", "stats"]).await;
    assert_eq!(
        success(&stats),
        "budget        2.00 GiB\n\
         held          5.0 MiB (0.2 %), at most 5.0 MiB\n\
         kv, scratch   512.0 KiB, 256.0 KiB\n\
         prefix cache  256.0 KiB\n\
         policy        pass-aware\n\
         evictions     none\n\
         host KV       12.0 MiB of 64.0 MiB; 9 saved, 4 restored, 1 dropped, 32 tokens recomputed\n\
         \n\
         MODEL    RESIDENT  IN FLIGHT   PINNED  HITS  MISSES  HIT RATE  EVICTIONS  UPLOADED\n\
         tiny      3.0 MiB    1.0 MiB  1.0 MiB    75      25    75.0 %          4   9.0 MiB\n\
         (total)   3.0 MiB    1.0 MiB  1.0 MiB    75      25    75.0 %          4   9.0 MiB\n"
    );
    let show = ctl(&daemon, &["show", "tiny"]).await;
    let show = success(&show);
    assert!(
        show.contains("quantization   Q4_K (14 tensors, 2.4 MiB), F32 (5 tensors, 5.0 KiB)\n"),
        "{show}"
    );
    assert!(
        show.contains("      0  blk.0.attn    1.0 MiB  resident   pinned\n"),
        "{show}"
    );
    let score = ctl(&daemon, &["score", "tiny", "Once upon"]).await;
    assert_eq!(
        success(&score),
        "ID  LOGPROB  TOKEN\n \
         1        -  \"<s>\"\n\
         11  -1.5000  \"Once\"\n\
         12  -0.5000  \" upon\"\n\
         \n\
         sum -2.0000 over 2 tokens, perplexity 2.7183\n"
    );
    let status = ctl(&daemon, &["status"]).await;
    let status = success(&status);
    assert!(
        status.contains("device      host: Test CPU, 16.00 GiB, avx2, 2 threads\n"),
        "{status}"
    );
    assert!(status.contains("uptime      1h 2m\n"), "{status}");
    assert!(
        status.contains("waits       for /models/far.gguf (far) for 7"),
        "{status}"
    );
    assert!(
        status.contains("found       cuda: libcuda.so.1 (driver 13.0, runtime 13.0): 2 devices\n"),
        "{status}"
    );
    let devices = ctl(&daemon, &["devices"]).await;
    assert_eq!(
        success(&devices),
        "DEVICE  NAME      ARCH   UNITS     MEMORY  FREE  DRIVER  IN USE\n\
         host    Test CPU  avx2       2  16.00 GiB     -  -       yes\n\
         cuda:0  Card A    sm_90    132  80.00 GiB     -  13.0\n\
         cuda:1  Card B    sm_90    132  80.00 GiB     -  13.0\n\
         \n\
         hip: libamdhip64.so.7: no such file\n\
         hip: it was looked for in vain\n\
         cuda: libcuda.so.1 (driver 13.0, runtime 13.0): 2 devices\n"
    );
}

#[tokio::test]
async fn a_reload_shows_what_was_taken_and_what_was_not() {
    let daemon = FakeDaemon::start();
    let output = ctl(&daemon, &["reload"]).await;
    assert_eq!(
        success(&output),
        "taken      log info -> debug\n\
         taken      limit\n\
         not taken  threads 1 -> 2: not \\u{1b}[31mnow\n"
    );
}

#[tokio::test]
async fn every_command_answers_with_one_json_object() {
    let daemon = FakeDaemon::start();
    for (args, key) in [
        (&["ls"][..], "models"),
        (&["show", "tiny"], "n_layer"),
        (&["status"], "uptime_ms"),
        (&["devices"], "drivers"),
        (&["devices", "--check"], "device"),
        (
            &["score", "tiny", "Once upon", "--top-n", "2"],
            "perplexity",
        ),
        (&["tokenize", "tiny", "a b"], "ids"),
        (&["embed", "tiny", "a", "b"], "embeddings"),
        (
            &["embed", "tiny", "--ids", "7,8", "--pooling", "mean"],
            "pooling",
        ),
        (
            &[
                "embed",
                "tiny",
                "a",
                "--pooling",
                "none",
                "--input-type",
                "query",
            ],
            "embeddings",
        ),
        (&["rerank", "tiny", "query", "a", "b"], "results"),
        (&["chat", "tiny", "Hi", "--render"], "text"),
        (&["detokenize", "tiny", "1", "2"], "text"),
        (&["cache", "stats"], "budget_bytes"),
        (&["cache", "clear"], "kept"),
        (&["cache", "budget"], "budget_bytes"),
        (&["release", "--host"], "host_freed_bytes"),
        (&["cache", "policy"], "policy"),
        (&["files"], "files"),
        (&["reload"], "not_taken"),
        (&["cache", "budget", "80%"], "budget_bytes"),
        (&["cache", "policy", "lru"], "policy"),
        (
            &["preload", "tiny", "--segments", "0,2"],
            "skipped_segments",
        ),
        (&["pin", "tiny"], "pinned_segments"),
        (&["unpin", "tiny"], "pinned_segments"),
        (&["unload", "tiny", "--force"], "freed_bytes"),
    ] {
        let args = [&["--json"], args].concat();
        let value = json(&ctl(&daemon, &args).await);
        assert!(value.get(key).is_some(), "{args:?}: {value}");
    }
    assert_eq!(daemon.seen.preload.lock().unwrap()[0].segments, [0, 2]);
    let budget = daemon.seen.budget.lock().unwrap()[0].budget;
    assert_eq!(budget, Some(Budget::Percent(80.0)));
}

#[tokio::test]
async fn a_release_shows_what_was_given_back_and_what_comes_again() {
    let daemon = FakeDaemon::start();
    let end = ", kept 1.00 GiB; the next request takes up to 8.00 GiB again\n";
    let output = ctl(&daemon, &["release"]).await;
    assert_eq!(success(&output), format!("released 7.00 GiB{end}"));
    let output = ctl(&daemon, &["release", "--host"]).await;
    let both = "released 7.00 GiB and 2.00 GiB of host memory";
    assert_eq!(success(&output), format!("{both}{end}"));
}
