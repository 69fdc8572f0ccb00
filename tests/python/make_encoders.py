"""Small random encoders by their authors' code (transformers), as GGUF files with goldens.

For each architecture: random weights, rounded to what the file stores; embeddings and ranking
logits of a few texts, computed one text at a time in float32. Names and keys are those that GGUF
files of these models have. Vocabularies are made of the words below; `tokenizers` gives the ids of
many texts by them.

usage: make_encoders.py DIRECTORY [NAME ...]
needs: torch, transformers, tokenizers, gguf, numpy, sentencepiece
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

from encoder_jina import JinaBert
from encoder_vocabularies import Vocabulary

SEED = 38
F16, F32 = np.float16, np.float32

TEXTS = [
    "the quick brown fox",
    "How do I return a broken kettle?",
    "Embedding models map a text to a vector, so that texts of one meaning lie near each other. " * 2,
    "Über den faulen Hund: le château, mañana!",
]
PAIRS = [
    ("how do i return a broken kettle", "a broken kettle can be paid back"),
    ("river", "the river rose after three days of rain and the bridge was closed"),
]

# A corpus to search: what is near to the query as models of random weights see it.
QUERY = "how do i return a broken kettle"
CORPUS = [
    "the river rose after three days of rain and the bridge was closed to heavy lorries",
    "how do i return a broken kettle and when will the money be paid back to my account",
    "a database keeps rows in pages and an index finds them",
    "embedding models map a text to a vector so that texts of one meaning lie near each other",
    "a sleeping cat watches from the garden wall",
    "return the kettle",
    "rerankers read a query together with a document and give one number",
    "the bridge was closed until monday",
    "el veloz zorro marrón salta sobre el perro perezoso",
]

# Those that are told how well each document fits, by 0.05 apart at least.
RANKED = ("llama-embed", "modern-bert-rank")

# Texts that tokenizers disagree on, where they disagree at all.
CASES = TEXTS + [
    "", " ", "  leading and   inner  spaces ", "tab\tnew\nline\r\nend", "UPPER lower MiXeD",
    "café naïve Ångström ÉCOLE İstanbul ß ﬁ ﬀ", "e\u0301 decomposed", "中文字符 与 english 混合", "日本語のテキスト",
    "한국어 텍스트", "привет мир", "मानक हिन्दी", "ไทย", "عربى", "🙂 emoji 👩‍👩‍👧 family", "punct!?.,;:'\"()[]{}<>@#$%^&*-_=+/\\|`~",
    "don't can't we'll", "a" * 99, "b" * 100, "c" * 101, "zero\u200bwidth\ufeffbom", "nbsp\u00a0here\u3000wide",
    "\u0000null\u0001ctl\u007f", "replacement \ufffd char", "[CLS] the [SEP] dog [MASK]", "<s> the </s> dog",
    "½ ² № ™ ｆｕｌｌ ｗｉｄｔｈ", "3.14159 1,000,000 0x1F", "https://example.org/a?b=c&d=e#f", "¿qué? ¡sí! «oui» “quoted”—dash…",
    "x" * 300 + " y", "\u2581 mark \u2581a", "a\u0300\u0301\u0302b", "ǅ ǆ ŉ", "ＡＢＣ", "٣٤٥", "\U0001d400\U0001d401",
]


# The package takes the names of control tokens in a text for pieces; and it composes no grapheme of
# six bytes or more, as sentencepiece does.
LEFT_OUT = {"unigram": ["<s> the </s> dog", "a\u0300\u0301\u0302b"]}


def spread(model, gain=1.0):
    """Weights that make attention and activations differ: the usual initial ones are near zero."""
    g = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() >= 2:
                fan = 4 if "embed" in name else p.shape[-1]
                p.copy_(torch.randn(p.shape, generator=g) * gain / fan**0.5)
                p.copy_(p.half().float())
            elif name.endswith("bias"):
                p.copy_(torch.randn(p.shape, generator=g) * 0.1)
            else:
                p.copy_(1 + torch.randn(p.shape, generator=g) * 0.1)


class Writer:
    """A GGUF file of one model."""

    def __init__(self, path, arch, config, pooling, n_ctx):
        self.w = gguf.GGUFWriter(path, arch)
        w = self.w
        w.add_context_length(n_ctx)
        w.add_embedding_length(config.hidden_size)
        w.add_feed_forward_length(config.intermediate_size)
        w.add_block_count(config.num_hidden_layers)
        w.add_head_count(config.num_attention_heads)
        w.add_causal_attention(False)
        if pooling is not None:
            w.add_pooling_type(gguf.PoolingType(pooling))

    def tensor(self, name, value):
        value = value.detach().numpy()
        matrix = value.ndim >= 2 and name not in ("position_embd.weight", "token_types.weight")
        self.w.add_tensor(name, np.ascontiguousarray(value.astype(F16 if matrix else F32)))

    def both(self, name, module):
        self.tensor(name + ".weight", module.weight)
        if getattr(module, "bias", None) is not None:
            self.tensor(name + ".bias", module.bias)

    def close(self):
        self.w.write_header_to_file()
        self.w.write_kv_data_to_file()
        self.w.write_tensors_to_file()
        self.w.close()


def bert_tensors(f, base):
    f.both("token_embd", base.embeddings.word_embeddings)
    f.both("token_embd_norm", base.embeddings.LayerNorm)
    f.tensor("token_types.weight", base.embeddings.token_type_embeddings.weight)
    for i, layer in enumerate(base.encoder.layer):
        own, out = layer.attention.self, layer.attention.output
        for name, module in [
            ("attn_q", own.query), ("attn_k", own.key), ("attn_v", own.value),
            ("attn_output", out.dense), ("attn_output_norm", out.LayerNorm),
            ("ffn_up", layer.intermediate.dense), ("ffn_down", layer.output.dense),
            ("layer_output_norm", layer.output.LayerNorm),
        ]:
            f.both(f"blk.{i}.{name}", module)


def poolings(states):
    mean = states.mean(0)
    return {"mean": mean, "first": states[0], "last": states[-1]}


def numbers(x):
    return [round(float(v), 6) for v in x]


def corpus_fit(text, vocabulary, run, classes):
    """How well a document fits the query: the output of the class, or the cosine of their means."""
    if classes:
        return classes(vocabulary.pair(QUERY, text))[0]
    query, document = (run(vocabulary.ids(x)).mean(0) for x in (QUERY, text))
    return torch.nn.functional.cosine_similarity(query, document, dim=0)


def goldens(name, model, base, vocabulary, classes=None, run=None):
    """Of each text its ids, embeddings of length 1, and of a pair the outputs of `classes`."""
    model.eval()
    run = run or (lambda ids: base(input_ids=torch.tensor([ids])).last_hidden_state[0])
    cases = []
    with torch.no_grad():
        for text in TEXTS:
            ids = vocabulary.ids(text)
            vectors = {k: v / v.norm() for k, v in poolings(run(ids)).items()}
            cases.append({"text": text, "ids": ids, **{k: numbers(v) for k, v in vectors.items()}})
        pairs = []
        for query, document in PAIRS if classes else []:
            ids = vocabulary.pair(query, document)
            pairs.append({"query": query, "document": document, "ids": ids, "logits": numbers(classes(ids))})
        fits = [corpus_fit(text, vocabulary, run, classes) for text in CORPUS]
    return {"model": name, "seed": SEED, "torch": torch.__version__.split("+")[0],
            "transformers": transformers.__version__, "cases": cases, "pairs": pairs, "fits": numbers(fits)}


def bert(path, kind="uncased", rank=False, width=64):
    vocabulary = Vocabulary(kind)
    config = transformers.BertConfig(
        vocab_size=vocabulary.n, hidden_size=width, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=96, type_vocab_size=2, hidden_act="gelu", attn_implementation="eager", num_labels=1)
    model = transformers.BertForSequenceClassification(config) if rank else transformers.BertModel(config)
    base = model.bert if rank else model
    spread(model)
    f = Writer(path, "bert", config, 4 if rank else 1, 96)
    f.w.add_layer_norm_eps(config.layer_norm_eps)
    f.w.add_token_type_count(2)
    vocabulary.write(f.w)
    bert_tensors(f, base)
    f.tensor("position_embd.weight", base.embeddings.position_embeddings.weight)
    classes = None
    if rank:
        f.both("cls", base.pooler.dense)
        f.both("cls.output", model.classifier)
        # As files of such models are read: all tokens are of the first type.
        classes = lambda ids: model(input_ids=torch.tensor([ids])).logits[0]
    f.close()
    return goldens("BertForSequenceClassification" if rank else "BertModel", model, base, vocabulary, classes)


def xlm_roberta(path, rank=False, width=64):
    vocabulary = Vocabulary("unigram")
    n_ctx = 128
    config = transformers.XLMRobertaConfig(
        vocab_size=vocabulary.n, hidden_size=width, num_hidden_layers=2, num_attention_heads=1, intermediate_size=64,
        max_position_embeddings=n_ctx + 2, type_vocab_size=1, pad_token_id=1, attn_implementation="eager",
        num_labels=1)
    cls = transformers.XLMRobertaForSequenceClassification if rank else transformers.XLMRobertaModel
    model = cls(config)
    base = model.roberta if rank else model
    spread(model)
    f = Writer(path, "bert", config, 4 if rank else 2, n_ctx)
    f.w.add_layer_norm_eps(config.layer_norm_eps)
    f.w.add_token_type_count(1)
    vocabulary.write(f.w)
    bert_tensors(f, base)
    # Positions begin behind the padding's.
    f.tensor("position_embd.weight", base.embeddings.position_embeddings.weight[2:])
    classes = None
    if rank:
        f.both("cls", model.classifier.dense)
        f.both("cls.output", model.classifier.out_proj)
        classes = lambda ids: model(input_ids=torch.tensor([ids])).logits[0]
    f.close()
    return goldens(cls.__name__, model, base, vocabulary, classes)


def rotary(path, arch, model, base, config, pooling, write, eps=True, classes=None, rank=False, run=None, vocabulary=None):
    """A model whose tensors `write` adds."""
    spread(model)
    f = Writer(path, arch, config, 4 if rank else pooling, 128)
    if eps:
        f.w.add_layer_norm_eps(getattr(config, "layer_norm_eps", None) or config.norm_eps)
    vocabulary.write(f.w)
    write(f)
    f.close()
    return goldens(type(model).__name__, model, base, vocabulary, classes, run)


def fused(f, name, modules):
    f.tensor(name + ".weight", torch.cat([m.weight for m in modules]))
    if modules[0].bias is not None:
        f.tensor(name + ".bias", torch.cat([m.bias for m in modules]))


def nomic_bert(path):
    vocabulary = Vocabulary("uncased")
    config = transformers.NomicBertConfig(
        vocab_size=vocabulary.n, hidden_size=32, num_hidden_layers=2, num_attention_heads=1, intermediate_size=64,
        max_position_embeddings=128, layer_norm_eps=1e-12, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0})
    model = transformers.NomicBertModel(config, add_pooling_layer=False)

    def write(f):
        f.w.add_rope_freq_base(1000.0)
        f.both("token_embd", model.embeddings.word_embeddings)
        f.both("token_embd_norm", model.embeddings.LayerNorm)
        f.tensor("token_types.weight", model.embeddings.token_type_embeddings.weight)
        for i, layer in enumerate(model.layers):
            own = layer.self_attn
            fused(f, f"blk.{i}.attn_qkv", [own.q_proj, own.k_proj, own.v_proj])
            for name, module in [
                ("attn_output", own.o_proj), ("attn_output_norm", layer.post_attention_layernorm),
                ("ffn_gate", layer.mlp.gate_proj), ("ffn_up", layer.mlp.up_proj), ("ffn_down", layer.mlp.down_proj),
                ("layer_output_norm", layer.post_mlp_layernorm),
            ]:
                f.both(f"blk.{i}.{name}", module)

    return rotary(path, "nomic-bert", model, model, config, 1, write, vocabulary=vocabulary)


class Mixture(torch.nn.Module):
    """Routed experts of Nomic Embed v2: the two best by softmax, weighed by it as it is."""

    def __init__(self, width, inner, n):
        super().__init__()
        self.router = torch.nn.Linear(width, n, bias=False)
        self.up = torch.nn.Parameter(torch.zeros(n, inner, width))
        self.down = torch.nn.Parameter(torch.zeros(n, width, inner))

    def forward(self, x):
        best, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for at in range(2):
            up, down = self.up[chosen[..., at]], self.down[chosen[..., at]]
            inner = torch.nn.functional.gelu((up @ x.unsqueeze(-1)))
            out = out + best[..., at:at + 1] * (down @ inner).squeeze(-1)
        return out


class Plain(torch.nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, inner), torch.nn.Linear(inner, width)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


def nomic_bert_moe(path):
    """The authors' encoder with the feed-forwards of the second version put in."""
    vocabulary = Vocabulary("unigram")
    config = transformers.NomicBertConfig(
        vocab_size=vocabulary.n, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=128, layer_norm_eps=1e-5, type_vocab_size=1, pad_token_id=1,
        attn_implementation="eager", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    model = transformers.NomicBertModel(config, add_pooling_layer=False)
    model.layers[0].mlp, model.layers[1].mlp = Plain(32, 48), Mixture(32, 48, 4)

    def write(f):
        f.w.add_rope_freq_base(10000.0)
        f.w.add_moe_every_n_layers(2)
        f.w.add_expert_count(4)
        f.w.add_expert_used_count(2)
        f.both("token_embd", model.embeddings.word_embeddings)
        f.both("token_embd_norm", model.embeddings.LayerNorm)
        f.tensor("token_types.weight", model.embeddings.token_type_embeddings.weight)
        for i, layer in enumerate(model.layers):
            own = layer.self_attn
            fused(f, f"blk.{i}.attn_qkv", [own.q_proj, own.k_proj, own.v_proj])
            for name, module in [
                ("attn_output", own.o_proj), ("attn_output_norm", layer.post_attention_layernorm),
                ("layer_output_norm", layer.post_mlp_layernorm),
            ]:
                f.both(f"blk.{i}.{name}", module)
        plain, mixture = model.layers[0].mlp, model.layers[1].mlp
        f.both("blk.0.ffn_up", plain.up)
        f.both("blk.0.ffn_down", plain.down)
        f.tensor("blk.1.ffn_gate_inp.weight", mixture.router.weight)
        f.tensor("blk.1.ffn_up_exps.weight", mixture.up)
        f.tensor("blk.1.ffn_down_exps.weight", mixture.down)

    return rotary(path, "nomic-bert-moe", model, model, config, 1, write, vocabulary=vocabulary)


def jina_v2(path, code=False):
    """Three heads, so that slopes are not those of a power of two alone."""
    vocabulary = Vocabulary("uncased")
    config = transformers.BertConfig(
        vocab_size=vocabulary.n, hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=64,
        max_position_embeddings=128, type_vocab_size=2, hidden_act="gelu")
    model = JinaBert(config, code)

    def write(f):
        f.w.add_token_type_count(2)
        f.both("token_embd", model.embeddings.words)
        f.both("token_embd_norm", model.embeddings.norm)
        f.tensor("token_types.weight", model.embeddings.types.weight)
        for i, layer in enumerate(model.layers):
            for name, module in layer.parts():
                f.both(f"blk.{i}.{name}", module)

    return rotary(path, "jina-bert-v2", model, model, config, 1, write, run=lambda ids: model(torch.tensor(ids)),
                  vocabulary=vocabulary)


def jina_v3(path):
    vocabulary = Vocabulary("unigram")
    config = transformers.JinaEmbeddingsV3Config(
        vocab_size=vocabulary.n, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=128, type_vocab_size=1, pad_token_id=1, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0})
    model = transformers.JinaEmbeddingsV3Model(config, add_pooling_layer=False)

    def write(f):
        f.w.add_rope_freq_base(20000.0)
        f.both("token_embd", model.embeddings.word_embeddings)
        f.both("token_embd_norm", model.embeddings.LayerNorm)
        f.tensor("token_types.weight", model.embeddings.token_type_embeddings.weight)
        for i, layer in enumerate(model.layers):
            own = layer.self_attn
            fused(f, f"blk.{i}.attn_qkv", [own.q_proj, own.k_proj, own.v_proj])
            for name, module in [
                ("attn_output", own.o_proj), ("attn_output_norm", layer.post_attention_layernorm),
                ("ffn_up", layer.mlp.fc1), ("ffn_down", layer.mlp.fc2),
                ("layer_output_norm", layer.post_mlp_layernorm),
            ]:
                f.both(f"blk.{i}.{name}", module)

    return rotary(path, "jina-bert-v3", model, model, config, 1, write, vocabulary=vocabulary)


