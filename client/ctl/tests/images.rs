//! Images of `chat`.

use rocmforge_client::proto::v1::content_part::Part;

use crate::ctl::{ctl, success};
use crate::fake::{FakeDaemon, SEEING};

#[tokio::test]
async fn chat_shows_images_to_a_model_that_reads_them() {
    let daemon = FakeDaemon::start();
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (dir.path().join("a.png"), dir.path().join("b.jpg"));
    std::fs::write(&first, b"one").unwrap();
    std::fs::write(&second, b"two").unwrap();
    let [first, second] = [&first, &second].map(|path| path.to_str().unwrap());
    let images = ["--image", first, "--image", second];
    let arguments = [&["chat", "tiny", "What?"][..], &images].concat();
    let blind = ctl(&daemon, &arguments).await;
    assert!(!blind.status.success());
    let told = String::from_utf8_lossy(&blind.stderr).into_owned();
    assert!(told.contains("'tiny' reads text only"), "{told}");
    success(&ctl(&daemon, &["load", "/m/seeing.gguf", "--name", SEEING]).await);
    success(&ctl(&daemon, &[&["chat", SEEING, "What?"][..], &images].concat()).await);
    let missing = ctl(&daemon, &["chat", SEEING, "What?", "--image", "/none.png"]).await;
    let told = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert!(told.contains("cannot read /none.png"), "{told}");
    let seen = daemon.seen.chat.lock().unwrap();
    assert_eq!(seen.len(), 1);
    let message = seen[0].messages.last().unwrap();
    let parts: Vec<_> = message
        .parts
        .iter()
        .filter_map(|part| part.part.clone())
        .collect();
    let expected = [
        Part::Image(b"one".to_vec()),
        Part::Image(b"two".to_vec()),
        Part::Text("What?".to_owned()),
    ];
    assert_eq!((parts, message.content.as_str()), (expected.to_vec(), ""));
}
