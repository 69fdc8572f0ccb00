//! Files from hosts that are allowed, from others, and from servers that misbehave.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::TryRecvError;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;

const BOUNDS: FetchBounds = FetchBounds {
    bytes: 1000,
    time: Duration::from_secs(20),
};

fn hosts(patterns: &[&str]) -> Hosts {
    let patterns: Vec<String> = patterns.iter().map(|&pattern| pattern.into()).collect();
    Hosts::new(&patterns).unwrap()
}

/// One that may reach this machine, to have a server that it reaches.
fn fetcher() -> Fetcher {
    Fetcher {
        is_public: |_| true,
        ..Fetcher::new(hosts(&["127.0.0.1", "localhost"]))
    }
}

async fn fetch(fetcher: &Fetcher, url: &str, bounds: FetchBounds) -> Result<Vec<u8>, FetchError> {
    let mut bytes = Vec::new();
    fetcher.fetch(url, bounds, &mut bytes).await?;
    Ok(bytes)
}

/// A server that gives each connection the next of these answers, and its port.
async fn server(answers: Vec<String>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        for answer in answers {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut asked = [0; 4096];
            let n = stream.read(&mut asked).await.unwrap();
            assert!(asked[..n].starts_with(b"GET /"), "{asked:?}");
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    });
    port
}

fn answer(status: &str, headers: &str, body: &str) -> String {
    let n = body.len();
    format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {n}\r\nConnection: close\r\n\r\n{body}")
}

#[tokio::test]
async fn a_file_is_fetched_from_an_allowed_host_and_where_it_leads() {
    let fetcher = fetcher();
    let port = server(vec![answer(
        "200 OK",
        "Content-Type: image/png\r\n",
        "bytes",
    )])
    .await;
    let url = format!("http://127.0.0.1:{port}/a.png?b=c#d");
    assert_eq!(fetch(&fetcher, &url, BOUNDS).await.unwrap(), b"bytes");
    let second = server(vec![answer("200 OK", "", "more")]).await;
    let to = format!("Location: http://localhost:{second}/x\r\n");
    let first = server(vec![
        answer("302 Found", "Location: next\r\n", ""),
        answer("307 Go", &to, ""),
    ])
    .await;
    let url = format!("http://127.0.0.1:{first}/dir/a");
    assert_eq!(fetch(&fetcher, &url, BOUNDS).await.unwrap(), b"more");
}

#[tokio::test]
async fn addresses_that_are_not_public_are_refused_however_they_are_written() {
    let all = Fetcher::new(hosts(&["*"]));
    for host in [
        "127.0.0.1",
        "169.254.169.254",
        "10.0.0.1",
        "172.31.255.1",
        "192.168.1.1",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:169.254.169.254]",
        "[64:ff9b::a00:1]",
        "[fe80::1]",
        "[fd00::1]",
        "[ff02::1]",
        "[2002:7f00:1::]",
    ] {
        for scheme in ["http", "https"] {
            let url = format!("{scheme}://{host}/a.png");
            let error = fetch(&all, &url, BOUNDS).await.unwrap_err();
            let is_refused = matches!(error, FetchError::NotPublic { .. });
            assert!(is_refused, "{url}: {error}");
        }
    }
    // Names for such addresses, which nobody is told.
    for name in [
        "2130706433",
        "0x7f.1",
        "127.1",
        "0177.0.0.1",
        "017700000001",
        "localhost",
        "localhost.",
        "no-such-name.invalid",
    ] {
        let url = format!("http://{name}/a.png");
        let error = fetch(&all, &url, BOUNDS).await.unwrap_err();
        let host = name.to_owned();
        assert_eq!(error, FetchError::Unreachable { host });
    }
    for address in ["8.8.8.8", "172.32.0.1", "100.128.0.1", "198.20.0.1"] {
        assert!(is_public(address.parse().unwrap()), "{address}");
    }
    for address in ["2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"] {
        assert!(is_public(address.parse().unwrap()), "{address}");
    }
    for address in ["2001:db8::1", "2001::1", "3fff::1", "100::1", "198.19.0.1"] {
        assert!(!is_public(address.parse().unwrap()), "{address}");
    }
}

