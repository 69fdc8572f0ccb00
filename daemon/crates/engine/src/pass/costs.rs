//! What sequences and passes cost on a device, for the scheduler.

use rocmforge_device::Device;
use rocmforge_ops::{Plan, RowCounts};
use rocmforge_scheduler::{Costs, ModelId as ScheduledModel};
use rocmforge_tensor_cache::ModelId;

use crate::features::speculation::state::Speculation;
use crate::model::registry::Models;
use crate::pass::space::{PassSpace, ScratchSizes};
use crate::request::kv;

/// What sequences and passes cost on this device.
pub(crate) struct Sizes<'a> {
    models: &'a Models,
    speculation: &'a Speculation,
    device: &'a dyn Device,
    known: &'a ScratchSizes,
    /// Rows of a pass at most.
    rows_max: usize,
}

impl<'a> Sizes<'a> {
    pub(crate) fn new(
        models: &'a Models,
        speculation: &'a Speculation,
        device: &'a dyn Device,
        space: &'a PassSpace,
    ) -> Self {
        Self {
            models,
            speculation,
            device,
            known: &space.sizes,
            rows_max: space.prefill_chunk.get(),
        }
    }

    fn plan(&self, model: ModelId) -> &Plan {
        let entry = self.models.get(model);
        let entry = entry.expect("a request keeps its model registered");
        entry.loaded.model().plan()
    }

    /// The plan of passes with adapters, where the model has any.
    fn adapted_plan(&self, model: ModelId) -> Option<&Plan> {
        let entry = self.models.get(model)?;
        entry.loaded.model().adapted_plan()
    }

    /// The plan of the model's MTP head, where sequences use it.
    fn mtp(&self, model: ModelId) -> Option<&Plan> {
        self.speculation.mtp(model).map(|mtp| &*mtp.plan)
    }

    /// Bytes of scratch of a model's pass of so many rows and rows of logits.
    pub(crate) fn scratch(&self, model: ModelId, rows: u32, outputs: u32) -> u64 {
        self.known.bytes((model, rows, outputs), || {
            let bytes = |plan: &Plan| {
                let layout = plan.scratch(RowCounts {
                    tokens: u64::from(rows),
                    outputs: u64::from(outputs),
                });
                layout.bytes + self.device.workspace_bytes(&layout)
            };
            // One runs behind the other.
            let others = [self.adapted_plan(model), self.mtp(model)];
            let others = others.into_iter().flatten().map(bytes);
            others.fold(bytes(self.plan(model)), u64::max)
        })
    }
}

impl Costs for Sizes<'_> {
    fn kv_bytes(&self, model: ScheduledModel, positions: u32) -> u64 {
        let model = ModelId(model.0);
        let bytes = |plan| kv::bytes_for(plan, positions as usize, self.rows_max);
        bytes(self.plan(model)) + self.mtp(model).map_or(0, bytes)
    }

    fn scratch_bytes(&self, model: ScheduledModel, rows: u32, outputs: u32) -> u64 {
        self.scratch(ModelId(model.0), rows, outputs)
    }
}

/// Entries in the device's table of pages that a span of a sequence with so many positions has.
pub(crate) fn table_entries(plan: &Plan, positions: usize) -> u64 {
    let longest = plan.kv.iter().map(|g| g.layout.pages_for(positions));
    let row = longest.max().unwrap_or(0).next_power_of_two().max(8);
    (row * plan.kv.len()) as u64
}

/// Spans of one pass at most that each have so many entries in the device's table of pages.
pub(crate) fn spans_within(device: &dyn Device, entries_each: u64) -> u32 {
    match device.page_table_entries() {
        Some(entries) => (entries / entries_each.max(1)).max(1) as u32,
        None => u32::MAX,
    }
}
