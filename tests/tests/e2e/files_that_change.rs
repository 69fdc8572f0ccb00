//! A model's file that is cut short or rewritten under the daemon: DATA_LOSS for requests of that
//! model that run, the file is opened again for the next one, and nothing else stops.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use futures_util::StreamExt;
use rocmforge_client::proto::v1::{GenerateDone, SamplingParams, generate_event::Event};
use rocmforge_client::{Client, Code, Error};
use rocmforge_tests::daemon::{Daemon, Options};
use rocmforge_tests::fixtures::{self, TINY_LLAMA, TINY_QWEN3};
use rocmforge_tests::session::{
    ask, connect, continuation, generate, greedy, in_time, is_right, load, noise, refused, try_load,
};

struct Ground {
    daemon: Daemon,
    client: Client,
    dir: tempfile::TempDir,
}

impl Ground {
    async fn new() -> Ground {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let daemon = Daemon::start(&Options::default().model_dir(dir.path()));
        let client = connect(&daemon).await;
        load(&client, TINY_QWEN3).await;
        Ground {
            daemon,
            client,
            dir,
        }
    }

    /// Loads a copy of tiny-llama that the test may spoil.
    async fn copy(&self) -> PathBuf {
        let path = self.dir.path().join("copy.gguf");
        fs::copy(fixtures::path(TINY_LLAMA), &path).expect("a copy");
        try_load(&self.client, &path, "copy")
            .await
            .expect("a sound copy");
        path
    }

    /// The next request has the file as it is now, others go on, and a mended file can be loaded
    /// again. `is_whole` tells whether what is left of the file is a model.
    async fn finish(self, is_whole: bool) {
        self.client
            .cache_clear(Some("copy"))
            .await
            .expect("nothing of it is pinned");
        let again = generate(
            &self.client,
            continuation("copy", "Once upon a time", greedy(4)),
        )
        .await;
        if is_whole {
            again.expect("the file is opened again");
        } else {
            let error = refused("a file that is cut short", again);
            assert_eq!(error.code, Code::InvalidArgument, "{}", error.message);
            assert!(
                error.message.contains("copy.gguf"),
                "the file is not in {:?}",
                error.message
            );
        }

        let exam = fixtures::exam();
        let answer = ask(&self.client, TINY_QWEN3, &exam[0]).await;
        assert!(is_right(&exam[0], &answer), "{}", answer.text);

        self.client
            .unload("copy", false)
            .await
            .expect("a broken model unloads");
        self.copy().await;
        let answer = ask(&self.client, "copy", &exam[0]).await;
        assert!(is_right(&exam[0], &answer), "{}", answer.text);
        self.daemon.stop();
    }
}

/// Generates noise and does `spoil` after the first tokens. With nothing kept
/// resident the pass has to read on.
async fn generate_while(client: &Client, spoil: impl FnOnce()) -> Result<GenerateDone, Error> {
    // On a busy machine a text of a few tokens is over before this thread has its turn.
    let sampling = SamplingParams {
        ignore_eos: true,
        ..noise(1500, 3)
    };
    let mut events = client
        .generate(continuation("copy", "Once upon a time", sampling))
        .await?;
    let mut spoil = Some(spoil);
    in_time("the generation", async {
        while let Some(event) = events.next().await {
            if let Event::Done(done) = event? {
                return Ok(done);
            }
            if let Some(spoil) = spoil.take() {
                spoil();
            }
            client.cache_clear(Some("copy")).await?;
        }
        panic!("a generation ends with its outcome or an error");
    })
    .await
}

fn truncate(path: &Path, bytes: u64) {
    let file = OpenOptions::new()
        .write(true)
        .open(path)
        .expect("our own file");
    file.set_len(bytes).expect("a shorter file");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn truncated_while_generating() {
    for bytes in [0, 4096, 1_500_000] {
        let ground = Ground::new().await;
        let path = ground.copy().await;
        let ended = generate_while(&ground.client, || truncate(&path, bytes)).await;
        let error = refused("a truncated file", ended);
        assert_eq!(error.code, Code::DataLoss, "{}", error.message);
        ground.finish(false).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rewritten_while_generating() {
    let ground = Ground::new().await;
    let path = ground.copy().await;
    let ended = generate_while(&ground.client, || {
        let mut file = OpenOptions::new()
            .write(true)
            .open(&path)
            .expect("our own file");
        file.seek(SeekFrom::Start(1_000_000))
            .expect("inside the file");
        file.write_all(&[0xA5; 500_000]).expect("half a megabyte");
    })
    .await;
    let error = refused("a rewritten file", ended);
    assert_eq!(error.code, Code::DataLoss, "{}", error.message);
    ground.finish(true).await;
}

/// A file that another takes the place of is still there for the daemon that has it open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replaced_by_rename_goes_on_or_says_so() {
    let ground = Ground::new().await;
    let path = ground.copy().await;
    let other = ground.dir.path().join("other.gguf");
    File::create(&other)
        .and_then(|mut file| file.write_all(b"not a model"))
        .expect("another file");
    let ended = generate_while(&ground.client, || {
        fs::rename(&other, &path).expect("a rename")
    })
    .await;
    if let Err(error) = ended {
        assert_eq!(error.code(), Some(Code::DataLoss), "{error}");
    }
    let exam = fixtures::exam();
    let answer = ask(&ground.client, TINY_QWEN3, &exam[0]).await;
    assert!(is_right(&exam[0], &answer), "{}", answer.text);
    ground.daemon.stop();
}
