"""Small random vision towers by their authors' code (transformers), as projector files with goldens.

The text models are those of tests/fixtures/arch, whose weights are read back from their files: so a
projector belongs to a file that is there. For each: the tower's rows of a few images, and the
log-probabilities behind prompts with them, computed in float32. Names and keys are those that
llama.cpp's converter gives projector files of these models.

usage: make_images.py FIXTURES [NAME ...]
needs: torch, transformers, gguf, numpy
"""

import json
import sys
from pathlib import Path

import torch
import transformers

from image_families import Gemma4Unified, Glm4, Kimi, Qwen25, fill_gemma4
from image_internvl import InternVl, InternVl6
from image_models import END, IMAGE, START, V, Writer, attention, base_config, fill, halves, pairs, picture, tensors_of
from image_muse import Muse
from make_encoders import spread

PATCH, SIDE = 8, 6
GRIDS = [(4, 6), (8, 4), (2, 2)]
VISION = dict(depth=3, hidden_size=144, num_heads=2, intermediate_size=96, patch_size=PATCH, spatial_merge_size=2,
              temporal_patch_size=2, out_hidden_size=64, num_position_embeddings=SIDE * SIDE)
SPECIAL = dict(image_token_id=IMAGE, video_token_id=1193, vision_start_token_id=START, vision_end_token_id=END)


def delta_net(t, i):
    """The file has value heads in the order in which they share key heads in turn."""
    n_k, n_v, dim = 2, 4, 32
    order = torch.arange(n_v).reshape(n_v // n_k, n_k).T.flatten()
    heads = lambda x: x.reshape(n_v, -1, *x.shape[1:])[order].reshape(x.shape)
    keys = 2 * n_k * dim
    mixed = lambda x: torch.cat([x[:keys], heads(x[keys:])])
    get = lambda name: t[f"blk.{i}.{name}"]
    return {
        "linear_attn.in_proj_qkv.weight": mixed(get("attn_qkv.weight")),
        "linear_attn.in_proj_z.weight": heads(get("attn_gate.weight")),
        "linear_attn.in_proj_a.weight": heads(get("ssm_alpha.weight")),
        "linear_attn.in_proj_b.weight": heads(get("ssm_beta.weight")),
        "linear_attn.conv1d.weight": mixed(get("ssm_conv1d.weight")),
        "linear_attn.A_log": torch.log(-heads(get("ssm_a"))),
        "linear_attn.dt_bias": heads(get("ssm_dt.bias")),
        "linear_attn.norm.weight": get("ssm_norm.weight"),
        "linear_attn.out_proj.weight": heads(get("ssm_out.weight").T).T,
    }


def text_weights(t, layers, norm, post):
    out = {"embed_tokens.weight": t["token_embd.weight"], "norm.weight": t["output_norm.weight"] - norm}
    for i in range(layers):
        layer = delta_net(t, i) if f"blk.{i}.ssm_a" in t else attention(t, i, norm)
        for part in ("gate", "up", "down"):
            layer[f"mlp.{part}_proj.weight"] = t[f"blk.{i}.ffn_{part}.weight"]
        layer["input_layernorm.weight"] = t[f"blk.{i}.attn_norm.weight"] - norm
        layer["post_attention_layernorm.weight"] = t[f"blk.{i}.{post}.weight"] - norm
        out.update({f"layers.{i}.{k}": v for k, v in layer.items()})
    return out


def qwen35(t):
    rope = dict(rope_type="default", rope_theta=1e6, partial_rotary_factor=0.25, mrope_section=[2, 1, 1],
                mrope_interleaved=True)
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    text = base_config(num_hidden_layers=4, layer_types=kinds, linear_num_key_heads=2, linear_num_value_heads=4,
                       linear_key_head_dim=32, linear_value_head_dim=32, linear_conv_kernel_dim=4,
                       rope_parameters=rope)
    config = transformers.Qwen3_5Config(text_config=text, vision_config=dict(VISION), **SPECIAL)
    model = transformers.Qwen3_5ForConditionalGeneration._from_config(config, attn_implementation="eager")
    fill(model.model.language_model, text_weights(t, 4, 1.0, "post_attention_norm"))
    return model


def qwen3vl(t):
    rope = dict(rope_type="default", rope_theta=5e6, mrope_section=[6, 5, 5], mrope_interleaved=True)
    text = base_config(num_hidden_layers=3, rope_parameters=rope)
    vision = dict(VISION, deepstack_visual_indexes=[1])
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **SPECIAL)
    model = transformers.Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="eager")
    fill(model.model.language_model, text_weights(t, 3, 0.0, "ffn_norm"))
    return model


