//! status, health, reload and files: the daemon itself, and what it could load.

use std::borrow::Cow;
use std::path::Path;

use anyhow::bail;
use rocmforge_client::proto::Word as _;
use rocmforge_client::proto::v1::{
    Device, HostPressure, ListFilesResponse, ReloadResponse, SettingChange, StatusResponse,
};
use serde::Serialize;
use serde_json::json;

use super::devices::notes;
use super::models::summaries;
use super::pull::disk_use;
use crate::context::Context;
use crate::human::{Align, Table, clean, fields, percent, plural, size, span};

/// The daemon as it is now, with the socket at which it was reached.
#[derive(Serialize)]
struct Reached<'a> {
    #[serde(flatten)]
    status: &'a StatusResponse,
    socket: Cow<'a, str>,
}

pub(super) async fn status(context: &mut Context) -> anyhow::Result<()> {
    let client = context.connect().await?;
    let status = client.status().await?;
    context.output.answer(
        || Reached {
            status: &status,
            socket: client.socket().to_string_lossy(),
        },
        || text(&status, client.socket()),
    )
}

pub(super) async fn health(context: &mut Context) -> anyhow::Result<()> {
    let client = context.connect().await?;
    if !client.is_serving().await? {
        bail!(
            "the daemon answers and does not serve: it ends, its device is lost, or it waits for a file; \
             see `rocmforgectl status` and its log"
        );
    }
    context
        .output
        .answer(|| json!({"serving": true}), || "serving".to_owned())
}

pub(super) async fn reload(context: &mut Context) -> anyhow::Result<()> {
    let reloaded = context.connect().await?.reload().await?;
    context.output.answer(|| &reloaded, || changes(&reloaded))
}

fn changes(reloaded: &ReloadResponse) -> String {
    let told = |change: &SettingChange| {
        let values = match (change.before.as_str(), change.now.as_str()) {
            ("", "") => String::new(),
            ("", now) => format!(" {now}"),
            (before, now) => format!(" {before} -> {now}"),
        };
        let reason = match change.reason.as_str() {
            "" => String::new(),
            reason => format!(": {reason}"),
        };
        format!("{}{values}{reason}", change.setting)
    };
    let taken = reloaded.taken.iter().map(|change| ("taken", told(change)));
    let left = &reloaded.not_taken;
    let left = left.iter().map(|change| ("not taken", told(change)));
    let rows: Vec<_> = taken.chain(left).collect();
    match rows.is_empty() {
        true => "nothing has changed".to_owned(),
        false => fields(&rows),
    }
}

pub(super) async fn files(context: &mut Context) -> anyhow::Result<()> {
    let found = context.connect().await?.list_files().await?;
    context.output.answer(
        || &found,
        || {
            let mut table = Table::new([
                ("SIZE", Align::Right),
                ("NAME", Align::Left),
                ("LOADED AS", Align::Left),
                ("FILE", Align::Left),
            ]);
            for file in &found.files {
                let names = file.loaded_as.join(", ");
                table.row([
                    size(file.size_bytes),
                    file.name.clone(),
                    if names.is_empty() {
                        "-".to_owned()
                    } else {
                        names
                    },
                    file.path.clone(),
                ]);
            }
            let mut text = table.to_string();
            if found.is_cut {
                text += "(there are more)\n";
            }
            for file in &found.unserved {
                text += &format!(
                    "not offered: {}: {}\n",
                    clean(&file.path),
                    clean(&file.reason)
                );
            }
            for dir in found
                .directories
                .iter()
                .filter(|dir| !dir.trouble.is_empty())
            {
                let (path, trouble) = (clean(&dir.path), clean(&dir.trouble));
                text += &format!("model directory {path} {trouble}\n");
            }
            text + &disk(&found)
        },
    )
}

/// What the models take of each directory's disk.
fn disk(found: &ListFilesResponse) -> String {
    let fine = found
        .directories
        .iter()
        .filter(|dir| dir.trouble.is_empty());
    let dirs: Vec<_> = fine.map(|dir| dir.path.clone()).collect();
    let files = found.files.iter();
    disk_use(
        &dirs,
        files.map(|file| (file.path.clone(), file.size_bytes)),
    )
}

/// What the machine's memory holds, and what of it was given up.
fn host_memory(host: &HostPressure) -> String {
    let held = format!("{} held", size(host.held_bytes));
    if host.not_counted {
        return format!("{held}; the system does not count waits for memory");
    }
    match host.given_up_bytes {
        0 => held,
        bytes => format!(
            "{held}, {} given up now: the machine was short of memory",
            size(bytes)
        ),
    }
}

