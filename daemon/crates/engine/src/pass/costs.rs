//! Memory sizes of sequences and passes on a device, for the scheduler.

use rocmforge_device::Device;
use rocmforge_ops::{KvGroup, Plan, RowCounts};
use rocmforge_scheduler::{Costs, ModelId as ScheduledModel};
use rocmforge_tensor_cache::ModelId;

use crate::features::speculation::state::Speculation;
use crate::model::registry::Models;
use crate::pass::space::{PassSpace, ScratchSizes};
use crate::request::kv;

/// Memory sizes of sequences and passes of the registered models on this device.
pub(crate) struct Sizes<'a> {
    models: &'a Models,
    speculation: &'a Speculation,
    device: &'a dyn Device,
    known: &'a ScratchSizes,
    /// Maximum number of rows of a pass.
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

    /// The plan of passes with adapters; `None` if the model has no adapters.
    fn adapted_plan(&self, model: ModelId) -> Option<&Plan> {
        let entry = self.models.get(model)?;
        entry.loaded.model().adapted_plan()
    }

    /// The plan of the model's MTP head; `None` if sequences do not use one.
    fn mtp(&self, model: ModelId) -> Option<&Plan> {
        self.speculation.mtp(model).map(|mtp| &*mtp.plan)
    }

    /// Bytes of scratch for a model's pass with `rows` rows and `outputs` rows of logits.
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

/// The parts of a sequence's images that have their own rows in the device's page table.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TableParts {
    pub(crate) n: usize,
    /// Number of rows of the longest part of all sequences in the pass.
    pub(crate) longest: usize,
}

/// Number of entries in the device's page table for a span of a sequence with `positions` positions
/// and its parts.
pub(crate) fn table_entries(kv: &[KvGroup], positions: usize, parts: TableParts) -> u64 {
    let row = |positions: usize, of_parts: bool, least: usize| {
        let groups = kv.iter().filter(|g| g.parts == of_parts);
        let pages = groups.map(|g| g.layout.pages_for(positions));
        let (groups, longest) = pages.fold((0, 0), |(n, most), pages| (n + 1, most.max(pages)));
        groups * longest.next_power_of_two().max(least)
    };
    // As the device lays out rows of the table.
    (row(positions, false, 8) + row(parts.longest, true, 1) * parts.n) as u64
}

/// Maximum number of spans in one pass, if each has `entries_each` entries in the device's page
/// table.
pub(crate) fn spans_within(device: &dyn Device, entries_each: u64) -> u32 {
    match device.page_table_entries() {
        Some(entries) => (entries / entries_each.max(1)).max(1) as u32,
        None => u32::MAX,
    }
}

#[cfg(test)]
mod tests {
    use rocmforge_ops::{KvLayout, KvType};

    use super::*;

    fn group(parts: bool) -> KvGroup {
        KvGroup {
            layout: KvLayout {
                n_layer: 1,
                n_head_kv: 2,
                head_dim_k: 64,
                head_dim_v: 64,
                ty: KvType::F16,
            },
            window: None,
            parts,
        }
    }

    #[test]
    fn a_span_has_entries_for_its_pages_and_for_those_of_each_part() {
        let none = TableParts::default();
        assert_eq!(table_entries(&[group(false)], 33, none), 8);
        assert_eq!(table_entries(&[group(false); 2], 32 * 9, none), 32);
        // 16 windows of 8 rows, each of which begins a page.
        let narrow = TableParts { n: 16, longest: 8 };
        let both = [group(true), group(false)];
        assert_eq!(table_entries(&both, 16 * 32, narrow), 16 + 16);
        let wide = TableParts { n: 16, longest: 64 };
        assert_eq!(table_entries(&both, 16 * 64, wide), 32 + 32);
    }
}