#[tokio::test]
async fn a_name_with_a_private_address_is_refused_also_behind_a_redirect() {
    // The first address is taken for a public one.
    let careful = Fetcher {
        is_public: |address| address.to_string() == "127.0.0.1",
        ..Fetcher::new(hosts(&["*"]))
    };
    for to in [
        "http://169.254.169.254/latest/meta-data",
        "http://127.0.0.2:1/",
        "//10.1.2.3/",
        "http://[::1]/",
    ] {
        let header = format!("Location: {to}\r\n");
        let port = server(vec![answer("302 Found", &header, "")]).await;
        let url = format!("http://127.0.0.1:{port}/a");
        let error = fetch(&careful, &url, BOUNDS).await.unwrap_err();
        assert!(
            matches!(error, FetchError::NotPublic { .. }),
            "{to}: {error}"
        );
    }
    let port = server(vec![answer(
        "302 Found",
        "Location: http://other.example/\r\n",
        "",
    )])
    .await;
    let url = format!("http://127.0.0.1:{port}/a");
    let error = fetch(&fetcher(), &url, BOUNDS).await.unwrap_err();
    let host = "other.example".to_owned();
    assert_eq!(error, FetchError::NotAllowed { host });
}

#[tokio::test]
async fn a_name_is_looked_up_once_and_an_address_never() {
    let names = Arc::new(Mutex::new(Vec::new()));
    let asked = Arc::clone(&names);
    let resolve: Resolve = Arc::new(move |name| {
        let mut asked = asked.lock().unwrap();
        asked.push(name.to_owned());
        // Another look finds another address, as where somebody wants to lead us astray.
        let address = if asked.len() == 1 {
            "127.0.0.1"
        } else {
            "169.254.169.254"
        };
        Ok(vec![address.parse().unwrap()])
    });
    let fetcher = Fetcher {
        is_public: |address| address.is_loopback(),
        resolve,
        ..Fetcher::new(hosts(&["*"]))
    };
    let second = server(vec![answer("200 OK", "", "bytes")]).await;
    let to = format!("Location: http://127.0.0.1:{second}/x\r\n");
    let first = server(vec![answer("302 Found", &to, "")]).await;
    let url = format!("http://a.example:{first}/a");
    assert_eq!(fetch(&fetcher, &url, BOUNDS).await.unwrap(), b"bytes");
    assert_eq!(*names.lock().unwrap(), ["a.example"]);
    let error = fetch(&fetcher, &url, BOUNDS).await.unwrap_err();
    assert!(matches!(error, FetchError::Unreachable { .. }), "{error}");
    assert_eq!(names.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn look_ups_that_do_not_end_occupy_few_threads() {
    let running = Arc::new(AtomicUsize::new(0));
    let (let_go, ends) = std::sync::mpsc::channel::<()>();
    let (counted, ends) = (Arc::clone(&running), Mutex::new(ends));
    let fetcher = Fetcher {
        resolve: Arc::new(move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
            // Until the sender is gone.
            let is_open = || ends.lock().unwrap().try_recv() != Err(TryRecvError::Disconnected);
            while is_open() {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(Vec::new())
        }),
        ..Fetcher::new(hosts(&["*"]))
    };
    let hasty = FetchBounds {
        time: Duration::from_millis(50),
        ..BOUNDS
    };
    for _ in 0..FETCH_THREADS + 2 {
        let error = fetch(&fetcher, "http://a.example/", hasty)
            .await
            .unwrap_err();
        assert!(matches!(error, FetchError::TooSlow { .. }), "{error}");
    }
    assert_eq!(running.load(Ordering::Relaxed), FETCH_THREADS);
    drop(let_go);
    // Hangs here if a permit is lost.
    let error = fetch(&fetcher, "http://a.example/", BOUNDS)
        .await
        .unwrap_err();
    assert!(matches!(error, FetchError::Unreachable { .. }), "{error}");
}

#[test]
fn nobody_is_led_from_https_to_http_and_a_url_in_a_query_is_none() {
    let fetcher = fetcher();
    let from = fetcher.place("https://localhost/a/b").unwrap();
    let error = fetcher.led(&from, "http://localhost/a").unwrap_err();
    assert!(error.to_string().contains("a redirect to http"), "{error}");
    for (to, expected) in [
        ("https://127.0.0.1/", "https://127.0.0.1/"),
        (
            "/login?next=https://x",
            "https://localhost/login?next=https://x",
        ),
    ] {
        let led = fetcher.led(&from, to).unwrap();
        assert_eq!(led.0.to_string(), expected);
    }
}

#[tokio::test]
async fn a_file_takes_no_more_memory_than_its_bound() {
    let long = "x".repeat(900);
    let counted = answer("200 OK", "", &long);
    let uncounted = format!("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{long}");
    for (sent, capacity) in [(counted, 900), (uncounted, 1000)] {
        let url = format!("http://127.0.0.1:{}/a", server(vec![sent]).await);
        let mut bytes = Vec::new();
        fetcher().fetch(&url, BOUNDS, &mut bytes).await.unwrap();
        assert_eq!((bytes.len(), bytes.capacity()), (900, capacity));
    }
}

#[tokio::test]
async fn bodies_without_an_end_and_slow_ones_are_given_up() {
    let endless = "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n".to_owned() + &"x".repeat(5000);
    let long = "HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n".to_owned();
    let host = || "127.0.0.1".to_owned();
    for body in [endless, long] {
        let url = format!("http://127.0.0.1:{}/a", server(vec![body]).await);
        let error = fetch(&fetcher(), &url, BOUNDS).await.unwrap_err();
        let expected = FetchError::TooLarge {
            host: host(),
            max: 1000,
        };
        assert_eq!(error, expected);
    }
    let max = Duration::from_millis(50);
    let hasty = FetchBounds {
        time: max,
        ..BOUNDS
    };
    // A head that never comes, and a body of which one byte comes.
    for sent in ["", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx"] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/a", listener.local_addr().unwrap());
        let serving = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(sent.as_bytes()).await.unwrap();
            std::future::pending::<()>().await;
        });
        let error = fetch(&fetcher(), &url, hasty).await.unwrap_err();
        assert_eq!(error, FetchError::TooSlow { host: host(), max });
        serving.abort();
    }
}

