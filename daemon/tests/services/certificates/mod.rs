//! Certificates for 127.0.0.1 and localhost that sign themselves, each with a key of its
//! own, made as they are needed.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair};

const INTEGER: u8 = 0x02;
const BIT_STRING: u8 = 0x03;
const OCTET_STRING: u8 = 0x04;
const OBJECT: u8 = 0x06;
const UTF8: u8 = 0x0c;
const UTC_TIME: u8 = 0x17;
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const EXPLICIT_0: u8 = 0xa0;
const EXPLICIT_3: u8 = 0xa3;
/// Kinds of alternative names.
const DNS: u8 = 0x82;
const ADDRESS: u8 = 0x87;

const ECDSA_WITH_SHA256: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2];
const EC_PUBLIC_KEY: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 2, 1];
const P256: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 3, 1, 7];
const COMMON_NAME: &[u8] = &[0x55, 4, 3];
const ALTERNATIVE_NAMES: &[u8] = &[0x55, 0x1d, 0x11];

/// One of DER's values.
fn der(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let content = parts.concat();
    let mut value = vec![tag];
    match content.len() {
        n @ 0..0x80 => value.push(n as u8),
        n @ 0x80..0x100 => value.extend([0x81, n as u8]),
        n => value.extend([0x82, (n >> 8) as u8, n as u8]),
    }
    value.extend(content);
    value
}

fn pem(label: &str, der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let lines = text.as_bytes().chunks(64).map(String::from_utf8_lossy);
    let lines: Vec<_> = lines.collect();
    format!(
        "-----BEGIN {label}-----\n{}\n-----END {label}-----\n",
        lines.join("\n")
    )
}

/// A certificate and its key.
pub(crate) struct Made {
    pub(crate) certificate: Vec<u8>,
    key: Vec<u8>,
}

impl Made {
    pub(crate) fn new() -> Self {
        Self::valid("200101000000Z", "491231235959Z")
    }

    /// One that is valid from the first time to the second.
    pub(crate) fn valid(from: &str, to: &str) -> Self {
        let random = SystemRandom::new();
        let algorithm = &ECDSA_P256_SHA256_ASN1_SIGNING;
        let key = EcdsaKeyPair::generate_pkcs8(algorithm, &random).unwrap();
        let key = key.as_ref().to_vec();
        let pair = EcdsaKeyPair::from_pkcs8(algorithm, &key, &random).unwrap();

        let signed_with = der(SEQUENCE, &[&der(OBJECT, &[ECDSA_WITH_SHA256])]);
        let common = der(
            SEQUENCE,
            &[&der(OBJECT, &[COMMON_NAME]), &der(UTF8, &[b"a test"])],
        );
        let name = der(SEQUENCE, &[&der(SET, &[&common])]);
        let times = [from, to].map(|time| der(UTC_TIME, &[time.as_bytes()]));
        let kind = der(
            SEQUENCE,
            &[&der(OBJECT, &[EC_PUBLIC_KEY]), &der(OBJECT, &[P256])],
        );
        let public = der(BIT_STRING, &[&[0], pair.public_key().as_ref()]);
        let names = der(
            SEQUENCE,
            &[
                &der(DNS, &[b"localhost"]),
                &der(ADDRESS, &[&[127, 0, 0, 1]]),
            ],
        );
        let extension = der(
            SEQUENCE,
            &[
                &der(OBJECT, &[ALTERNATIVE_NAMES]),
                &der(OCTET_STRING, &[&names]),
            ],
        );
        let body = der(
            SEQUENCE,
            &[
                &der(EXPLICIT_0, &[&der(INTEGER, &[&[2]])]),
                &der(INTEGER, &[&[1]]),
                &signed_with,
                &name,
                &der(SEQUENCE, &[&times[0], &times[1]]),
                &name,
                &der(SEQUENCE, &[&kind, &public]),
                &der(EXPLICIT_3, &[&der(SEQUENCE, &[&extension])]),
            ],
        );
        let signature = pair.sign(&random, &body).unwrap();
        let signature = der(BIT_STRING, &[&[0], signature.as_ref()]);
        Self {
            certificate: der(SEQUENCE, &[&body, &signed_with, &signature]),
            key,
        }
    }

    /// Writes both as PEM, the key for its owner alone, and gives their paths.
    pub(crate) fn write(&self, dir: &Path) -> (PathBuf, PathBuf) {
        let (certificate, key) = (dir.join("cert.pem"), dir.join("key.pem"));
        fs::write(&certificate, pem("CERTIFICATE", &self.certificate)).unwrap();
        fs::write(&key, pem("PRIVATE KEY", &self.key)).unwrap();
        fs::set_permissions(&key, Permissions::from_mode(0o600)).unwrap();
        (certificate, key)
    }
}
