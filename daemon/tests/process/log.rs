//! A log that cannot be written, or that nobody reads, hurts nobody.

use std::fs::File;
use std::io::{PipeReader, Write, pipe};
use std::path::Path;
use std::process::{Command, Stdio};

use hyper_util::rt::TokioIo;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::signal::Signal;
use rocmforge_proto::v1;
use rocmforge_proto::v1::inference_client::InferenceClient;
use tokio::net::UnixStream;
use tonic::Code;
use tonic::transport::Endpoint;

use crate::program::{host, said, start_logging_to};

/// Requests that each leave a line in the log.
const REQUESTS: usize = 1000;

/// Sends requests and asserts that each is answered with its own code.
fn requests(socket: &Path) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let socket = socket.to_owned();
    runtime.block_on(async move {
        let connector = tower::service_fn(move |_| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        let channel = Endpoint::from_static("http://rocmforged")
            .connect_with_connector(connector)
            .await
            .unwrap();
        for _ in 0..REQUESTS {
            let request = v1::TokenizeRequest {
                model: "no-such-model".into(),
                text: "x".into(),
                ..Default::default()
            };
            let answer = InferenceClient::new(channel.clone())
                .tokenize(request)
                .await;
            assert_eq!(answer.unwrap_err().code(), Code::NotFound);
        }
    });
}

/// A daemon that logs to `log` answers, and drains on SIGTERM.
fn serves_and_drains(log: impl Into<Stdio>, meanwhile: impl FnOnce()) {
    serves_and_drains_as(|command| command, log, meanwhile);
}

/// The same of a daemon that is started by another command.
fn serves_and_drains_as(
    by: impl FnOnce(Command) -> Command,
    log: impl Into<Stdio>,
    meanwhile: impl FnOnce(),
) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let mut command = host(dir.path(), &socket);
    command.args(["--log", "debug"]);
    let mut command = by(command);
    let (mut daemon, notify) = start_logging_to(dir.path(), &mut command, log);
    // The command has a copy of the log's descriptor.
    drop(command);
    meanwhile();
    requests(&socket);
    daemon.signal(Signal::SIGTERM);
    assert!(said(&notify).contains("STOPPING=1"));
    assert_eq!(daemon.wait(), Some(0));
    assert!(!socket.exists(), "the socket is removed");
}

#[test]
fn a_full_disk_under_the_log_fails_no_request() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    serves_and_drains(full, || {});
}

/// The system's signal for it would end the process.
#[test]
fn a_log_at_the_limit_of_file_sizes_fails_no_request() {
    const LIMIT: u64 = 64 << 10;
    let log = tempfile::NamedTempFile::new().unwrap();
    let limited = |inner: Command| {
        let mut command = Command::new("sh");
        // In blocks of 512 bytes, as POSIX has it.
        let limit = format!("ulimit -f {} && exec \"$0\" \"$@\"", LIMIT / 512);
        command.args(["-c", &limit]).arg(inner.get_program());
        command.args(inner.get_args());
        let environment = inner.get_envs();
        command.envs(environment.filter_map(|(name, value)| Some((name, value?))));
        command
    };
    serves_and_drains_as(limited, log.reopen().unwrap(), || {});
    // Shells that count in KiB allow twice as much.
    let bytes = log.as_file().metadata().unwrap().len();
    assert!((LIMIT..=2 * LIMIT).contains(&bytes), "{bytes}");
}

#[test]
fn a_reader_of_the_log_that_went_away_fails_no_request() {
    let (reader, writer) = pipe().unwrap();
    serves_and_drains(writer, || drop(reader));
}

#[test]
fn a_reader_of_the_log_that_hangs_holds_up_no_request_and_no_end() {
    let (reader, mut writer) = pipe().unwrap();
    fill(&reader, &mut writer);
    serves_and_drains(writer, || {});
    drop(reader);
}

/// Leaves no room in the pipe.
fn fill(reader: &PipeReader, writer: &mut impl Write) {
    let bytes = fcntl(reader, FcntlArg::F_GETPIPE_SZ).unwrap();
    writer.write_all(&vec![b'.'; bytes as usize]).unwrap();
}
