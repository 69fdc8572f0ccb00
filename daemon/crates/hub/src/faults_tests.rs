//! Downloads from a hub that fails, over real sockets.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::task::JoinSet;

use super::fake_hub::{FakeHub, Fault, ListFault, bytes, sha256};
use super::*;

/// Longer than some pieces, and no multiple of one.
const FILE_BYTES: usize = (9 << 16) + 4321;
const FILE: &str = "o/r/m-Q4_K_M.gguf";

fn config(hub: &FakeHub) -> Config {
    Config {
        hub: address(&hub.url()).unwrap(),
        registry: address(&hub.url()).unwrap(),
        token: Some(super::token("secret\n").unwrap()),
        connections: 3,
        piece_bytes: 1 << 16,
        spare_bytes: 0,
        patience: Patience {
            connect: Duration::from_secs(5),
            stall: Duration::from_millis(400),
            least_bytes: 2048,
            first_wait: Duration::from_millis(2),
            longest_wait: Duration::from_millis(1500),
            tries: 4,
        },
    }
}

fn silent() -> Listener {
    Arc::new(|_| {})
}

async fn pull(hub: &FakeHub, name: &str, dir: &Path) -> Result<Vec<Pulled>, Error> {
    let source = Source::parse(name).unwrap();
    Hub::new(config(hub))
        .pull(&source, dir, Scope::default(), silent())
        .await
}