class Qwen:
    """qwen3vl_merger."""

    merge, grids, patch, steps = 2, GRIDS, PATCH, 256

    def __init__(self, make_model):
        self.make_model = make_model

    def model(self, t):
        return self.make_model(t)

    def tower(self, model):
        return model.model.visual

    def write(self, path, model):
        tower = model.model.visual
        deepstack = list(getattr(model.config.vision_config, "deepstack_visual_indexes", []))
        config = dict(VISION, image_size=SIDE * PATCH, layers=3)
        w = Writer(path, "qwen3vl_merger", config, [("spatial_merge_size", 2)])
        w.w.add_bool("clip.use_gelu", True)
        w.w.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
        w.w.add_array("clip.vision.is_deepstack_layers", [i in deepstack for i in range(3)])
        w.put("v.patch_embd.weight", tower.patch_embed.proj.weight[:, :, 0])
        w.put("v.patch_embd.weight.1", tower.patch_embed.proj.weight[:, :, 1])
        w.put("v.patch_embd.bias", tower.patch_embed.proj.bias)
        w.put("v.position_embd.weight", tower.pos_embed.weight)
        for i, b in enumerate(tower.blocks):
            for name, module in [("ln1", b.norm1), ("ln2", b.norm2), ("attn_qkv", b.attn.qkv),
                                 ("attn_out", b.attn.proj), ("ffn_up", b.mlp.linear_fc1),
                                 ("ffn_down", b.mlp.linear_fc2)]:
                w.both(f"v.blk.{i}.{name}", module)
        w.both("v.post_ln", tower.merger.norm)
        w.both("mm.0", tower.merger.linear_fc1)
        w.both("mm.2", tower.merger.linear_fc2)
        for i, merger in zip(deepstack, getattr(tower, "deepstack_merger_list", [])):
            w.both(f"v.deepstack.{i}.norm", merger.norm)
            w.both(f"v.deepstack.{i}.fc1", merger.linear_fc1)
            w.both(f"v.deepstack.{i}.fc2", merger.linear_fc2)
        w.close()

    def pixels(self, patches):
        """As the processor gives them: both frames of an image are the same."""
        x = patches.reshape(-1, 3, 1, PATCH, PATCH).expand(-1, 3, 2, PATCH, PATCH)
        return x.reshape(len(patches), -1)

    def rows(self, model, grid, patches):
        out = model.model.visual(self.pixels(patches), grid_thw=torch.tensor([[1, *grid]]))
        return torch.cat([out.pooler_output, *getattr(out, "deepstack_features", [])], -1)

    def logits(self, model, ids, images):
        return model(
            input_ids=ids,
            pixel_values=torch.cat([self.pixels(patches) for _, patches in images]),
            image_grid_thw=torch.tensor([[1, *grid] for grid, _ in images]),
            mm_token_type_ids=(ids == IMAGE).int(),
        ).logits[0]


