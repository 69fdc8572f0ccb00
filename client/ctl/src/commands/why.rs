//! why: where the time of a request went.

use anyhow::bail;
use clap::Args;
use rocmforge_client::proto::v1::{AbsentWeights, RequestTimes, TimePart, WhyRequest};

use crate::context::Context;
use crate::human::{Align, Table, clean, size};

/// What `why` is asked.
#[derive(Debug, Args)]
pub(crate) struct WhyArgs {
    /// The request: its number, or its x-request-id; the slowest of the last ones if not given
    pub(crate) request: Option<String>,
    /// List the last requests, the latest first, each with its first cause
    #[arg(long, conflicts_with = "request")]
    pub(crate) list: bool,
}

/// Requests that a list shows.
const LISTED: u32 = 256;

pub(super) async fn why(context: &mut Context, args: WhyArgs) -> anyhow::Result<()> {
    let request = WhyRequest {
        request: args.request.unwrap_or_default(),
        latest: if args.list { LISTED } else { 0 },
    };
    let client = context.connect().await?;
    let found = client.why(request).await?;
    if args.list {
        return context.output.answer(|| &found, || list(&found));
    }
    let Some(one) = found.first() else {
        bail!(
            "no request of yours has ended since the daemon started (other clients' are shown to the role admin alone)"
        );
    };
    context.output.answer(|| one, || text(one))
}

/// The requests as a table.
fn list(requests: &[RequestTimes]) -> String {
    let mut table = Table::new([
        ("REQUEST", Align::Right),
        ("MODEL", Align::Left),
        ("CLIENT", Align::Left),
        ("CALL", Align::Left),
        ("RESULT", Align::Left),
        ("TIME", Align::Right),
        ("FIRST CAUSE", Align::Left),
        ("ID", Align::Left),
    ]);
    for request in requests {
        let first = request.parts.first();
        let cause = first.map_or_else(String::new, |part| {
            format!("{} {}", share(part.ms, request.total_ms), clean(&part.text))
        });
        table.row([
            request.number.to_string(),
            clean(&request.model),
            clean(&request.client),
            clean(&request.call),
            clean(&request.code),
            time(request.total_ms),
            cause,
            clean(&request.id),
        ]);
    }
    table.to_string()
}

/// One request: its parts, what was uploaded for it, what would help.
fn text(request: &RequestTimes) -> String {
    // Requests over gRPC often have no id.
    let id = match clean(&request.id) {
        id if id.is_empty() => String::new(),
        id => format!(" ({id})"),
    };
    let mut text = format!(
        "request {}{id} of {}: {} of {}, {}, {}\n",
        request.number,
        clean(&request.client),
        clean(&request.call),
        clean(&request.model),
        clean(&request.code),
        time(request.total_ms)
    );
    text += &format!(
        "{} prompt tokens ({} reused), {} new tokens\n\n",
        request.prompt_tokens, request.reused_tokens, request.generated_tokens
    );
    text += &gaps(request);
    let mut table = Table::new([
        ("TIME", Align::Right),
        ("SHARE", Align::Right),
        ("PART", Align::Left),
    ]);
    for part in &request.parts {
        table.row([
            time(part.ms),
            share(part.ms, request.total_ms),
            clean(&part.text),
        ]);
        for behind in behind(part) {
            table.row([String::new(), String::new(), behind]);
        }
    }
    table.row([time(request.total_ms), share(1.0, 1.0), "all".to_owned()]);
    text += &table.to_string();
    let weights = request.weights.as_ref();
    text += &weights.map_or_else(String::new, absent);
    for advice in &request.advice {
        text += &format!("\nwould help: {}\n", clean(advice));
    }
    for setting in &request.no_effect {
        text += &format!("\nno effect: {}\n", clean(setting));
    }
    text
}

/// The longest gap between its tokens, and whether what was promised was held.
fn gaps(request: &RequestTimes) -> String {
    let Some(longest) = request.longest_gap_ms else {
        return String::new();
    };
    let promised = request.promised_gap_ms.map(|gap| {
        let broken = request.broken_gaps;
        format!("; {} were promised, {broken} gaps were longer", time(gap))
    });
    format!(
        "longest gap between tokens: {} ({}){}\n\n",
        time(longest),
        clean(&request.longest_gap_cause),
        promised.unwrap_or_default()
    )
}

/// Whose passes a part was.
fn behind(part: &TimePart) -> impl Iterator<Item = String> {
    part.behind.iter().map(|behind| {
        format!(
            "  {} of {} for {}",
            time(behind.ms),
            clean(&behind.model),
            clean(&behind.client)
        )
    })
}

/// The weights that were not on the device.
fn absent(weights: &AbsentWeights) -> String {
    let mut text = String::new();
    if weights.uploaded_bytes > 0 {
        text += &format!("\nuploaded: {}", size(weights.uploaded_bytes));
        if weights.disk_bytes > 0 {
            text += &format!(", {} of it from disk", size(weights.disk_bytes));
        }
        if weights.link_bytes_per_s > 0.0 {
            text += &format!(", at {:.2} GB/s", weights.link_bytes_per_s / 1e9);
        }
        if weights.link_measured_bytes_per_s > 0.0 {
            let measured = weights.link_measured_bytes_per_s / 1e9;
            text += &format!(" of the {measured:.2} GB/s that the link is measured to bring");
        }
        text.push('\n');
    }
    for displaced in &weights.displaced {
        let why = match displaced.cause.as_str() {
            "first_use" => "uploaded for the first time since the model was loaded".to_owned(),
            "other_model" => format!("evicted for {}", clean(&displaced.by_model)),
            "own_pass" => "evicted by the model's own passes: it does not fit".to_owned(),
            "kv" => "evicted for KV cache".to_owned(),
            "scratch" => "evicted for working memory".to_owned(),
            cause => format!("evicted: {}", clean(cause)),
        };
        text += &format!("  {}: {why}\n", size(displaced.bytes));
    }
    if weights.cpu_bytes > 0 {
        text += &format!("\ncomputed by the CPU: {}\n", size(weights.cpu_bytes));
    }
    text
}

/// A time in the unit that fits.
fn time(ms: f64) -> String {
    match ms {
        ms if ms < 1000.0 => format!("{ms:.1} ms"),
        ms => format!("{:.2} s", ms / 1e3),
    }
}

/// A part of a whole in percent.
fn share(part: f64, whole: f64) -> String {
    match whole > 0.0 {
        true => format!("{:.0} %", part / whole * 100.0),
        false => "-".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_without_an_id_has_no_empty_brackets() {
        let mut request = RequestTimes {
            number: 7,
            ..RequestTimes::default()
        };
        assert!(
            text(&request).starts_with("request 7 of "),
            "{}",
            text(&request)
        );
        request.id = "req-1".to_owned();
        assert!(text(&request).starts_with("request 7 (req-1) of "));
    }

    #[test]
    fn times_and_shares_have_the_unit_that_fits() {
        assert_eq!(
            (time(12.34), time(61_500.0)),
            ("12.3 ms".into(), "61.50 s".into())
        );
        assert_eq!(
            (share(1.0, 4.0), share(0.0, 0.0)),
            ("25 %".into(), "-".into())
        );
    }
}
