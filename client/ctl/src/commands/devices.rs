//! devices: the GPU drivers and devices of the daemon's machine.

use rocmforge_client::proto::v1::{Device, GpuDriver, ListDevicesResponse};

use super::Context;
use crate::human::{Align, Table, size};
use crate::json;

pub(super) async fn devices(context: &mut Context) -> anyhow::Result<()> {
    let client = context.connect().await?;
    let found = client.list_devices().await?;
    context
        .output
        .answer(|| json::devices(&found), || text(&found))
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
    let notes: String = found.drivers.iter().map(notes).collect();
    if !notes.is_empty() {
        text.push_str(&format!("\n{notes}"));
    }
    text
}

fn on_host(device: &Device) -> bool {
    json::device_kind(device.kind()) == "host"
}

/// What was looked for and opened, and what went wrong: a line a finding.
pub(super) fn notes(driver: &GpuDriver) -> String {
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