class Gemma3:
    """gemma3: the text model's window is narrower than an image."""

    merge, grids, patch, steps = 4, [(20, 20), (20, 20)], 4, 4

    def model(self, t):
        rope = dict(full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                    sliding_attention=dict(rope_type="default", rope_theta=1e4))
        text = base_config(num_hidden_layers=6, sliding_window=16, query_pre_attn_scalar=32, rope_parameters=rope)
        text["tie_word_embeddings"] = True
        vision = dict(hidden_size=144, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2, image_size=80,
                      patch_size=4, vision_use_head=False)
        config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=25,
                                           image_token_index=IMAGE)
        model = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager")
        out = {"embed_tokens.weight": t["token_embd.weight"], "norm.weight": t["output_norm.weight"] - 1}
        for i in range(6):
            layer = attention(t, i, 1.0)
            for part in ("gate", "up", "down"):
                layer[f"mlp.{part}_proj.weight"] = t[f"blk.{i}.ffn_{part}.weight"]
            for ours, theirs in [("input_layernorm", "attn_norm"), ("post_attention_layernorm", "post_attention_norm"),
                                 ("pre_feedforward_layernorm", "ffn_norm"),
                                 ("post_feedforward_layernorm", "post_ffw_norm")]:
                layer[f"{ours}.weight"] = t[f"blk.{i}.{theirs}.weight"] - 1
            out.update({f"layers.{i}.{k}": v for k, v in layer.items()})
        fill(model.model.language_model, out)
        return model

    def tower(self, model):
        return torch.nn.ModuleList([model.model.vision_tower, model.model.multi_modal_projector])

    def write(self, path, model):
        tower, projector = model.model.vision_tower, model.model.multi_modal_projector
        config = dict(hidden_size=144, intermediate_size=96, layers=3, image_size=80, patch_size=4)
        w = Writer(path, "gemma3", config, [])
        w.w.add_bool("clip.use_gelu", True)
        w.w.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
        w.both("v.patch_embd", tower.embeddings.patch_embedding)
        w.put("v.position_embd.weight", tower.embeddings.position_embedding.weight)
        for i, b in enumerate(tower.encoder.layers):
            a = b.self_attn
            for name, module in [("ln1", b.layer_norm1), ("ln2", b.layer_norm2), ("attn_q", a.q_proj),
                                 ("attn_k", a.k_proj), ("attn_v", a.v_proj), ("attn_out", a.out_proj),
                                 ("ffn_up", b.mlp.fc1), ("ffn_down", b.mlp.fc2)]:
                w.both(f"v.blk.{i}.{name}", module)
        w.both("v.post_ln", tower.post_layernorm)
        w.put("mm.input_projection.weight", projector.mm_input_projection_weight)
        w.put("mm.soft_emb_norm.weight", projector.mm_soft_emb_norm.weight + 1)
        w.close()

    def pixels(self, images):
        return torch.stack([picture(grid, patches, self.patch, self.merge) for grid, patches in images])

    def rows(self, model, grid, patches):
        """As the text model's embeddings are before it multiplies them."""
        out = model.model.get_image_features(self.pixels([(grid, patches)]), return_dict=True)
        return out.pooler_output[0] / 64**0.5

    def logits(self, model, ids, images):
        return model(input_ids=ids, pixel_values=self.pixels(images), token_type_ids=(ids == IMAGE).int()).logits[0]