def modern_bert(path, rank=False):
    vocabulary = Vocabulary("uncased")
    config = transformers.ModernBertConfig(
        vocab_size=vocabulary.n, hidden_size=32, num_hidden_layers=4, num_attention_heads=1, intermediate_size=48,
        max_position_embeddings=128, local_attention=16, pad_token_id=0, bos_token_id=2, eos_token_id=3,
        cls_token_id=2, sep_token_id=3, attn_implementation="eager", num_labels=1, classifier_pooling="mean",
        global_attn_every_n_layers=3)
    cls = transformers.ModernBertForSequenceClassification if rank else transformers.ModernBertModel
    model = cls(config)
    base = model.model if rank else model

    def write(f):
        f.w.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
        f.w.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
        f.w.add_sliding_window(config.local_attention)
        f.both("token_embd", base.embeddings.tok_embeddings)
        f.both("token_embd_norm", base.embeddings.norm)
        f.both("output_norm", base.final_norm)
        for i, layer in enumerate(base.layers):
            if i > 0:
                f.both(f"blk.{i}.attn_norm", layer.attn_norm)
            for name, module in [
                ("attn_qkv", layer.attn.Wqkv), ("attn_output", layer.attn.Wo), ("ffn_norm", layer.mlp_norm),
                ("ffn_up", layer.mlp.Wi), ("ffn_down", layer.mlp.Wo),
            ]:
                f.both(f"blk.{i}.{name}", module)
        if rank:
            f.both("cls", model.head.dense)
            f.both("cls.norm", model.head.norm)
            f.both("cls.output", model.classifier)

    classes = (lambda ids: model(input_ids=torch.tensor([ids])).logits[0]) if rank else None
    return rotary(path, "modern-bert", model, base, config, 2, write, classes=classes, rank=rank, vocabulary=vocabulary)


