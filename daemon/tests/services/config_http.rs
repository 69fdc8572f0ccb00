//! Settings of HTTP: where it is served, to whom, and with which certificate.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rocmforged::config::{Config, Values};

use super::certificates::Made;
use super::settings::{config, file};

#[test]
fn http_is_served_where_it_was_asked_for_and_nowhere_else() {
    let none = config(&[]).unwrap();
    assert_eq!(none.values.http_socket, None);
    assert!(none.values.http_listen.is_empty());
    assert_eq!(none.http.tokens, None);

    let text = r#"
        http_socket = "/run/http.sock"
        http_listen = "127.0.0.1:8080"
    "#;
    let both = file(text, &["--http-listen", "[::1]:9"]).unwrap().values;
    assert_eq!(
        both.http_socket.as_deref(),
        Some(Path::new("/run/http.sock"))
    );
    assert_eq!(listened(&both), ["[::1]:9"]);

    let refused = |arguments: &[&str], mentions: &[&str]| {
        let message = config(arguments).unwrap_err().to_string();
        for word in mentions {
            assert!(message.contains(word), "'{message}' lacks '{word}'");
        }
    };
    refused(
        &["--http-listen", "localhost"],
        &["--http-listen", "127.0.0.1:8080"],
    );
    refused(
        &["--http-listen", "0.0.0.0:80"],
        &[
            "--http-listen",
            "--http-token-file",
            "--http-tls-cert",
            "127.0.0.1",
        ],
    );
    refused(
        &["--socket", "/x", "--http-socket", "/x"],
        &["--http-socket", "gRPC"],
    );
    refused(
        &["--http-token-file", "/no/such/file"],
        &["--http-token-file", "/no/such/file"],
    );

    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    let path = token.to_str().unwrap();
    std::fs::write(&token, "0123456789abcdef\n").unwrap();
    std::fs::set_permissions(&token, PermissionsExt::from_mode(0o600)).unwrap();
    let (certificate, key) = Made::new().write(dir.path());
    let tls = ["--http-tls-cert", certificate.to_str().unwrap()];
    let tls = [&tls[..], &["--http-tls-key", key.to_str().unwrap()]].concat();
    for open in ["0.0.0.0:80", "[::]:80", "192.0.2.1:80"] {
        let open = ["--http-listen", open];
        let with_token = [&open[..], &["--http-token-file", path]].concat();
        refused(
            &with_token,
            &["--http-listen", "without TLS", "http_tls_cert"],
        );
        let with_tls = [&open[..], &tls].concat();
        refused(&with_tls, &["--http-listen", "no token", "http_token_file"]);
        let both = config(&[&with_token[..], &tls].concat()).unwrap().http;
        assert!(both.tokens.is_some() && both.tls.is_some());
    }
    std::fs::write(&token, "short").unwrap();
    refused(&["--http-token-file", path], &["--http-token-file", "16"]);
}

/// What HTTP listens on, as it is written.
fn listened(values: &Values) -> Vec<String> {
    values.http_listen.iter().map(ToString::to_string).collect()
}