class Gemma4:
    """gemma4v. The larger models' tower standardizes its rows, that of E2B and E4B bounds what goes through products."""

    merge, grids, patch, steps = 3, [(6, 9), (12, 6), (3, 3)], 4, 64
    PLACES = 64

    def __init__(self, layer_types, shared, per_layer):
        self.layer_types, self.shared, self.per_layer = layer_types, shared, per_layer

    def model(self, t):
        n = len(self.layer_types)
        small = self.per_layer > 0
        text = base_config(num_hidden_layers=n, sliding_window=16, global_head_dim=64, layer_types=self.layer_types,
                           num_kv_shared_layers=self.shared, hidden_size_per_layer_input=self.per_layer,
                           vocab_size_per_layer_input=V, final_logit_softcapping=30.0,
                           use_bidirectional_attention=None if small else "vision")
        text["tie_word_embeddings"] = True
        vision = dict(hidden_size=144, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2,
                      num_key_value_heads=2, head_dim=72, patch_size=self.patch, pooling_kernel_size=self.merge,
                      position_embedding_size=self.PLACES, use_clipped_linears=small, standardize=not small)
        config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None,
                                           image_token_id=IMAGE)
        model = transformers.Gemma4ForConditionalGeneration._from_config(config, attn_implementation="eager")
        out, norms = {}, []
        if small:
            out["embed_tokens_per_layer.weight"] = t["per_layer_token_embd.weight"]
            out["per_layer_model_projection.weight"] = t["per_layer_model_proj.weight"]
            out["per_layer_projection_norm.weight"] = t["per_layer_proj_norm.weight"]
            norms = [("per_layer_input_gate", "inp_gate"), ("per_layer_projection", "proj"),
                     ("post_per_layer_input_norm", "post_norm")]
        fill_gemma4(model.model.language_model, t, out, norms)
        return model

    def tower(self, model):
        return torch.nn.ModuleList([model.model.vision_tower, model.model.embed_vision])

    def linears(self, model):
        """Those with bounds, by the names of their tensors."""
        for i, b in enumerate(model.model.vision_tower.encoder.layers):
            a, m = b.self_attn, b.mlp
            for name, module in [("attn_q", a.q_proj), ("attn_k", a.k_proj), ("attn_v", a.v_proj),
                                 ("attn_out", a.o_proj), ("ffn_gate", m.gate_proj), ("ffn_up", m.up_proj),
                                 ("ffn_down", m.down_proj)]:
                yield f"v.blk.{i}.{name}", module

    def set_rest(self, model):
        """What is no parameter; and norms that make scores as small as trained ones do."""
        g = torch.Generator().manual_seed(11)
        tower = model.model.vision_tower
        near = lambda mean, *shape: mean * (1 + 0.2 * torch.randn(*shape, generator=g))
        with torch.no_grad():
            for b in tower.encoder.layers:
                for norm in (b.self_attn.q_norm, b.self_attn.k_norm):
                    norm.weight.mul_(0.35)
            if self.per_layer:
                for _, module in self.linears(model):
                    for name, mean in [("input_min", -1.4), ("input_max", 1.7), ("output_min", -1.6),
                                       ("output_max", 1.3)]:
                        getattr(module, name).copy_(near(mean, 1)[0])
            else:
                tower.std_bias.copy_(torch.randn(144, generator=g) * 3)
                tower.std_scale.copy_(near(0.1, 144))

    def write(self, path, model):
        self.set_rest(model)
        tower = model.model.vision_tower
        config = dict(hidden_size=144, intermediate_size=96, layers=3, image_size=224, patch_size=self.patch)
        w = Writer(path, "gemma4v", config, [], mean=0.0, std=1.0, key="clip.vision.projector_type")
        w.w.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
        patches = tower.patch_embedder.input_proj.weight.reshape(144, self.patch, self.patch, 3)
        w.put("v.patch_embd.weight", patches.permute(0, 3, 1, 2))
        w.put("v.position_embd.weight", tower.patch_embedder.position_embedding_table)
        for i, b in enumerate(tower.encoder.layers):
            for name, module in [("ln1", b.input_layernorm), ("attn_post_norm", b.post_attention_layernorm),
                                 ("ln2", b.pre_feedforward_layernorm), ("ffn_post_norm", b.post_feedforward_layernorm),
                                 ("attn_q_norm", b.self_attn.q_norm), ("attn_k_norm", b.self_attn.k_norm)]:
                w.put(f"v.blk.{i}.{name}.weight", module.weight)
        for name, module in self.linears(model):
            w.put(f"{name}.weight", module.linear.weight)
            if self.per_layer:
                for end in ("input_min", "input_max", "output_min", "output_max"):
                    w.put(f"{name}.{end}", getattr(module, end).reshape(1))
        if not self.per_layer:
            w.put("v.std_bias", tower.std_bias)
            w.put("v.std_scale", tower.std_scale)
        w.put("mm.input_projection.weight", model.model.embed_vision.embedding_projection.weight)
        w.close()

    def pixels(self, images):
        """Patches row by row, colours last, filled up to one number; and their columns and rows."""
        given, places = [], []
        for grid, patches in images:
            rows, columns = grid
            x = picture(grid, patches, self.patch, self.merge)
            x = (x + 1) / 2
            x = x.reshape(3, rows, self.patch, columns, self.patch).permute(1, 3, 2, 4, 0)
            given.append(x.reshape(rows * columns, -1))
            places.append(torch.tensor([[c, r] for r in range(rows) for c in range(columns)]))
        most = max(len(x) for x in given)
        pad = lambda x, value: torch.nn.functional.pad(x, (0, 0, 0, most - len(x)), value=value)
        return torch.stack([pad(x, 0.0) for x in given]), torch.stack([pad(x, -1) for x in places])

    def rows(self, model, grid, patches):
        """As the text model's embeddings are before it multiplies them."""
        pixels, places = self.pixels([(grid, patches)])
        out = model.model.get_image_features(pixels, places, return_dict=True)
        return out.pooler_output[0] / 64**0.5

    def logits(self, model, ids, images):
        pixels, places = self.pixels(images)
        return model(input_ids=ids, pixel_values=pixels, image_position_ids=places,
                     mm_token_type_ids=(ids == IMAGE).int()).logits[0]