def llama_like(f, model):
    f.both("token_embd", model.embed_tokens)
    f.both("output_norm", model.norm)
    for i, layer in enumerate(model.layers):
        own, mlp = layer.self_attn, layer.mlp
        for name, module in [
            ("attn_q", own.q_proj), ("attn_k", own.k_proj), ("attn_v", own.v_proj), ("attn_output", own.o_proj),
            ("ffn_gate", mlp.gate_proj), ("ffn_up", mlp.up_proj), ("ffn_down", mlp.down_proj),
        ]:
            f.both(f"blk.{i}.{name}", module)


def eurobert(path):
    vocabulary = Vocabulary("uncased")
    config = transformers.EuroBertConfig(
        vocab_size=vocabulary.n, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=128, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 250000.0}, pad_token_id=0)
    model = transformers.EuroBertModel(config)

    def write(f):
        f.w.add_layer_norm_rms_eps(config.rms_norm_eps)
        f.w.add_rope_freq_base(250000.0)
        f.w.add_head_count_kv(2)
        llama_like(f, model)
        for i, layer in enumerate(model.layers):
            f.both(f"blk.{i}.attn_norm", layer.input_layernorm)
            f.both(f"blk.{i}.ffn_norm", layer.post_attention_layernorm)

    return rotary(path, "eurobert", model, model, config, 1, write, eps=False, vocabulary=vocabulary)


