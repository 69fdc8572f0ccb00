//! devices: the GPU drivers and devices of the daemon's machine.

use anyhow::bail;
use rocmforge_client::proto::v1::{Device, GpuDriver, ListDevicesResponse};

use super::Context;
use crate::human::{Align, Table, clean, fields, plural, size};
use crate::json;

pub(super) async fn devices(context: &mut Context, check: bool) -> anyhow::Result<()> {
    let client = context.connect().await?;
    let found = client.list_devices().await?;
    if !check {
        return context
            .output
            .answer(|| json::devices(&found), || text(&found));
    }
    let Some(device) = &found.in_use else {
        bail!("the daemon does not say which device it uses; is it older than this command?");
    };
    let version = client.status().await?.version;
    context.output.answer(
        || json::device_check(device, &version),
        || checked(device, &version),
    )
}

/// What is known of the device in use, a line an item.
fn checked(device: &Device, version: &str) -> String {
    let kind = json::device_kind(device.kind());
    let mut rows = vec![("rocmforged", version.to_owned())];
    if on_host(device) {
        rows.push(("device", format!("host: {}", device.name)));
        rows.push(("memory", size(device.memory_bytes)));
        rows.push((
            "self-test",
            "none is made of the host; start rocmforged with --device hip or cuda for a card's"
                .to_owned(),
        ));
        return fields(&rows);
    }
    rows.push((
        "device",
        format!("{kind}:{}: {}, {}", device.ordinal, device.name, device.isa),
    ));
    let driver = match device.driver_version.as_str() {
        "" => "it does not say its version",
        version => version,
    };
    rows.push(("driver", driver.to_owned()));
    rows.push(("memory", size(device.memory_bytes)));
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
    if device.findings.is_empty() {
        rows.push(("self-test", "nothing to tell".to_owned()));
    }
    let findings = device.findings.iter();
    rows.extend(findings.map(|finding| ("self-test", finding.clone())));
    fields(&rows)
}

fn text(found: &ListDevicesResponse) -> String {
    let mut table = Table::new([
        ("DEVICE", Align::Left),
        ("NAME", Align::Left),
        ("ARCH", Align::Left),
        ("UNITS", Align::Right),
        ("MEMORY", Align::Right),
        ("FREE", Align::Right),
        ("DRIVER", Align::Left),
        ("IN USE", Align::Left),
    ]);
    if let Some(host) = found.in_use.as_ref().filter(|d| on_host(d)) {
        table.row([
            "host".to_owned(),
            host.name.clone(),
            host.isa.clone(),
            host.threads.to_string(),
            size(host.memory_bytes),
            "-".to_owned(),
            "-".to_owned(),
            "yes".to_owned(),
        ]);
    }
    for driver in &found.drivers {
        for device in &driver.devices {
            table.row([
                format!("{}:{}", json::device_kind(driver.kind()), device.ordinal),
                device.name.clone(),
                device.arch.clone(),
                device.compute_units.to_string(),
                size(device.memory_bytes),
                device.free_bytes.map_or("-".to_owned(), size),
                driver.driver_version.clone(),
                if device.in_use { "yes" } else { "" }.to_owned(),
            ]);
        }
    }
    let mut text = table.to_string();
    let mut notes: String = found.drivers.iter().map(notes).collect();
    if let Some(device) = &found.in_use {
        let name = format!("{}:{}", json::device_kind(device.kind()), device.ordinal);
        for finding in &device.findings {
            notes.push_str(&format!("{name}: {}\n", clean(finding)));
        }
    }
    if !notes.is_empty() {
        text.push_str(&format!("\n{notes}"));
    }
    text
}

fn on_host(device: &Device) -> bool {
    json::device_kind(device.kind()) == "host"
}

/// What was looked for and opened, and what went wrong: a line a finding.
pub(crate) fn notes(driver: &GpuDriver) -> String {
    let kind = json::device_kind(driver.kind());
    let mut lines = Vec::new();
    if driver.library.is_empty() {
        let tried = driver.tried.iter();
        lines.extend(tried.map(|attempt| format!("{}: {}", attempt.library, attempt.message)));
    } else {
        let version = |v: &str| if v.is_empty() { "?" } else { v }.to_owned();
        lines.push(format!(
            "{} (driver {}, runtime {}): {}",
            driver.library,
            version(&driver.driver_version),
            version(&driver.runtime_version),
            crate::human::plural(driver.devices.len() as u64, "device"),
        ));
    }
    lines.extend(driver.errors.iter().cloned());
    lines
        .into_iter()
        .map(|line| format!("{kind}: {line}\n"))
        .collect()
}
