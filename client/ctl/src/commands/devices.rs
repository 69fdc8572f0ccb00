//! devices: the GPU drivers and devices of the daemon's machine.

use anyhow::bail;
use rocmforge_client::proto::Word as _;
use rocmforge_client::proto::v1::{
    CheckDeviceResponse, CheckOutcome, Device, DeviceCheck, DeviceKind, GpuDriver,
    ListDevicesResponse,
};

use serde::Serialize;

use crate::context::Context;
use crate::human::{Align, Table, clean, fields, plural, size};

pub(super) async fn devices(context: &mut Context, check: bool) -> anyhow::Result<()> {
    let client = context.connect().await?;
    if check {
        let version = client.status().await?.version;
        let checked = client.check_device().await?;
        let Some(device) = &checked.device else {
            bail!("the daemon does not say which device it uses");
        };
        context.output.answer(
            || Checked {
                version: &version,
                checked: &checked,
            },
            || report(&checked, device, &version),
        )?;
        let is_failed = |check: &&DeviceCheck| check.outcome() == CheckOutcome::Failed;
        let failed = checked.checks.iter().filter(is_failed).count();
        if failed > 0 {
            bail!("{} of the self-test", plural(failed as u64, "failure"));
        }
        return Ok(());
    }
    let found = client.list_devices().await?;
    context.output.answer(|| &found, || text(&found))
}

/// A self-test, with the daemon's version.
#[derive(Serialize)]
struct Checked<'a> {
    version: &'a str,
    #[serde(flatten)]
    checked: &'a CheckDeviceResponse,
}

/// The self-test as one table behind what is known of device, driver and machine.
fn report(checked: &CheckDeviceResponse, device: &Device, version: &str) -> String {
    let kind = device.kind().word();
    let mut rows = vec![("rocmforged", version.to_owned())];
    if let Ok(kernel) = std::fs::read_to_string("/proc/sys/kernel/osrelease") {
        rows.push(("kernel", kernel.trim().to_owned()));
    }
    if on_host(device) {
        rows.push(("device", format!("host: {}", device.name)));
        rows.push(("memory", size(device.memory_bytes)));
        rows.push((
            "self-test",
            "none is made of the host; start rocmforged with --device hip or cuda for a GPU's"
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
    let findings = device.findings.iter();
    rows.extend(findings.map(|finding| ("at start", finding.clone())));
    let mut table = Table::new([
        ("CHECK", Align::Left),
        ("RESULT", Align::Left),
        ("MS", Align::Right),
        ("WHAT", Align::Left),
    ]);
    for check in &checked.checks {
        table.row([
            check.name.clone(),
            check.outcome().word().to_owned(),
            format!("{:.0}", check.ms),
            clean(&check.detail),
        ]);
    }
    let count = |outcome: CheckOutcome| {
        let all = checked.checks.iter();
        all.filter(|check| check.outcome() == outcome).count()
    };
    let (passed, failed) = (count(CheckOutcome::Passed), count(CheckOutcome::Failed));
    let sum = format!(
        "{passed} passed, {failed} failed, in {:.1} s",
        checked.took_ms / 1e3
    );
    format!("{}\n{table}{sum}\n", fields(&rows))
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
                format!("{}:{}", driver.kind().word(), device.ordinal),
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
        let name = format!("{}:{}", device.kind().word(), device.ordinal);
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
    device.kind() == DeviceKind::Host
}

/// The findings about a vendor's driver: libraries tried and opened, and errors, one a line.
pub(crate) fn notes(driver: &GpuDriver) -> String {
    let kind = driver.kind().word();
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
