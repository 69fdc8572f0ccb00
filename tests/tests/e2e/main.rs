//! End to end: a real daemon, its socket, and what clients, files and other processes do to it.

#![allow(clippy::too_many_lines, reason = "tables of cases")]

mod bad_disk;
mod bad_files;
mod bad_requests;
mod clients;
mod devices;
mod exam;
mod far_file;
mod files_that_change;
mod idle;
mod keep_free;
mod kv_disk;
mod lost_device;
mod manifests;
mod monitoring;
mod node;
mod opening;
mod package;
mod page;
mod parity;
mod python;
mod reference;
mod replay;
mod residency;
mod routers;
mod shutdown;
mod systemd;
mod top;
mod traces;