#[tokio::test]
async fn what_is_no_file_is_told() {
    let lead = |to: &str| answer("302 Found", &format!("Location: {to}\r\n"), "");
    for (answers, words) in [
        (vec![answer("404 Not Found", "", "")], "status 404"),
        (
            vec![answer("200 OK", "Content-Type: text/html\r\n", "a")],
            "content type",
        ),
        (
            vec![answer("200 OK", "Content-Encoding: gzip\r\n", "a")],
            "encoded",
        ),
        (vec![lead("")], "a redirect to nowhere"),
        (vec![lead("/again"); REDIRECTS_MAX + 1], "without an end"),
        (
            vec!["HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx".to_owned()],
            "ends early",
        ),
        (vec!["no HTTP\r\n\r\n".to_owned()], "cannot be reached"),
        (
            vec![lead("file:///etc/passwd")],
            "no URL that can be fetched",
        ),
        (
            vec![lead("http://user@127.0.0.1/")],
            "no URL that can be fetched",
        ),
    ] {
        let url = format!("http://127.0.0.1:{}/a", server(answers).await);
        let error = fetch(&fetcher(), &url, BOUNDS).await.unwrap_err();
        assert!(error.to_string().contains(words), "{words}: {error}");
    }
    for url in [
        "",
        "ftp://a/b",
        "http://",
        "http:///a",
        "http://a b/",
        "https://localhost@x/",
    ] {
        let error = fetch(&fetcher(), url, BOUNDS).await.unwrap_err();
        assert!(matches!(error, FetchError::BadUrl { .. }), "{url}: {error}");
    }
    let none = Fetcher::new(Hosts::default());
    assert!(!none.is_on());
    let error = fetch(&none, "https://a.example/", BOUNDS)
        .await
        .unwrap_err();
    assert!(error.to_string().contains("image_url_hosts"), "{error}");
}

#[test]
fn hosts_are_whole_names_or_ends_of_them() {
    let list = hosts(&["Images.example.org", "*.example.com", "[2606:4700::1111]"]);
    for host in [
        "images.example.org",
        "IMAGES.example.org.",
        "a.example.com",
        "a.b.example.com",
        "[2606:4700::1111]",
    ] {
        assert!(list.has(host), "{host}");
    }
    for host in [
        "example.org",
        "x.images.example.org",
        "example.com",
        "notexample.com",
        ".example.com",
        "a.example.com.evil.example",
        "",
    ] {
        assert!(!list.has(host), "{host}");
    }
    assert!(hosts(&["*"]).has("anything.example"));
    for bad in [
        "",
        "a b",
        "https://a.example",
        "a.example:80",
        "a*",
        "*",
        "*.",
        "\u{e9}",
    ] {
        let read = Hosts::new(&[bad.to_owned()]);
        assert_eq!(read.is_ok(), bad == "*", "{bad}");
    }
}
