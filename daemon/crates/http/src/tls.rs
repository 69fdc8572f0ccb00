//! The TLS certificate of HTTP addresses, and its private key.
//!
//! Both files are PEM. They are checked when they are read, at the start and at each reload: a
//! chain and the key of its first certificate, or a message that says what is wrong.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::{Error, InconsistentKeys, ServerConfig};
use webpki::{EndEntityCert, KeyUsage};

use super::small_file;

/// Maximum size of a file in bytes.
const FILE_MAX_BYTES: u64 = 256 << 10;
/// A certificate that expires within this time is reported in the log.
const SOON: Duration = Duration::from_secs(14 * 24 * 3600);
/// Maximum number of certificates of a chain.
const CHAIN_MAX: usize = 16;
/// The protocol spoken inside of TLS: only HTTP/1.1.
const PROTOCOL: &[u8] = b"http/1.1";

/// A certificate with its chain and key, ready to serve. Two values are equal if their bytes are.
#[derive(Clone)]
pub struct Tls {
    /// The file of the certificate and its chain.
    pub certificate_file: PathBuf,
    /// The file of the key.
    pub key_file: PathBuf,
    chain: Vec<CertificateDer<'static>>,
    key: Arc<PrivateKeyDer<'static>>,
    config: Arc<ServerConfig>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls")
            .field("certificate_file", &self.certificate_file)
            .field("key_file", &self.key_file)
            .finish_non_exhaustive()
    }
}

impl PartialEq for Tls {
    fn eq(&self, other: &Self) -> bool {
        self.chain == other.chain && self.key == other.key
    }
}

impl Eq for Tls {}

/// Which of the two TLS files is at fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsFault {
    /// The certificate file.
    Certificate,
    /// The key file.
    Key,
}

impl Tls {
    /// Reads both files.
    ///
    /// # Errors
    /// The file at fault, and a message that says what is wrong with it.
    pub fn read(certificate_file: &Path, key_file: &Path) -> Result<Self, (TlsFault, String)> {
        let (of_chain, of_key) = (|m| (TlsFault::Certificate, m), |m| (TlsFault::Key, m));
        let (shown, shown_key) = (certificate_file.display(), key_file.display());
        let text = text_of(certificate_file).map_err(of_chain)?;
        let chain = chain(&text).map_err(|message| of_chain(format!("{shown}: {message}")))?;
        let text = secret_of(key_file).map_err(of_key)?;
        let key = key(&text).map_err(|message| of_key(format!("{shown_key}: {message}")))?;
        let provider = Arc::new(default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| of_chain(error.to_string()))?
            .with_no_client_auth()
            .with_single_cert(chain.clone(), key.clone_key());
        let mut config = config.map_err(|error| match error {
            Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => of_key(format!(
                "{shown_key} is not the key of the first certificate in {shown}; that has to be the server's own, with \
                 the certificates of who signed it behind it"
            )),
            Error::InvalidCertificate(error) => {
                of_chain(format!("{shown}: the first certificate cannot be used: {error}"))
            }
            error => of_key(format!("{shown_key}: the key cannot be used: {error}")),
        })?;
        config.alpn_protocols = vec![PROTOCOL.to_vec()];
        Ok(Self {
            certificate_file: certificate_file.to_owned(),
            key_file: key_file.to_owned(),
            chain,
            key: Arc::new(key),
            config: Arc::new(config),
        })
    }

    /// A warning about the certificate's validity period, if it is over or nearly so; the
    /// certificate is served anyway, since a client may not mind.
    pub fn warning(&self, now: SystemTime) -> Option<String> {
        let since = now.duration_since(SystemTime::UNIX_EPOCH).ok()?;
        let shown = self.certificate_file.display();
        // None of the others can be told without the authorities that clients trust.
        let verdict = |since: Duration| {
            let certificate = EndEntityCert::try_from(self.chain.first()?).ok()?;
            let at = UnixTime::since_unix_epoch(since);
            let usage = KeyUsage::server_auth();
            let verified = certificate.verify_for_usage(&[], &[], &[], at, usage, None, None);
            verified.err()
        };
        const RENEW: &str = "clients refuse it; renew it and reload the daemon";
        match verdict(since) {
            Some(webpki::Error::CertExpired { not_after, .. }) => Some(format!(
                "the certificate in {shown} expired on {}: {RENEW}",
                date(not_after)
            )),
            Some(webpki::Error::CertNotValidYet { not_before, .. }) => Some(format!(
                "the certificate in {shown} is valid only from {} on: clients refuse it until then; check the clock of \
                 this machine, or take another certificate",
                date(not_before)
            )),
            _ => match verdict(since.saturating_add(SOON)) {
                Some(webpki::Error::CertExpired { not_after, .. }) => Some(format!(
                    "the certificate in {shown} expires on {}; renew it and reload the daemon",
                    date(not_after)
                )),
                _ => None,
            },
        }
    }

    /// The TLS configuration for handshakes.
    pub(super) fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config)
    }
}

/// A time formatted for display, in UTC.
fn date(time: UnixTime) -> String {
    let seconds = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    match jiff::Timestamp::from_second(seconds) {
        Ok(time) => time.to_string(),
        Err(_) => format!("{seconds} s after 1970"),
    }
}

fn chain(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    let found = found.map_err(|error| not_pem(&error))?;
    match found.len() {
        0 => Err(
            "no certificate is in it; give PEM, which begins with -----BEGIN CERTIFICATE-----"
                .to_owned(),
        ),
        1..=CHAIN_MAX => Ok(found),
        n => Err(format!("{n} certificates; a chain has at most {CHAIN_MAX}")),
    }
}

fn key(text: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    match PrivateKeyDer::from_pem_slice(text) {
        Ok(key) => Ok(key),
        Err(pem::Error::NoItemsFound) => {
            let is_encrypted = String::from_utf8_lossy(text).contains("ENCRYPTED");
            Err(match is_encrypted {
                true => "the key is encrypted, and the daemon cannot ask for the password (openssl pkey -in FILE decrypts it)",
                false => "no key is in it (-----BEGIN PRIVATE KEY-----)",
            }
            .to_owned())
        }
        Err(error) => Err(not_pem(&error)),
    }
}

fn not_pem(error: &pem::Error) -> String {
    format!("it is not PEM: {error}")
}

/// Reads a file of the size that keys and certificates have.
fn text_of(path: &Path) -> Result<Vec<u8>, String> {
    small_file::read(path, FILE_MAX_BYTES, None)
}

/// Reads a file that other users must not be able to read.
fn secret_of(path: &Path) -> Result<Vec<u8>, String> {
    let what_to_do = "chmod 0640 or 0600 it, and take a new key";
    small_file::read(path, FILE_MAX_BYTES, Some(what_to_do))
}
