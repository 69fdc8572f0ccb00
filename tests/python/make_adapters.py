"""LoRA adapters as peft writes them, for a small model of tests/fixtures/arch, with goldens.

Random adapters by peft, rounded to f16: one for all linear matrices and one for some, whose ranks
and factors differ. Log-probabilities of each, and of both at once, by transformers in float32, of
the texts that the model's own goldens have. transformers reads the model's weights out of the GGUF
file; without adapters it has to compute what these goldens say.

usage: make_adapters.py ARCH_DIRECTORY DIRECTORY
needs: torch, transformers, peft, gguf, numpy
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import peft
import torch
import transformers

SEED = 41
MODEL = "gemma2"

# The model's matrices by their names in transformers.
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ADAPTERS = {
    "all": dict(r=4, lora_alpha=6, target_modules=[n.split(".")[1] for n in NAMES]),
    "some": dict(r=6, lora_alpha=3, target_modules=["q_proj", "v_proj", "up_proj"]),
}


def load(arch: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arch, gguf_file=f"{MODEL}.gguf", dtype=torch.float32, attn_implementation="eager").eval()
    for layer in model.model.layers:
        # The factor on scores is no key of the file: readers take the size of a head.
        layer.self_attn.scaling = layer.self_attn.head_dim ** -0.5
    return model


def logprobs(model, ids: list[int]) -> list[float]:
    """Of each id behind the first."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    of_all = torch.log_softmax(logits.double(), dim=-1)
    return [round(of_all[i, ids[i + 1]].item(), 6) for i in range(len(ids) - 1)]


def write(model, name: str, path: Path) -> None:
    writer = gguf.GGUFWriter(path, MODEL)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", ADAPTERS[name]["lora_alpha"])
    for module, layer in model.named_modules():
        if not isinstance(layer, peft.tuners.lora.Linear) or name not in layer.lora_A:
            continue
        _, _, rest = module.partition("layers.")
        block, _, part = rest.partition(".")
        for half, weights in (("lora_a", layer.lora_A), ("lora_b", layer.lora_B)):
            data = weights[name].weight.detach().numpy().astype(np.float16)
            writer.add_tensor(f"blk.{block}.{NAMES[part]}.weight.{half}", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    arch, to = Path(sys.argv[1]), Path(sys.argv[2])
    to.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    golden = json.loads((arch / f"{MODEL}.json").read_text())
    texts = [case["ids"] for case in golden["cases"]]
    model = load(arch)
    for case in golden["cases"]:
        ours = np.array(logprobs(model, case["ids"]))
        apart = np.abs(ours - np.array(case["next_logprobs"])).max()
        assert apart < 1e-4, f"the model without adapters is {apart} off its goldens"
    for name, config in ADAPTERS.items():
        config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config)
        if isinstance(model, peft.PeftModel):
            model.add_adapter(name, config)
        else:
            model = peft.get_peft_model(model, config, adapter_name=name)
    model.eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "lora_" in name:
                std = 0.3 if "lora_B" in name else weights.shape[1] ** -0.5
                weights.copy_((torch.randn_like(weights) * std).half().float())
    cases = []
    for names in (["all"], ["some"], ["all", "some"]):
        model.base_model.set_adapter(names)
        scales = [float(name in names) for name in ADAPTERS]
        cases += [dict(scales=scales, ids=ids, next_logprobs=logprobs(model, ids)) for ids in texts]
    for name in ADAPTERS:
        write(model, name, to / f"{MODEL}-{name}.gguf")
    versions = dict(torch=torch.__version__, transformers=transformers.__version__, peft=peft.__version__)
    (to / f"{MODEL}.json").write_text(json.dumps(dict(model=MODEL, seed=SEED, **versions, cases=cases)) + "\n")


if __name__ == "__main__":
    main()
