//! The list of waiting and running requests in snapshots.

use std::sync::Arc;
use std::time::Instant;

use crate::api::times::TimesSlot;
use crate::api::{LIVE_MAX, LiveRequest, LiveState};
use crate::request::requests::Requests;
use crate::request::task::{Task, Work};
use crate::request::time_account::Standing;

impl Requests {
    /// The requests in the order of their arrival, with their states.
    pub(crate) fn live(&self, now: Instant) -> Vec<LiveRequest> {
        let shown = |task: &&Task| !matches!(task.work, Work::Tower(_));
        let mut tasks: Vec<&Task> = self.all().filter(shown).collect();
        tasks.sort_unstable_by_key(|task| task.seq);
        tasks.truncate(LIVE_MAX);
        tasks.into_iter().map(|task| live(task, now)).collect()
    }
}

/// Makes a snapshot's entry for a request.
fn live(task: &Task, now: Instant) -> LiveRequest {
    let state = match task.times.standing() {
        Standing::Queued => LiveState::Queued,
        Standing::Preempted => LiveState::Preempted,
        Standing::ReaderFull => LiveState::Reader,
        Standing::FromDisk => LiveState::Disk,
        Standing::Uploading => LiveState::Uploads,
        Standing::Follows => LiveState::Follows,
        Standing::Ready | Standing::Computing if task.generated() > 0 => LiveState::Decode,
        Standing::Ready | Standing::Computing => LiveState::Prompt,
    };
    let (prompt, first, longest) = match &task.work {
        Work::Generate(g) => (g.n_prompt, g.first_token, g.gaps.longest()),
        Work::Embed(_) => (task.tokens.len().saturating_sub(1), None, None),
        Work::Score(_) | Work::Tower(_) => (task.tokens.len(), None, None),
    };
    let behind_first = task.generated().saturating_sub(1);
    let seconds = first.map(|first| now.saturating_duration_since(first).as_secs_f64());
    let seconds = seconds.filter(|seconds| behind_first > 0 && *seconds > 0.0);
    LiveRequest {
        number: task.times.slot.as_ref().map_or(0, TimesSlot::number),
        client: task.asker.client,
        model: Arc::clone(&task.loaded),
        state,
        since: task.received,
        prompt_tokens: prompt as u32,
        computed_tokens: task.n_past as u32,
        generated_tokens: task.generated(),
        tokens_per_s: seconds.map(|seconds| f64::from(behind_first) / seconds),
        longest_gap: longest,
    }
}