/// All files below a directory, but for the notes of where files came from.
fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(files(&path));
        } else if path.extension().is_none_or(|end| end != "origin") {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// How a first download ends.
#[derive(Debug, Clone, Copy)]
enum End {
    /// In spite of the fault the file is there.
    Whole,
    /// With this error.
    Fails(&'static str),
}
use End::{Fails, Whole};

/// For ever.
const EVER: u32 = u32::MAX;
/// Faults that are tried beside each other: most of their time is waiting.
const FAULTS_AT_ONCE: usize = 16;

/// Makes a hub fail.
type Break = Box<dyn FnOnce(&FakeHub) + Send>;

fn file_faults() -> Vec<(Fault, u32, End)> {
    let busy = "\r\nRetry-After: 0";
    vec![
        (Fault::CutAfter(0), 3, Whole),
        (Fault::CutAfter(1000), 3, Whole),
        (Fault::CutAfter(1000), EVER, Fails("BROKEN")),
        (Fault::CutAfter(0), EVER, Fails("BROKEN")),
        (Fault::CutHead, 2, Whole),
        (Fault::CutHead, EVER, Fails("UNREACHABLE")),
        (Fault::Status(500, ""), 2, Whole),
        (Fault::Status(502, ""), EVER, Fails("UNAVAILABLE")),
        (Fault::Status(503, busy), 2, Whole),
        (Fault::Status(504, ""), EVER, Fails("UNAVAILABLE")),
        (Fault::Status(408, ""), 2, Whole),
        (Fault::Status(429, busy), 3, Whole),
        (Fault::Status(429, "\r\nRetry-After: 1"), 1, Whole),
        (
            Fault::Status(429, "\r\nRetry-After: 3600"),
            EVER,
            Fails("RATE_LIMITED"),
        ),
        (Fault::Status(429, ""), EVER, Fails("RATE_LIMITED")),
        (
            Fault::Status(429, "\r\nRetry-After: Sun, 06 Nov 1994 08:49:37 GMT"),
            2,
            Whole,
        ),
        (Fault::Status(401, ""), EVER, Fails("DENIED")),
        (Fault::Status(403, ""), EVER, Fails("DENIED")),
        (Fault::Status(404, ""), EVER, Fails("NOT_FOUND")),
        (Fault::Status(410, ""), EVER, Fails("NOT_FOUND")),
        (Fault::Status(418, ""), EVER, Fails("BAD_ANSWER")),
        (Fault::Status(204, ""), EVER, Fails("BAD_ANSWER")),
        (Fault::Status(416, ""), EVER, Fails("CHANGED")),
        (Fault::IgnoreRange, EVER, Whole),
        (Fault::IgnoreRange, 1, Whole),
        (Fault::IgnoreRangeAndCut(100_000), EVER, Fails("BROKEN")),
        (Fault::OtherRange(10), EVER, Fails("BAD_ANSWER")),
        (Fault::NoContentRange, EVER, Fails("BAD_ANSWER")),
        (
            Fault::OddContentRange("bytes x-y/z"),
            EVER,
            Fails("BAD_ANSWER"),
        ),
        (
            Fault::OddContentRange("items 0-1/2"),
            EVER,
            Fails("BAD_ANSWER"),
        ),
        (Fault::TotalIs(FILE_BYTES as u64 + 1), EVER, Fails("LENGTH")),
        (Fault::TotalIs(5), EVER, Fails("LENGTH")),
        (Fault::Announces(500), EVER, Whole),
        (Fault::AnnouncesLess(500), 2, Whole),
        (Fault::Longer(5000), EVER, Whole),
        (Fault::Shorter(300), 3, Whole),
        (Fault::Chunked, EVER, Whole),
        (Fault::ChunkedCut, 2, Whole),
        (Fault::WrongBit, EVER, Fails("BAD_CHECKSUM")),
        (
            Fault::LinkedEtag("1111111111111111111111111111111111111111111111111111111111111111"),
            EVER,
            Fails("CHANGED"),
        ),
        (Fault::LinkedEtag("not a checksum"), EVER, Whole),
        (
            Fault::Lead("http://192.0.2.1/evil.gguf".to_owned()),
            EVER,
            Fails("REDIRECT"),
        ),
        (
            Fault::Lead("file:///etc/passwd".to_owned()),
            EVER,
            Fails("REDIRECT"),
        ),
        (
            Fault::Lead("https://user:pw@127.0.0.1/".to_owned()),
            EVER,
            Fails("REDIRECT"),
        ),
        (Fault::Lead(String::new()), EVER, Fails("REDIRECT")),
        (Fault::LeadForEver, EVER, Fails("REDIRECT")),
        (Fault::Drip(7, 30), EVER, Fails("BROKEN")),
        (Fault::Drip(7, 30), 2, Whole),
        (Fault::StallBody, EVER, Fails("BROKEN")),
        (Fault::StallBody, 2, Whole),
        (Fault::StallHead, 1, Whole),
        (Fault::Coding("gzip"), EVER, Fails("BAD_ANSWER")),
        (Fault::Coding("identity"), EVER, Whole),
        (Fault::Html, EVER, Fails("LENGTH")),
        (Fault::Empty, EVER, Fails("LENGTH")),
        (Fault::NoEtag, EVER, Whole),
        (Fault::WeakEtag, EVER, Whole),
        (Fault::EtagEachTime, EVER, Fails("CHANGED")),
        (Fault::Garbage, EVER, Fails("UNREACHABLE")),
        (Fault::EndlessHead, EVER, Fails("UNREACHABLE")),
    ]
}

fn list_faults() -> Vec<(ListFault, u32, End)> {
    vec![
        (ListFault::Status(500, ""), 2, Whole),
        (ListFault::Status(503, ""), EVER, Fails("UNAVAILABLE")),
        (ListFault::Status(429, "\r\nRetry-After: 0"), 2, Whole),
        (ListFault::Status(401, ""), EVER, Fails("DENIED")),
        (ListFault::Status(404, ""), EVER, Fails("NOT_FOUND")),
        (
            ListFault::Text("<html>log in</html>"),
            EVER,
            Fails("BAD_ANSWER"),
        ),
        (ListFault::Text("{\"sha\": 7}"), EVER, Fails("BAD_ANSWER")),
        (ListFault::Text(""), EVER, Fails("BAD_ANSWER")),
        (ListFault::Cut, 2, Whole),
        (ListFault::Cut, EVER, Fails("BROKEN")),
        (ListFault::Stall, 1, Whole),
        (ListFault::SizeOff(100), EVER, Fails("LENGTH")),
        (ListFault::SizeOff(-100), EVER, Fails("LENGTH")),
        (ListFault::WrongSha, EVER, Fails("BAD_CHECKSUM")),
        (ListFault::NoSha, EVER, Whole),
        (ListFault::Hostile, EVER, Whole),
        (ListFault::Endless, EVER, Fails("BAD_ANSWER")),
        (
            ListFault::Lead("http://192.0.2.1/".to_owned()),
            EVER,
            Fails("REDIRECT"),
        ),
        (ListFault::Empty, EVER, Fails("NO_MODEL")),
        (ListFault::NoBytes, EVER, Fails("LENGTH")),
        (ListFault::Huge, EVER, Fails("LENGTH")),
    ]
}

/// What went wrong with one fault; nothing if a file was whole or absent after each download.
async fn tried(hub: &FakeHub, name: &str, end: End, whole: &[u8]) -> Option<String> {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("models");
    fs::create_dir(&dir).unwrap();
    let dest = dir.join(FILE);
    let within = Duration::from_secs(30);
    let first = tokio::time::timeout(within, pull(hub, "o/r:Q4_K_M", &dir)).await;
    let Ok(first) = first else {
        return Some(format!("{name}: it hangs"));
    };
    let fits = match (&first, end) {
        (Ok(_), Whole) => fs::read(&dest).is_ok_and(|found| found == whole),
        (Err(error), Fails(word)) => error.word() == word && !dest.exists(),
        _ => false,
    };
    if !fits {
        return Some(format!("{name}: expected {end:?}, found {first:?}"));
    }
    hub.heal();
    let second = pull(hub, "o/r:Q4_K_M", &dir).await;
    if second.is_err() || fs::read(&dest).is_ok_and(|found| found != whole) || files(&dir) != [dest]
    {
        return Some(format!(
            "{name}: a second download gives {second:?} and {:?}",
            files(&dir)
        ));
    }
    let outside: Vec<_> = fs::read_dir(root.path()).unwrap().collect();
    (outside.len() != 1).then(|| format!("{name}: something lies outside: {outside:?}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_each_fault_a_file_is_whole_or_absent_and_a_second_pull_completes_it() {
    let mut broken = Vec::new();
    let whole: Arc<[u8]> = bytes(FILE_BYTES, 1).into();
    let (of_files, of_lists) = (file_faults(), list_faults());
    assert!(of_files.len() + of_lists.len() >= 80);
    let of_files = of_files.into_iter().map(|(fault, times, end)| {
        let name = format!("{fault:?} {times} times");
        let fail = move |hub: &FakeHub| hub.fail(fault, times);
        (name, end, Box::new(fail) as Break)
    });
    let of_lists = of_lists.into_iter().map(|(fault, times, end)| {
        let name = format!("{fault:?} {times} times");
        let fail = move |hub: &FakeHub| hub.fail_lists(fault, times);
        (name, end, Box::new(fail) as Break)
    });
    let mut trying = JoinSet::new();
    for (name, end, fail) in of_files.chain(of_lists) {
        if trying.len() >= FAULTS_AT_ONCE {
            broken.extend(trying.join_next().await.unwrap().unwrap());
        }
        let whole = Arc::clone(&whole);
        trying.spawn(async move {
            let hub = FakeHub::start();
            hub.put(FILE, whole.to_vec());
            fail(&hub);
            tried(&hub, &name, end, &whole).await
        });
    }
    broken.extend(trying.join_all().await.into_iter().flatten());
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_changes_midway_is_not_mixed() {
    let old = bytes(FILE_BYTES, 1);
    for change in [Fault::Change, Fault::ChangeSilently, Fault::Shrink] {
        let hub = FakeHub::start();
        hub.put(FILE, old.clone());
        let dir = tempfile::tempdir().unwrap();
        // Some ranges are there before.
        hub.fail(Fault::CutAfter(10_000), EVER);
        pull(&hub, "o/r", dir.path()).await.unwrap_err();
        hub.fail_once_listed(change.clone());
        let error = pull(&hub, "o/r", dir.path()).await.unwrap_err();
        assert!(
            ["CHANGED", "BAD_CHECKSUM", "LENGTH"].contains(&error.word()),
            "{change:?}: {error}"
        );
        assert!(files(dir.path()).is_empty(), "{change:?}");
        hub.heal();
        let pulled = pull(&hub, "o/r", dir.path()).await.unwrap();
        let found = fs::read(&pulled[0].path).unwrap();
        assert_ne!(found, old);
        assert_eq!(pulled[0].sha256.as_deref(), Some(&*sha256(&found)));
    }
}

/// Bytes that were asked of a hub with this token: requests of a download that ended early may
/// arrive while the next one runs.
fn asked_bytes(hub: &FakeHub, token: &str) -> u64 {
    let bearer = format!("Bearer {token}");
    let seen = hub.seen().into_iter();
    let of_token = seen.filter(|seen| seen.headers.get("authorization") == Some(&bearer));
    let ranges = of_token.filter_map(|seen| {
        let range = seen
            .headers
            .get("range")?
            .strip_prefix("bytes=")?
            .to_owned();
        let (first, last) = range.split_once('-')?;
        Some(last.parse::<u64>().unwrap() + 1 - first.parse::<u64>().unwrap())
    });
    ranges.sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_download_that_was_cancelled_goes_on_where_it_was() {
    let hub = FakeHub::start();
    let whole = bytes(FILE_BYTES, 2);
    hub.put(FILE, whole.clone());
    let dir = tempfile::tempdir().unwrap();
    // Each range stops after a while.
    hub.fail(Fault::CutAfter(10_000), EVER);
    pull(&hub, "o/r", dir.path()).await.unwrap_err();
    hub.heal();
    hub.forget();
    let planned = Arc::new(Mutex::new(0));
    let heard = Arc::clone(&planned);
    let listener: Listener = Arc::new(move |event| {
        if let Event::Planned { files, .. } = event {
            *heard.lock().unwrap() = files[0].have;
        }
    });
    let source = Source::parse("o/r").unwrap();
    let second = Config {
        token: Some(super::token("second").unwrap()),
        ..config(&hub)
    };
    let pulled = Hub::new(second)
        .pull(&source, dir.path(), Scope::default(), listener)
        .await
        .unwrap();
    assert_eq!(fs::read(&pulled[0].path).unwrap(), whole);
    let had = *planned.lock().unwrap();
    // How much the other ranges had when the first gave up, is a matter of time.
    assert!(had > 0, "nothing was kept of the first download");
    assert_eq!(
        asked_bytes(&hub, "second"),
        FILE_BYTES as u64 - had,
        "nothing is downloaded twice"
    );
    hub.forget();
    let again = pull(&hub, "o/r", dir.path()).await.unwrap();
    assert!(again[0].was_there && asked_bytes(&hub, "secret") == 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_of_other_bytes_is_replaced_and_one_of_the_same_is_not() {
    let hub = FakeHub::start();
    let whole = bytes(FILE_BYTES, 3);
    hub.put(FILE, whole.clone());
    let dir = tempfile::tempdir().unwrap();
    let dest = dir.path().join(FILE);
    fs::create_dir_all(dest.parent().unwrap()).unwrap();
    // Nobody noted where it came from.
    fs::write(&dest, &whole).unwrap();
    assert!(pull(&hub, "o/r", dir.path()).await.unwrap()[0].was_there);
    fs::write(&dest, bytes(FILE_BYTES, 4)).unwrap();
    assert!(!pull(&hub, "o/r", dir.path()).await.unwrap()[0].was_there);
    assert_eq!(fs::read(&dest).unwrap(), whole);
    // A new version on the hub, of the same length.
    hub.put(FILE, bytes(FILE_BYTES, 5));
    assert!(!pull(&hub, "o/r", dir.path()).await.unwrap()[0].was_there);
    assert_eq!(fs::read(&dest).unwrap(), bytes(FILE_BYTES, 5));
    let note = crate::store::noted(&dest).unwrap();
    assert_eq!(note.sha256, sha256(&bytes(FILE_BYTES, 5)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_token_goes_to_the_hub_alone() {
    let (hub, cdn) = (FakeHub::start(), FakeHub::start());
    for each in [&hub, &cdn] {
        each.put(FILE, bytes(FILE_BYTES, 6));
    }
    hub.lead_to(&cdn);
    let dir = tempfile::tempdir().unwrap();
    pull(&hub, "o/r", dir.path()).await.unwrap();
    let to_hub = hub.seen();
    assert!(
        to_hub
            .iter()
            .all(|seen| seen.headers["authorization"] == "Bearer secret")
    );
    assert!(to_hub.len() > 3 && !cdn.seen().is_empty());
    assert!(
        cdn.seen()
            .iter()
            .all(|seen| !seen.headers.contains_key("authorization")),
        "another port is another"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_files_of_a_model_come_and_only_these() {
    let hub = FakeHub::start();
    let names = [
        "Q8_0/big-Q8_0-00001-of-00002.gguf",
        "Q8_0/big-Q8_0-00002-of-00002.gguf",
        "mmproj-F16.gguf",
        "mtp-big-Q8_0.gguf",
        "README.md",
        "big-Q2_K.gguf",
    ];
    for (n, name) in names.iter().enumerate() {
        hub.put(&format!("o/r/{name}"), bytes(100 + n, n as u64));
    }
    let dir = tempfile::tempdir().unwrap();
    pull(&hub, "hf.co/o/r:Q8_0", dir.path()).await.unwrap();
    let expected =
        [names[0], names[1], names[2], names[3]].map(|name| dir.path().join("o/r").join(name));
    let found = files(dir.path());
    assert_eq!(found.len(), 4, "{found:?}");
    assert!(
        expected.iter().all(|path| found.contains(path)),
        "{found:?}"
    );
    let listed = Hub::new(config(&hub))
        .list(&Source::parse("o/r").unwrap())
        .await
        .unwrap();
    let tags: Vec<_> = listed
        .iter()
        .map(|group| (group.tag.as_str(), group.bytes()))
        .collect();
    assert_eq!(
        tags,
        [("Q8_0", 201), ("Q2_K", 105), ("F16", 102), ("Q8_0", 103)]
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_of_a_registry_and_addresses_of_files_work() {
    let hub = FakeHub::start();
    let whole = bytes(FILE_BYTES, 7);
    hub.put("library/llama3.2:3b", whole.clone());
    let dir = tempfile::tempdir().unwrap();
    let pulled = pull(&hub, "llama3.2:3b", dir.path()).await.unwrap();
    assert_eq!(
        pulled[0].path,
        dir.path()
            .canonicalize()
            .unwrap()
            .join("ollama/llama3.2:3b.gguf")
    );
    assert!(pulled[0].verified && fs::read(&pulled[0].path).unwrap() == whole);
    hub.fail_lists(ListFault::WrongSha, EVER);
    let missing = pull(&hub, "llama3.2:3b", dir.path()).await.unwrap_err();
    assert_eq!(missing.word(), "NOT_FOUND", "the old file stays: {missing}");
    assert!(pulled[0].path.exists());
    hub.heal();
    assert_eq!(
        pull(&hub, "llama3.2:70b", dir.path())
            .await
            .unwrap_err()
            .word(),
        "NOT_FOUND"
    );
    // Split, with spaces, and without a checksum.
    for (n, part) in ["s p-00001-of-00002.gguf", "s p-00002-of-00002.gguf"]
        .iter()
        .enumerate()
    {
        hub.put(part, bytes(200_000, 8 + n as u64));
    }
    let url = format!(
        "{}/plain/s%20p-00001-of-00002.gguf?download=true",
        hub.url()
    );
    let pulled = pull(&hub, &url, dir.path()).await.unwrap();
    assert_eq!(pulled.len(), 2);
    assert!(!pulled[0].verified, "nobody said what it should be");
    assert_eq!(
        fs::read(dir.path().join("s p-00002-of-00002.gguf")).unwrap(),
        bytes(200_000, 9)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn room_is_looked_for_first_and_a_file_is_downloaded_by_one_at_a_time() {
    let hub = FakeHub::start();
    hub.put(FILE, bytes(FILE_BYTES, 10));
    let dir = tempfile::tempdir().unwrap();
    let source = Source::parse("o/r").unwrap();
    let cramped = Config {
        spare_bytes: u64::MAX / 2,
        ..config(&hub)
    };
    let refused = Hub::new(cramped)
        .pull(&source, dir.path(), Scope::default(), silent())
        .await;
    assert_eq!(refused.unwrap_err().word(), "NO_SPACE");
    assert!(files(dir.path()).is_empty() && asked_bytes(&hub, "secret") == 0);
    hub.fail(Fault::Drip(4096, 200), EVER);
    let second = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        pull(&hub, "o/r", dir.path()).await
    };
    // The first takes ten seconds, and ends here with the second.
    tokio::select! {
        first = pull(&hub, "o/r", dir.path()) => panic!("it ended first: {first:?}"),
        second = second => assert_eq!(second.unwrap_err().word(), "BUSY"),
    }
    hub.heal();
    pull(&hub, "o/r", dir.path()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_journal_of_other_bytes_begins_anew() {
    let hub = FakeHub::start();
    let whole = bytes(FILE_BYTES, 11);
    hub.put(FILE, whole.clone());
    let dir = tempfile::tempdir().unwrap();
    let dest = dir.path().join(FILE);
    fs::create_dir_all(dest.parent().unwrap()).unwrap();
    for (part, journal) in [
        (&b"short"[..], "not JSON"),
        (&vec![7; FILE_BYTES][..], "{}"),
        (
            &vec![7; FILE_BYTES * 2][..],
            r#"{"version":1,"url":"","bytes":1,"sha256":null,"etag":null,"spans":[[0,1]]}"#,
        ),
    ] {
        fs::write(dir.path().join(format!("{FILE}.part")), part).unwrap();
        fs::write(dir.path().join(format!("{FILE}.part.json")), journal).unwrap();
        pull(&hub, "o/r", dir.path()).await.unwrap();
        assert_eq!(fs::read(&dest).unwrap(), whole);
        assert_eq!(files(dir.path()), std::slice::from_ref(&dest));
        remove(dir.path(), Path::new(FILE)).unwrap();
        fs::create_dir_all(dest.parent().unwrap()).unwrap();
    }
}
