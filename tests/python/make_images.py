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

import gguf
import numpy as np
import torch
import transformers

from make_encoders import spread

V, IMAGE, START, END = 1198, 1190, 1191, 1192
PATCH, SIDE = 8, 6
GRIDS = [(4, 6), (8, 4), (2, 2)]
VISION = dict(depth=3, hidden_size=144, num_heads=2, intermediate_size=96, patch_size=PATCH, spatial_merge_size=2,
              temporal_patch_size=2, out_hidden_size=64, num_position_embeddings=SIDE * SIDE)
SPECIAL = dict(image_token_id=IMAGE, video_token_id=1193, vision_start_token_id=START, vision_end_token_id=END)


def tensors_of(path):
    reader = gguf.GGUFReader(path)
    return {t.name: torch.from_numpy(np.array(t.data).astype(np.float32)) for t in reader.tensors}


def base_config(**more):
    return dict(vocab_size=V, hidden_size=64, intermediate_size=160, max_position_embeddings=4096, rms_norm_eps=1e-6,
                tie_word_embeddings=False, num_attention_heads=4, num_key_value_heads=2, head_dim=32, **more)


def fill(module, values):
    """Takes over weights by the module's own names; each must be there, and each be filled."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(values.pop(name).reshape(parameter.shape))
    assert not values, sorted(values)


def attention(t, i, norm):
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    out = {f"self_attn.{k}.weight": t[f"blk.{i}.{v}.weight"] for k, v in names.items()}
    for k in ("q", "k"):
        out[f"self_attn.{k}_norm.weight"] = t[f"blk.{i}.attn_{k}_norm.weight"] - norm
    return out


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


def write(path, tower, deepstack):
    """The projector file of a tower."""
    w = gguf.GGUFWriter(path, "clip")
    w.add_type("mmproj")
    w.add_string("clip.projector_type", "qwen3vl_merger")
    w.add_bool("clip.has_vision_encoder", True)
    w.add_bool("clip.use_gelu", True)
    v = lambda key: f"clip.vision.{key}"
    for key, value in [("image_size", SIDE * PATCH), ("patch_size", PATCH), ("embedding_length", 144),
                       ("feed_forward_length", 96), ("projection_dim", 64), ("block_count", 3),
                       ("attention.head_count", 2), ("spatial_merge_size", 2)]:
        w.add_uint32(v(key), value)
    w.add_float32(v("attention.layer_norm_epsilon"), 1e-6)
    w.add_array(v("image_mean"), [0.5, 0.5, 0.5])
    w.add_array(v("image_std"), [0.5, 0.5, 0.5])
    w.add_array(v("is_deepstack_layers"), [i in deepstack for i in range(3)])

    def put(name, value):
        value = value.detach().numpy()
        # Positions stay f32, as the converter keeps them.
        half = value.ndim >= 2 and name != "v.position_embd.weight"
        w.add_tensor(name, np.ascontiguousarray(value.astype(np.float16 if half else np.float32)))

    def both(name, module):
        put(name + ".weight", module.weight)
        put(name + ".bias", module.bias)

    put("v.patch_embd.weight", tower.patch_embed.proj.weight[:, :, 0])
    put("v.patch_embd.weight.1", tower.patch_embed.proj.weight[:, :, 1])
    put("v.patch_embd.bias", tower.patch_embed.proj.bias)
    put("v.position_embd.weight", tower.pos_embed.weight)
    for i, b in enumerate(tower.blocks):
        for name, module in [("ln1", b.norm1), ("ln2", b.norm2), ("attn_qkv", b.attn.qkv), ("attn_out", b.attn.proj),
                             ("ffn_up", b.mlp.linear_fc1), ("ffn_down", b.mlp.linear_fc2)]:
            both(f"v.blk.{i}.{name}", module)
    both("v.post_ln", tower.merger.norm)
    both("mm.0", tower.merger.linear_fc1)
    both("mm.2", tower.merger.linear_fc2)
    for i, merger in zip(deepstack, getattr(tower, "deepstack_merger_list", [])):
        both(f"v.deepstack.{i}.norm", merger.norm)
        both(f"v.deepstack.{i}.fc1", merger.linear_fc1)
        both(f"v.deepstack.{i}.fc2", merger.linear_fc2)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def images():
    g = torch.Generator().manual_seed(7)
    return [(grid, torch.randint(-256, 257, (grid[0] * grid[1], 3 * PATCH * PATCH), generator=g) / 256)
            for grid in GRIDS]


def pixels(patches):
    """As the processor gives them: both frames of an image are the same."""
    x = patches.reshape(-1, 3, 1, PATCH, PATCH).expand(-1, 3, 2, PATCH, PATCH)
    return x.reshape(len(patches), -1)


def prompts():
    """Which images come in a prompt, and its ids."""
    g = torch.Generator().manual_seed(9)
    words = lambda n: torch.randint(3, 1100, (n,), generator=g).tolist()
    span = lambda k: [START] + [IMAGE] * (GRIDS[k][0] * GRIDS[k][1] // 4) + [END]
    yield [0], words(4) + span(0) + words(6)
    yield [1, 2], span(1) + words(7) + span(2) + words(40)
    yield [0, 0, 1], words(30) + span(0) + words(2) + span(0) + span(1) + words(5)


def make(fixtures, name):
    weights = tensors_of(fixtures / "arch" / f"{name}.gguf")
    model = {"qwen35": qwen35, "qwen3vl": qwen3vl}[name](weights)
    with torch.no_grad():
        model.lm_head.weight.copy_(weights["output.weight"])
    model.float().eval()
    known = json.loads((fixtures / "arch" / f"{name}.json").read_text())["cases"][1]
    with torch.no_grad():
        scores = torch.log_softmax(model(input_ids=torch.tensor([known["ids"]])).logits[0], -1)
    for i, expected in enumerate(known["next_logprobs"]):
        assert abs(scores[i, known["ids"][i + 1]].item() - expected) < 1e-3, "the text model is another one"
    tower = model.model.visual
    spread(tower)
    deepstack = getattr(model.config.vision_config, "deepstack_visual_indexes", [])
    write(fixtures / "images" / f"{name}-mmproj.gguf", tower, list(deepstack))
    given, cases = images(), []
    with torch.no_grad():
        rows = []
        for grid, patches in given:
            out = tower(pixels(patches), grid_thw=torch.tensor([[1, *grid]]))
            parts = [out.pooler_output, *getattr(out, "deepstack_features", [])]
            rows.append(torch.cat(parts, -1))
        for which, ids in prompts():
            ids_tensor = torch.tensor([ids])
            logits = model(
                input_ids=ids_tensor,
                pixel_values=torch.cat([pixels(given[k][1]) for k in which]),
                image_grid_thw=torch.tensor([[1, *given[k][0]] for k in which]),
                mm_token_type_ids=(ids_tensor == IMAGE).int(),
            ).logits[0]
            scores = torch.log_softmax(logits, -1)
            # Of each row that is none of an image: the best tokens behind it.
            ends = [i for i, id in enumerate(ids) if id != IMAGE and i + 1 > ids.index(END)]
            best = [torch.topk(scores[i], 8) for i in ends]
            cases.append(dict(images=which, ids=ids, ends=[
                dict(rows=i + 1, best=[[int(t), round(v.item(), 5)] for t, v in zip(b.indices, b.values)])
                for i, b in zip(ends, best)]))
    flat = lambda x, n: [round(float(v), n) for v in x.flatten()]
    golden = dict(
        torch=torch.__version__.split("+")[0], transformers=transformers.__version__, placeholder=IMAGE,
        images=[dict(grid=list(g), patches=flat(p, 8), rows=flat(r, 6)) for (g, p), r in zip(given, rows)],
        cases=cases)
    (fixtures / "images" / f"{name}.json").write_text(json.dumps(golden, separators=(",", ":")))
    print(name, "rows", rows[0].std().item(), "logits", scores.std().item())


def main():
    fixtures = Path(sys.argv[1])
    (fixtures / "images").mkdir(exist_ok=True)
    for name in sys.argv[2:] or ["qwen35", "qwen3vl"]:
        make(fixtures, name)


if __name__ == "__main__":
    main()
