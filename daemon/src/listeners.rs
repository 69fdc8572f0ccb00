//! Opens the sockets that the settings name.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::process::Command;

use anyhow::Context as _;
use socket2::{Domain, Protocol, Socket as Socket2, Type};

use crate::addresses::ListenAddress;
use crate::config::Config;
use crate::passed::{self, Passed};
use crate::socket::Socket;
use crate::{Allowed, HttpListeners, ShownSetting};

/// The sockets of gRPC and HTTP, taken from the service manager if it passed some.
///
/// # Errors
/// A socket cannot be opened: [`NoNetwork`], [`SocketError`](crate::socket::SocketError),
/// errors of [`Config::http_addresses`], or a system error for an address.
pub fn listen(
    config: &Config,
    passed: &mut Passed,
) -> anyhow::Result<(Socket, Option<Socket>, HttpListeners)> {
    let mut bound = 0;
    let tcp = listen_tcp(config, passed, &mut bound)?;
    let http_socket = config.values.http_socket.as_deref().map(|path| {
        if let Some(unix) = passed.take_unix(path) {
            return Ok(Socket::passed(unix));
        }
        bound += 1;
        Socket::bind(path)
            .with_context(|| format!("cannot serve HTTP on {} (--http-socket)", path.display()))
    });
    let mut http_socket = http_socket.transpose()?;
    let socket = match passed.take_grpc()? {
        Some(unix) => Socket::passed(unix),
        None => Socket::bind(&config.values.socket)?,
    };
    let unix = http_socket.as_ref().map(Socket::listener).transpose()?;
    let stored = passed::store(&tcp, unix.as_ref());
    if stored && let Some(socket) = &mut http_socket {
        socket.leave_file();
    }
    let http = HttpListeners {
        kept: stored || bound == 0,
        unix,
        tcp,
        tokens: config.http.tokens.clone(),
        tls: config.http.tls.clone(),
        allowed: Allowed {
            origins: config.values.http_allow_origins.clone(),
            hosts: allowed_hosts(config),
        },
        pulls: config.pulls.clone(),
        image_hosts: config.values.image_url_hosts.clone(),
        settings: shown(config),
    };
    Ok((socket, http_socket, http))
}

/// The settings in force for the page `/ui`.
fn shown(config: &Config) -> Vec<ShownSetting> {
    let each = config.settings().into_iter().map(|setting| ShownSetting {
        key: setting.entry.key,
        value: setting.value,
        origin: setting
            .origin
            .map_or_else(|| "default".to_owned(), |origin| origin.to_string()),
        help: setting.entry.summary(),
    });
    each.collect()
}

/// The error that the service manager's sandbox gives the process no network.
#[derive(Debug, thiserror::Error)]
#[error(
    "the service may use no address of a network (RestrictAddressFamilies=, PrivateNetwork= of its unit), and http_listen = \
     \"{address}\" asks for one; allow it with the drop-in that the package brings: install -D -m 644 {DROP_IN} \
     /etc/systemd/system/rocmforged.service.d/network.conf && systemctl daemon-reload && systemctl restart rocmforged"
)]
pub struct NoNetwork {
    /// The address that cannot be served.
    pub address: SocketAddr,
}

/// Maximum number of connections that wait to be accepted, the same as std's.
const LISTEN_BACKLOG: i32 = 128;
/// Path of the example drop-in that gives the unit network access.
const DROP_IN: &str = "/usr/share/doc/rocmforged/examples/network.conf";

/// The listening sockets for all addresses of `http_listen`: those that were passed, and new ones,
/// which `bound` counts.
fn listen_tcp(
    config: &Config,
    passed: &mut Passed,
    bound: &mut usize,
) -> anyhow::Result<Vec<TcpListener>> {
    let addresses = config.http_addresses()?;
    let all: Vec<SocketAddr> = addresses.iter().map(|(address, _)| *address).collect();
    let mut tcp = Vec::new();
    for entry in &config.values.http_listen {
        let of_entry = addresses.iter().filter(|(_, by)| by == entry);
        let (mut served, mut skipped) = (0, None);
        for &(address, _) in of_entry {
            if let Some(there) = passed.take_tcp(address) {
                tcp.push(there);
                served += 1;
                continue;
            }
            match bind_tcp(address, &all) {
                Ok(made) => {
                    *bound += 1;
                    served += 1;
                    tcp.push(made);
                }
                // Of a name that leads to both families one may be off.
                Err(error) if entry.name().is_some() && has_no_family(&error) => {
                    tracing::warn!("{address}, to which {entry} leads, is left out: {error}");
                    skipped = Some((address, error));
                }
                Err(error) => return Err(unbound(entry, address, error)),
            }
        }
        if let (0, Some((address, error))) = (served, skipped) {
            return Err(unbound(entry, address, error));
        }
    }
    if !tcp.is_empty() && has_no_network() {
        tracing::warn!(
            "HTTP over TCP is reached from inside of the service alone: it has a network of its own \
             (PrivateNetwork=yes in its unit); the drop-in {DROP_IN} opens it"
        );
    }
    Ok(tcp)
}