class Lfm2:
    """lfm2: SigLIP 2, whose grid of positions is resized up and down."""

    merge, grids, patch, steps = 2, [(4, 6), (8, 4), (2, 10)], 4, 64

    def model(self, t):
        text = dict(model_type="lfm2", vocab_size=V, hidden_size=64, intermediate_size=160, num_hidden_layers=4,
                    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, norm_eps=1e-5,
                    rope_parameters=dict(rope_type="default", rope_theta=1e6), block_auto_adjust_ff_dim=False,
                    full_attn_idxs=[2], conv_L_cache=3)
        vision = dict(model_type="siglip2_vision_model", hidden_size=144, intermediate_size=96, num_hidden_layers=3,
                      num_attention_heads=2, patch_size=self.patch, num_patches=16, vision_use_head=False)
        config = transformers.Lfm2VlConfig(text_config=text, vision_config=vision, image_token_id=IMAGE,
                                           projector_hidden_size=112)
        model = transformers.Lfm2VlForConditionalGeneration._from_config(config, attn_implementation="eager")
        out = {"embed_tokens.weight": t["token_embd.weight"], "embedding_norm.weight": t["token_embd_norm.weight"]}
        parts = {"conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj",
                 "conv.out_proj": "shortconv.out_proj", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
                 "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_output",
                 "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
                 "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up",
                 "operator_norm": "attn_norm", "ffn_norm": "ffn_norm"}
        for i in range(4):
            of_file = {ours: f"blk.{i}.{theirs}.weight" for ours, theirs in parts.items()}
            out.update({f"layers.{i}.{ours}.weight": t[name] for ours, name in of_file.items() if name in t})
        fill(model.model.language_model, out)
        return model

    def tower(self, model):
        return torch.nn.ModuleList([model.model.vision_tower, model.model.multi_modal_projector])

    def write(self, path, model):
        tower, projector = model.model.vision_tower, model.model.multi_modal_projector
        config = dict(hidden_size=144, intermediate_size=96, layers=3, image_size=256, patch_size=self.patch)
        w = Writer(path, "lfm2", config, [("projector.scale_factor", 2)])
        w.w.add_bool("clip.use_gelu", True)
        w.w.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
        patches = tower.embeddings.patch_embedding
        w.put("v.patch_embd.weight", patches.weight.reshape(144, self.patch, self.patch, 3).permute(0, 3, 1, 2))
        w.put("v.patch_embd.bias", patches.bias)
        w.put("v.position_embd.weight", tower.embeddings.position_embedding.weight)
        for i, b in enumerate(tower.encoder.layers):
            a = b.self_attn
            for name, module in [("ln1", b.layer_norm1), ("ln2", b.layer_norm2), ("attn_q", a.q_proj),
                                 ("attn_k", a.k_proj), ("attn_v", a.v_proj), ("attn_out", a.out_proj),
                                 ("ffn_up", b.mlp.fc1), ("ffn_down", b.mlp.fc2)]:
                w.both(f"v.blk.{i}.{name}", module)
        w.both("v.post_ln", tower.post_layernorm)
        w.both("mm.input_norm", projector.layer_norm)
        w.both("mm.1", projector.linear_1)
        w.both("mm.2", projector.linear_2)
        w.close()

    def pixels(self, images):
        """Patches row by row, colours last, filled up to one number."""
        given = []
        for (rows, columns), patches in images:
            x = picture((rows, columns), patches, self.patch, self.merge)
            x = x.reshape(3, rows, self.patch, columns, self.patch).permute(1, 3, 2, 4, 0)
            given.append(x.reshape(rows * columns, -1))
        most = max(len(x) for x in given)
        pad = lambda x: torch.nn.functional.pad(x, (0, 0, 0, most - len(x)))
        mask = torch.stack([(torch.arange(most) < len(x)).int() for x in given])
        return dict(pixel_values=torch.stack([pad(x) for x in given]), pixel_attention_mask=mask,
                    spatial_shapes=torch.tensor([list(grid) for grid, _ in images]))

    def rows(self, model, grid, patches):
        return model.model.get_image_features(**self.pixels([(grid, patches)]), return_dict=True).pooler_output[0]

    def logits(self, model, ids, images):
        return model(input_ids=ids, **self.pixels(images)).logits[0]