/// The budget, and what takes away from it.
fn memory(status: &StatusResponse, rows: &mut Vec<(&str, String)>) {
    let (used, budget) = (status.used_bytes, status.budget_bytes);
    let share = percent(used, budget);
    rows.push((
        "memory",
        format!("{} of {} ({share})", size(used), size(budget)),
    ));
    if let Some(bytes) = status.released_budget_bytes {
        let opens = match status.device_closed {
            true => "opens the GPU and ",
            false => "",
        };
        let text = format!("the next request {opens}takes {} again", size(bytes));
        rows.push(("memory released", text));
    }
    if let Some(others) = status.yielding.filter(|others| others.active) {
        let held = size(others.others_bytes);
        let text = format!(
            "another process uses the GPU (others hold {held}); the whole budget comes back when it has left"
        );
        rows.push(("memory given up", text));
    }
    if let Some(kept) = &status.keep_free {
        if kept.given_up_bytes > 0 {
            let all = size(budget.saturating_add(kept.given_up_bytes));
            let text = format!(
                "{} of the {all} that are configured: other processes hold the device's memory; the budget grows as \
                 they free it",
                size(budget)
            );
            rows.push(("memory reduced", text));
        }
        if kept.bytes > 0 {
            rows.push(("kept free", format!("{} for others", size(kept.bytes))));
        }
    }
    if let Some(host) = &status.host_pressure {
        rows.push(("host memory", host_memory(host)));
    }
}

fn device_rows(device: &Device) -> Vec<(&'static str, String)> {
    let kind = device.kind().word();
    let mut text = format!("{kind}: {}, {}", device.name, size(device.memory_bytes));
    if device.compute_units > 0 {
        text.push_str(&format!(", {} units", device.compute_units));
    }
    // A processor's name may say these already.
    if !device.isa.is_empty() && !device.name.contains(&device.isa) {
        text.push_str(&format!(", {}", device.isa));
    }
    if device.threads > 0 && !device.name.contains(" threads") {
        text.push_str(&format!(", {} threads", device.threads));
    }
    let mut rows = vec![("device", text)];
    if !device.unused_gpu.is_empty() {
        rows.push(("device unused", device.unused_gpu.clone()));
    }
    if !device.driver_version.is_empty() {
        rows.push(("driver", device.driver_version.clone()));
    }
    if let Some(memory) = &device.memory {
        rows.push((
            "on device",
            format!(
                "{} allocated, {} free, {}",
                size(memory.allocated_bytes),
                size(memory.free_bytes),
                plural(device.allocations, "allocation")
            ),
        ));
    }
    let findings = device.findings.iter();
    rows.extend(findings.map(|finding| ("self-test", finding.clone())));
    rows
}

fn text(status: &StatusResponse, socket: &Path) -> String {
    let state = status.state().word().replace('_', " ");
    let mut rows = vec![
        (
            "rocmforged",
            format!("{}, {state}, process {}", status.version, status.pid),
        ),
        ("socket", socket.display().to_string()),
        ("uptime", span(status.uptime_ms)),
    ];
    if let Some(wait) = &status.waits_for {
        let waited = span(wait.waited_ms);
        let who = match wait.all_wait {
            true => "all models wait",
            false => "requests of its model wait",
        };
        let text = format!(
            "for {} ({}) for {waited}: it does not answer or is slow, and {who}",
            wait.path, wait.model
        );
        rows.push(("waits", text));
    }
    if let Some(device) = &status.device {
        rows.extend(device_rows(device));
    }
    memory(status, &mut rows);
    if status.models_coming_back > 0 {
        let n = plural(u64::from(status.models_coming_back), "model");
        let text = format!("{n} of before the restart, in the background");
        rows.push(("coming back", text));
    }
    rows.push((
        "running",
        format!("{} of {}", status.running, status.running_capacity),
    ));
    rows.push((
        "waiting",
        format!("{} of {}", status.queue_depth, status.queue_capacity),
    ));
    let found = status.drivers.iter().map(notes).collect::<String>();
    rows.extend(found.lines().map(|line| ("found", line.to_owned())));
    rows.extend(
        status
            .model_dirs
            .iter()
            .map(|dir| ("model dir", dir.clone())),
    );
    let head = fields(&rows);
    if status.models.is_empty() {
        return format!("{head}\nno models; `rocmforgectl load FILE` opens one\n");
    }
    format!("{head}\n{}", summaries(&status.models))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_machine_got_back_is_told() {
        let mut host = HostPressure {
            held_bytes: 3 << 30,
            ..HostPressure::default()
        };
        assert_eq!(host_memory(&host), "3.00 GiB held");
        host.given_up_bytes = 1 << 30;
        let given_up = "3.00 GiB held, 1.00 GiB given up now: the machine was short of memory";
        assert_eq!(host_memory(&host), given_up);
        host.not_counted = true;
        assert!(host_memory(&host).contains("does not count"));
    }
}