/// Whether the error says that the machine or the service has no addresses of this family.
fn has_no_family(error: &io::Error) -> bool {
    let codes = [libc::EAFNOSUPPORT, libc::EADDRNOTAVAIL];
    error
        .raw_os_error()
        .is_some_and(|code| codes.contains(&code))
}

/// The error for an address that cannot be served.
fn unbound(entry: &ListenAddress, address: SocketAddr, error: io::Error) -> anyhow::Error {
    if error.raw_os_error() == Some(libc::EAFNOSUPPORT) {
        return NoNetwork { address }.into();
    }
    let by = match entry.name() {
        Some(_) => format!(", to which {entry} leads"),
        None => String::new(),
    };
    let is_taken = error.kind() == io::ErrorKind::AddrInUse;
    let mut why = anyhow::Error::from(error);
    if is_taken {
        why = why.context(
            "another program listens there; choose another port, or stop that program (`ss -ltnp` \
             lists them)",
        );
    }
    why.context(format!(
        "cannot serve HTTP on {address}{by} (--http-listen)"
    ))
}

/// Listens on an address. `[::]` also accepts IPv4, unless `all` contains the same port for IPv4.
fn bind_tcp(address: SocketAddr, all: &[SocketAddr]) -> io::Result<TcpListener> {
    let same_port = |other: &SocketAddr| other.is_ipv4() && other.port() == address.port();
    let is_apart = address.ip().is_unspecified() && all.iter().any(same_port);
    if address.is_ipv4() || !is_apart {
        return TcpListener::bind(address);
    }
    let socket = Socket2::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_only_v6(true)?;
    // As std does: a port whose last connections are not forgotten yet can be had again.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(LISTEN_BACKLOG)?;
    Ok(socket.into())
}

/// Host names of this machine that requests may use: configured ones, and those in `http_listen`.
fn allowed_hosts(config: &Config) -> Vec<String> {
    let listened = config.values.http_listen.iter();
    let listened = listened.filter_map(|entry| entry.name().map(str::to_owned));
    let configured = config.values.http_allow_hosts.iter().cloned();
    configured.chain(listened).collect()
}

/// Whether the process has no network but its own loopback interface.
fn has_no_network() -> bool {
    let devices = std::fs::read_to_string("/proc/self/net/dev").unwrap_or_default();
    let mut names = devices.lines().filter_map(|line| line.split_once(':'));
    std::env::var_os("INVOCATION_ID").is_some() && names.all(|(name, _)| name.trim() == "lo")
}

/// The error if the service manager would deny `address` to the service; for a check of the
/// settings before the service starts. Blocks while systemctl runs.
pub fn refused_by_unit(address: SocketAddr) -> Option<NoNetwork> {
    let asked = Command::new("systemctl")
        .args(["show", "rocmforged.service"])
        .arg("--property=LoadState,PrivateNetwork,RestrictAddressFamilies")
        .output();
    let shown = String::from_utf8_lossy(&asked.ok()?.stdout).into_owned();
    is_refused(&shown, address).then_some(NoNetwork { address })
}

/// Whether a unit with these properties cannot be reached at an address.
fn is_refused(shown: &str, address: SocketAddr) -> bool {
    let of = |name: &str| {
        let mut lines = shown.lines().filter_map(|line| line.split_once('='));
        lines.find_map(|(key, value)| (key == name).then_some(value))
    };
    let family = match address {
        SocketAddr::V4(_) => "AF_INET",
        SocketAddr::V6(_) => "AF_INET6",
    };
    let families = of("RestrictAddressFamilies").unwrap_or_default();
    let (is_denied, listed) = match families.strip_prefix('~') {
        Some(denied) => (true, denied),
        None => (false, families),
    };
    let is_listed = listed.split_whitespace().any(|one| one == family);
    let is_closed = !families.is_empty() && is_listed == is_denied;
    of("LoadState") == Some("loaded") && (is_closed || of("PrivateNetwork") == Some("yes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_units_network_is_told_by_its_properties() {
        let v4 = "127.0.0.1:8080".parse().unwrap();
        let v6 = "[::1]:8080".parse().unwrap();
        let shown = |state: &str, private: &str, families: &str| {
            format!(
                "LoadState={state}\nRestrictAddressFamilies={families}\nPrivateNetwork={private}\n"
            )
        };
        for (shown, of_v4, of_v6) in [
            (shown("loaded", "yes", "AF_NETLINK AF_UNIX"), true, true),
            (shown("loaded", "no", "AF_NETLINK AF_UNIX"), true, true),
            (shown("loaded", "yes", ""), true, true),
            (shown("loaded", "no", "AF_INET AF_UNIX"), false, true),
            (shown("loaded", "no", "~AF_INET"), true, false),
            (shown("loaded", "no", ""), false, false),
            (shown("not-found", "yes", "AF_UNIX"), false, false),
            (String::new(), false, false),
        ] {
            let refused = (is_refused(&shown, v4), is_refused(&shown, v6));
            assert_eq!(refused, (of_v4, of_v6), "{shown}");
        }
    }
}