#[test]
fn http_is_served_on_several_addresses_and_names() {
    let list = r#"http_listen = ["localhost:8080", "127.0.0.1:9", "localhost:8080"]"#;
    let config = file(list, &[]).unwrap();
    assert_eq!(listened(&config.values), ["localhost:8080", "127.0.0.1:9"]);
    assert!(
        config
            .describe()
            .contains(r#"http_listen = ["localhost:8080", "127.0.0.1:9"]"#),
        "{}",
        config.describe()
    );
    let one = file(r#"http_listen = "127.0.0.1:9, [::1]:9""#, &[]).unwrap();
    assert_eq!(listened(&one.values), ["127.0.0.1:9", "[::1]:9"]);
    let flags = ["--http-listen", "127.0.0.1:1", "--http-listen", "[::1]:2"];
    let flags = file(list, &flags).unwrap();
    assert_eq!(listened(&flags.values), ["127.0.0.1:1", "[::1]:2"]);

    // A name is all its addresses; one that two entries lead to is there once.
    let text = r#"http_listen = ["127.0.0.1:8080", "localhost:8080"]"#;
    let addresses = file(text, &[]).unwrap().http_addresses().unwrap();
    let v4 = addresses.iter().filter(|(address, _)| address.is_ipv4());
    assert_eq!(v4.count(), 1, "{addresses:?}");
    assert!(
        addresses
            .iter()
            .all(|(address, _)| address.ip().is_loopback())
    );

    for (entries, words) in [
        (
            r#"["127.0.0.1:1", "localhost"]"#,
            &["'localhost'", "localhost:8080"][..],
        ),
        (
            r#"["127.0.0.1:1", "0.0.0.0:80"]"#,
            &["0.0.0.0:80", "neither a token"],
        ),
        (r#""*:80""#, &["0.0.0.0:80 and [::]:80"]),
        (r#""""#, &["'' is no address"]),
        ("5", &["a text, or a list of texts"]),
    ] {
        let error = file(&format!("http_listen = {entries}"), &[]).unwrap_err();
        let error = format!("{:#}", anyhow::Error::from(error));
        for word in words {
            assert!(error.contains(word), "'{error}' lacks '{word}'");
        }
    }
    let many: Vec<_> = (1..=17).map(|port| format!("\"[::1]:{port}\"")).collect();
    let error = file(&format!("http_listen = [{}]", many.join(",")), &[]).unwrap_err();
    assert!(error.to_string().contains("at most 16"), "{error}");

    let nowhere = config_of("nobody.invalid:80").http_addresses().unwrap_err();
    assert!(
        nowhere.to_string().contains("nobody.invalid:80"),
        "{nowhere}"
    );
}

fn config_of(address: &str) -> Config {
    config(&["--http-listen", address]).unwrap()
}

#[test]
fn a_certificate_that_cannot_be_served_is_refused_with_its_file_and_cause() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (certificate, key) = Made::new().write(dir.path());
    let (_, other_key) = Made::new().write(other.path());
    let refused = |certificate: &Path, key: &Path, flag: &str, words: &[&str]| {
        let arguments = [
            format!("--http-tls-cert={}", certificate.display()),
            format!("--http-tls-key={}", key.display()),
        ];
        let error = config(&arguments.each_ref().map(String::as_str)).unwrap_err();
        let error = error.to_string();
        assert!(error.starts_with(&format!("{flag}: ")), "{error}");
        for word in words {
            assert!(error.contains(word), "'{error}' lacks '{word}'");
        }
    };
    let (of_certificate, of_key) = ("--http-tls-cert", "--http-tls-key");
    refused(
        &certificate,
        &other_key,
        of_key,
        &["is not the key of the first"],
    );
    refused(
        &key,
        &certificate,
        of_certificate,
        &["no certificate is in it"],
    );
    refused(dir.path(), &key, of_certificate, &["not a regular file"]);
    let none = dir.path().join("none");
    refused(&none, &key, of_certificate, &["cannot be read"]);
    refused(&certificate, &none, of_key, &["cannot be read"]);
    let written = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        path
    };
    let text = std::fs::read_to_string(&key).unwrap();
    let encrypted = written("encrypted", &text.replace("PRIVATE", "ENCRYPTED PRIVATE"));
    refused(&certificate, &encrypted, of_key, &["encrypted", "openssl"]);
    let broken = written("broken", &text.replace("-----END", "----END"));
    refused(&certificate, &broken, of_key, &["not PEM"]);
    let odd = "-----BEGIN CERTIFICATE-----\nbm90aGluZw==\n-----END CERTIFICATE-----\n";
    let odd = written("odd", odd);
    refused(&odd, &key, of_certificate, &["cannot be used"]);
    let long = written("long", &"x".repeat(300 << 10));
    refused(&long, &key, of_certificate, &["more than 262144 bytes"]);
    std::fs::set_permissions(&key, PermissionsExt::from_mode(0o644)).unwrap();
    refused(&certificate, &key, of_key, &["open to every user"]);

    let alone = format!("--http-tls-cert={}", certificate.display());
    let error = config(&[&alone]).unwrap_err().to_string();
    assert!(error.contains("--http-tls-key"), "{error}");
    let text = format!("http_tls_key = {key:?}");
    let error = file(&text, &[]).unwrap_err().to_string();
    assert!(error.contains("http_tls_key in") && error.contains("--http-tls-cert"));
}
