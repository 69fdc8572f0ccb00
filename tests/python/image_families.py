"""Towers of make_images.py in whose layers an image has windows.

needs: torch, transformers, gguf, numpy
"""

import torch
import transformers

from image_models import END, IMAGE, START, Writer, base_config, fill


def biased(t, i):
    """A layer of Qwen 2's text models, by the module's own names."""
    layer = {}
    for theirs, ours in [("q_proj", "attn_q"), ("k_proj", "attn_k"), ("v_proj", "attn_v")]:
        layer[f"self_attn.{theirs}.weight"] = t[f"blk.{i}.{ours}.weight"]
        layer[f"self_attn.{theirs}.bias"] = t[f"blk.{i}.{ours}.bias"]
    layer["self_attn.o_proj.weight"] = t[f"blk.{i}.attn_output.weight"]
    for part in ("gate", "up", "down"):
        layer[f"mlp.{part}_proj.weight"] = t[f"blk.{i}.ffn_{part}.weight"]
    layer["input_layernorm.weight"] = t[f"blk.{i}.attn_norm.weight"]
    layer["post_attention_layernorm.weight"] = t[f"blk.{i}.ffn_norm.weight"]
    return layer


class Qwen25:
    """qwen2.5vl_merger: windows of 2 by 2 tokens, smaller ones at the edges, and a layer without."""

    merge, grids, patch, steps = 2, [(6, 10), (10, 6), (4, 2)], 4, 64
    VISION = dict(depth=3, hidden_size=128, num_heads=2, intermediate_size=96, patch_size=4, spatial_merge_size=2,
                  temporal_patch_size=2, out_hidden_size=64, window_size=16, fullatt_block_indexes=[1])

    def model(self, t):
        rope = dict(rope_type="default", rope_theta=1e6, mrope_section=[2, 3, 3])
        text = base_config(num_hidden_layers=3, rope_parameters=rope)
        del text["head_dim"]
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=dict(self.VISION), image_token_id=IMAGE,
                                               video_token_id=1193, vision_start_token_id=START,
                                               vision_end_token_id=END)
        model = transformers.Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="eager")
        out = {"embed_tokens.weight": t["token_embd.weight"], "norm.weight": t["output_norm.weight"]}
        for i in range(3):
            out.update({f"layers.{i}.{k}": v for k, v in biased(t, i).items()})
        fill(model.model.language_model, out)
        return model

    def tower(self, model):
        return model.model.visual

    def write(self, path, model):
        tower = model.model.visual
        config = dict(self.VISION, image_size=560, layers=3)
        w = Writer(path, "qwen2.5vl_merger", config, [("n_wa_pattern", 2), ("window_size", 16)])
        w.w.add_bool("clip.use_silu", True)
        w.w.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
        w.put("v.patch_embd.weight", tower.patch_embed.proj.weight[:, :, 0])
        w.put("v.patch_embd.weight.1", tower.patch_embed.proj.weight[:, :, 1])
        for i, b in enumerate(tower.blocks):
            for j, part in enumerate(("q", "k", "v")):
                w.put(f"v.blk.{i}.attn_{part}.weight", b.attn.qkv.weight.chunk(3)[j])
                w.put(f"v.blk.{i}.attn_{part}.bias", b.attn.qkv.bias.chunk(3)[j])
            for name, module in [("attn_out", b.attn.proj), ("ffn_gate", b.mlp.gate_proj), ("ffn_up", b.mlp.up_proj),
                                 ("ffn_down", b.mlp.down_proj)]:
                w.both(f"v.blk.{i}.{name}", module)
            for name, module in [("ln1", b.norm1), ("ln2", b.norm2)]:
                w.put(f"v.blk.{i}.{name}.weight", module.weight)
        w.put("v.post_ln.weight", tower.merger.ln_q.weight)
        w.both("mm.0", tower.merger.mlp[0])
        w.both("mm.2", tower.merger.mlp[2])
        w.close()

    def pixels(self, patches):
        """As the processor gives them: both frames of an image are the same."""
        x = patches.reshape(-1, 3, 1, self.patch, self.patch).expand(-1, 3, 2, self.patch, self.patch)
        return x.reshape(len(patches), -1)

    def rows(self, model, grid, patches):
        return model.model.visual(self.pixels(patches), grid_thw=torch.tensor([[1, *grid]])).pooler_output

    def logits(self, model, ids, images):
        return model(
            input_ids=ids,
            pixel_values=torch.cat([self.pixels(patches) for _, patches in images]),
            image_grid_thw=torch.tensor([[1, *grid] for grid, _ in images]),
            mm_token_type_ids=(ids == IMAGE).int(),
        ).logits[0]