class Pixtral:
    """pixtral, with its merger."""

    merge, grids, patch, steps = 2, [(12, 8), (6, 10), (4, 2)], 4, 64
    END_OF_ROW = 1194

    def model(self, t):
        rope = dict(rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=64, beta_fast=32.0,
                    beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
                    max_position_embeddings=4096)
        text = dict(base_config(num_hidden_layers=3, rope_parameters=rope), model_type="ministral3")
        vision = dict(model_type="pixtral", hidden_size=144, intermediate_size=96, num_hidden_layers=3,
                      num_attention_heads=2, image_size=64, patch_size=4, hidden_act="silu")
        config = transformers.Mistral3Config(text_config=text, vision_config=vision, image_token_index=IMAGE,
                                             tie_word_embeddings=False)
        model = transformers.Mistral3ForConditionalGeneration._from_config(config, attn_implementation="eager")
        out = {"embed_tokens.weight": t["token_embd.weight"], "norm.weight": t["output_norm.weight"]}
        for i in range(3):
            layer = {f"self_attn.{k}.weight": t[f"blk.{i}.{v}.weight"]
                     for k, v in [("v_proj", "attn_v"), ("o_proj", "attn_output")]}
            for part, heads in [("q", 4), ("k", 2)]:
                layer[f"self_attn.{part}_proj.weight"] = halves(t[f"blk.{i}.attn_{part}.weight"], heads)
            for part in ("gate", "up", "down"):
                layer[f"mlp.{part}_proj.weight"] = t[f"blk.{i}.ffn_{part}.weight"]
            layer["input_layernorm.weight"] = t[f"blk.{i}.attn_norm.weight"]
            layer["post_attention_layernorm.weight"] = t[f"blk.{i}.ffn_norm.weight"]
            out.update({f"layers.{i}.{k}": v for k, v in layer.items()})
        fill(model.model.language_model, out)
        return model

    def tower(self, model):
        return torch.nn.ModuleList([model.model.vision_tower, model.model.multi_modal_projector])

    def write(self, path, model):
        tower, projector = model.model.vision_tower, model.model.multi_modal_projector
        config = dict(hidden_size=144, intermediate_size=96, layers=3, image_size=64, patch_size=4)
        w = Writer(path, "pixtral", config, [("spatial_merge_size", 2)])
        w.w.add_bool("clip.use_silu", True)
        w.w.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
        w.put("v.patch_embd.weight", tower.patch_conv.weight)
        w.put("v.pre_ln.weight", tower.ln_pre.weight)
        for i, b in enumerate(tower.transformer.layers):
            a, f = b.attention, b.feed_forward
            for name, module in [("ln1", b.attention_norm), ("ln2", b.ffn_norm), ("attn_v", a.v_proj),
                                 ("attn_out", a.o_proj), ("ffn_gate", f.gate_proj), ("ffn_up", f.up_proj),
                                 ("ffn_down", f.down_proj)]:
                w.put(f"v.blk.{i}.{name}.weight", module.weight)
            for name, module in [("attn_q", a.q_proj), ("attn_k", a.k_proj)]:
                w.put(f"v.blk.{i}.{name}.weight", pairs(module.weight, 2))
        w.put("mm.input_norm.weight", projector.norm.weight)
        w.put("mm.patch_merger.weight", projector.patch_merger.merging_layer.weight)
        w.put("mm.1.weight", projector.linear_1.weight)
        w.put("mm.2.weight", projector.linear_2.weight)
        w.put("v.token_embd.img_break", model.model.language_model.embed_tokens.weight[self.END_OF_ROW])
        w.close()

    def pixels(self, images):
        """Filled up to one size, as the processor gives them."""
        given = [picture(grid, patches, self.patch, self.merge) for grid, patches in images]
        height, width = (max(x.shape[i] for x in given) for i in (1, 2))
        fill_up = lambda x: torch.nn.functional.pad(x, (0, width - x.shape[2], 0, height - x.shape[1]))
        return torch.stack([fill_up(x) for x in given]), torch.tensor([list(x.shape[1:]) for x in given])

    def rows(self, model, grid, patches):
        pixels, sizes = self.pixels([(grid, patches)])
        return torch.cat(model.model.get_image_features(pixels, sizes, return_dict=True).pooler_output)

    def logits(self, model, ids, images):
        pixels, sizes = self.pixels(images)
        return model(input_ids=ids, pixel_values=pixels, image_sizes=sizes).logits[0]

    def span(self, grid):
        rows, columns = (side // self.merge for side in grid)
        return ([IMAGE] * columns + [self.END_OF_ROW]) * (rows - 1) + [IMAGE] * columns


WINDOWED, FULL = "sliding_attention", "full_attention"
FAMILIES = {"gemma4": Gemma4([WINDOWED] * 5 + [FULL], 0, 0),
            "gemma4e": Gemma4(([WINDOWED] * 3 + [FULL]) * 2, 4, 32),
            "lfm2": Lfm2(), "mistral3": Pixtral(), "qwen35": Qwen(qwen35), "qwen3vl": Qwen(qwen3vl), "qwen2vl": Qwen25(),
            "gemma4uv": Gemma4Unified([WINDOWED] * 5 + [FULL]), "glm4v": Glm4(), "kimik25": Kimi(),
            "internvl": InternVl(), "internvl6": InternVl6(),
            "muse-glimmer": Muse(),
            "gemma3": Gemma3()}


def images(family):
    g = torch.Generator().manual_seed(7)
    return [(grid, torch.randint(-family.steps, family.steps + 1, (grid[0] * grid[1], 3 * family.patch**2), generator=g)
             / family.steps) for grid in family.grids]


def prompts(family):
    """Which images come in a prompt, and its ids."""
    g = torch.Generator().manual_seed(9)
    words = lambda n: torch.randint(3, 1100, (n,), generator=g).tolist()

    def span(k):
        rows, columns = family.grids[k]
        if hasattr(family, "span"):
            return [START] + family.span(family.grids[k]) + [END]
        return [START] + [IMAGE] * (rows * columns // family.merge**2) + [END]

    last = len(family.grids) - 1
    yield [0], words(4) + span(0) + words(6)
    yield [last - 1, last], span(last - 1) + words(7) + span(last) + words(40)
    yield [0, 0, 1], words(30) + span(0) + words(2) + span(0) + span(1) + words(5)


def write_scores(path, other, model):
    """What the text model says of the texts of another's golden."""
    cases = []
    for ids in (case["ids"] for case in json.loads(other.read_text())["cases"]):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0]
        scores = torch.log_softmax(logits, -1)
        best = torch.topk(scores[-1], 10)
        cases.append(dict(ids=ids, next_logprobs=[round(scores[i, id].item(), 5) for i, id in enumerate(ids[1:])],
                          best=[[int(t), round(v.item(), 5)] for t, v in zip(best.indices, best.values)],
                          logit_std=round(logits.std().item(), 3)))
    golden = dict(model=type(model.config).__name__, torch=torch.__version__.split("+")[0],
                  transformers=transformers.__version__, cases=cases)
    path.write_text(json.dumps(golden, separators=(",", ":")))


def make(fixtures, name):
    family = FAMILIES[name]
    text = getattr(family, "text", name)
    text_file = fixtures / "arch" / f"{text}.gguf"
    if hasattr(family, "write_text"):
        family.write_text(text_file, fixtures / "arch" / f"{family.source}.gguf")
    weights = tensors_of(text_file)
    model = family.model(weights)
    with torch.no_grad():
        model.lm_head.weight.copy_(weights.get("output.weight", weights["token_embd.weight"]))
    model.float().eval()
    if hasattr(family, "write_text"):
        write_scores(fixtures / "arch" / f"{text}.json", fixtures / "arch" / f"{family.source}.json", model)
    known = json.loads((fixtures / "arch" / f"{text}.json").read_text())["cases"][1]
    with torch.no_grad():
        scores = torch.log_softmax(model(input_ids=torch.tensor([known["ids"]])).logits[0], -1)
    for i, expected in enumerate(known["next_logprobs"]):
        found = scores[i, known["ids"][i + 1]].item()
        assert abs(found - expected) < 1e-3, f"the text model is another one: {i} {found} {expected}"
    spread(family.tower(model))
    family.write(fixtures / "images" / f"{name}-mmproj.gguf", model)
    given, cases = images(family), []
    with torch.no_grad():
        rows = [family.rows(model, grid, patches) for grid, patches in given]
        for which, ids in prompts(family):
            logits = family.logits(model, torch.tensor([ids]), [given[k] for k in which])
            scores = torch.log_softmax(logits, -1)
            # Of each row that is none of an image: the best tokens behind it.
            of_images = (IMAGE, getattr(family, "END_OF_ROW", IMAGE))
            ends = [i for i, id in enumerate(ids) if id not in of_images and i + 1 > ids.index(END)]
            best = [torch.topk(scores[i], 8) for i in ends]
            cases.append(dict(images=which, ids=ids, ends=[
                dict(rows=i + 1, best=[[int(t), round(v.item(), 5)] for t, v in zip(b.indices, b.values)])
                for i, b in zip(ends, best)]))
    flat = lambda x, n: [round(float(v), n) for v in x.flatten()]
    golden = dict(
        torch=torch.__version__.split("+")[0], transformers=transformers.__version__, placeholder=IMAGE,
        merge=family.merge, row_gap=int(hasattr(family, "END_OF_ROW")),
        # The model in `arch` that reads the images, where it has another name.
        **({} if text == name else {"text_model": text}),
        images=[dict(grid=list(g), patches=flat(p, 8), rows=flat(r, 6)) for (g, p), r in zip(given, rows)],
        cases=cases)
    (fixtures / "images" / f"{name}.json").write_text(json.dumps(golden, separators=(",", ":")))
    print(name, "rows", rows[0].std().item(), "logits", scores.std().item())


def main():
    fixtures = Path(sys.argv[1])
    (fixtures / "images").mkdir(exist_ok=True)
    for name in sys.argv[2:] or FAMILIES:
        make(fixtures, name)


if __name__ == "__main__":
    main()