def gemma_embedding(path):
    """With the two dense layers that come behind the mean in EmbeddingGemma."""
    vocabulary = Vocabulary("uncased")
    config = transformers.Gemma3TextConfig(
        vocab_size=vocabulary.n, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=48, max_position_embeddings=128, attn_implementation="eager",
        sliding_window=16, layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        query_pre_attn_scalar=16, use_bidirectional_attention=True, pad_token_id=0)
    model = transformers.Gemma3TextModel(config)
    dense = torch.nn.ModuleList([torch.nn.Linear(32, 64, bias=False), torch.nn.Linear(64, 24, bias=False)])
    spread(dense)

    def write(f):
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "norm" in name:
                    p.sub_(1)  # Gemma's norms are counted from one.
        one = lambda module: torch.nn.Parameter(module.weight + 1)
        f.w.add_layer_norm_rms_eps(config.rms_norm_eps)
        f.w.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
        f.w.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
        f.w.add_head_count_kv(1)
        f.w.add_key_length(16)
        f.w.add_value_length(16)
        f.w.add_sliding_window(16)
        f.w.add_sliding_window_pattern([True, True, False])
        f.both("token_embd", model.embed_tokens)
        f.tensor("output_norm.weight", one(model.norm))
        for i, layer in enumerate(model.layers):
            own, mlp = layer.self_attn, layer.mlp
            for name, module in [
                ("attn_q", own.q_proj), ("attn_k", own.k_proj), ("attn_v", own.v_proj), ("attn_output", own.o_proj),
                ("ffn_gate", mlp.gate_proj), ("ffn_up", mlp.up_proj), ("ffn_down", mlp.down_proj),
            ]:
                f.both(f"blk.{i}.{name}", module)
            for name, module in [
                ("attn_norm", layer.input_layernorm), ("post_attention_norm", layer.post_attention_layernorm),
                ("ffn_norm", layer.pre_feedforward_layernorm), ("post_ffw_norm", layer.post_feedforward_layernorm),
                ("attn_q_norm", own.q_norm), ("attn_k_norm", own.k_norm),
            ]:
                f.tensor(f"blk.{i}.{name}.weight", one(module))
        f.both("dense_2", dense[0])
        f.both("dense_3", dense[1])

    golden = rotary(path, "gemma-embedding", model, model, config, 1, write, eps=False, vocabulary=vocabulary)
    with torch.no_grad():
        for case in golden["cases"]:
            states = model(input_ids=torch.tensor([case["ids"]])).last_hidden_state[0]
            for name, vector in poolings(states).items():
                vector = dense[1](dense[0](vector))
                case[name] = numbers(vector / vector.norm())
    return golden


def llama_embed(path):
    """A Llama without a causal mask; queries and keys are in the order of pairs of neighbours."""
    vocabulary = Vocabulary("uncased")
    config = transformers.LlamaConfig(
        vocab_size=vocabulary.n, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=128, attn_implementation="eager", pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    model = transformers.LlamaModel(config)

    def paired(weight):
        heads, dim = 2, weight.shape[0] // 2
        return weight.reshape(heads, 2, dim // 2, -1).transpose(1, 2).reshape(weight.shape)

    def write(f):
        f.w.add_layer_norm_rms_eps(config.rms_norm_eps)
        f.w.add_rope_freq_base(10000.0)
        f.w.add_rope_dimension_count(16)
        f.both("token_embd", model.embed_tokens)
        f.both("output_norm", model.norm)
        for i, layer in enumerate(model.layers):
            own, mlp = layer.self_attn, layer.mlp
            f.tensor(f"blk.{i}.attn_q.weight", paired(own.q_proj.weight))
            f.tensor(f"blk.{i}.attn_k.weight", paired(own.k_proj.weight))
            for name, module in [
                ("attn_v", own.v_proj), ("attn_output", own.o_proj), ("attn_norm", layer.input_layernorm),
                ("ffn_gate", mlp.gate_proj), ("ffn_up", mlp.up_proj), ("ffn_down", mlp.down_proj),
                ("ffn_norm", layer.post_attention_layernorm),
            ]:
                f.both(f"blk.{i}.{name}", module)

    def run(ids):
        n = len(ids)
        return model(input_ids=torch.tensor([ids]), attention_mask=torch.zeros(1, 1, n, n)).last_hidden_state[0]

    return rotary(path, "llama-embed", model, model, config, 1, write, eps=False, run=run, vocabulary=vocabulary)


MODELS = {
    "bert": bert,
    "bert-cased": lambda path: bert(path, "cased", width=32),
    "bert-rank": lambda path: bert(path, rank=True, width=32),
    "xlm-roberta": lambda path: xlm_roberta(path, width=32),
    "xlm-roberta-rank": lambda path: xlm_roberta(path, rank=True),
    "nomic-bert": nomic_bert,
    "nomic-bert-moe": nomic_bert_moe,
    "jina-bert-v2": jina_v2,
    "jina-bert-v2-code": lambda path: jina_v2(path, code=True),
    "jina-bert-v3": jina_v3,
    "modern-bert": modern_bert,
    "modern-bert-rank": lambda path: modern_bert(path, rank=True),
    "eurobert": eurobert,
    "gemma-embedding": gemma_embedding,
    "llama-embed": llama_embed,
}


def main():
    directory, names = Path(sys.argv[1]), sys.argv[2:] or list(MODELS)
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    ranking = {"query": QUERY, "documents": CORPUS, "fits": {}}
    for name in names:
        golden = MODELS[name](directory / f"{name}.gguf")
        fits = golden.pop("fits")
        if name in RANKED:
            ranking["fits"][name] = fits
        (directory / f"{name}.json").write_text(json.dumps(golden, ensure_ascii=False) + "\n")
    kinds = {"uncased": "bert", "cased": "bert-cased", "unigram": "xlm-roberta"}
    cases = {file: [[text, Vocabulary(kind).plain(text)] for text in CASES if text not in LEFT_OUT.get(kind, [])]
             for kind, file in kinds.items()}
    (directory / "ranking.json").write_text(json.dumps(ranking, ensure_ascii=False) + "\n")
    (directory / "tokens.json").write_text(json.dumps(cases, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
