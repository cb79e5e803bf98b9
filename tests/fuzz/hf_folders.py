"""Hugging Face folders that were sound: values in their JSON change, and files are damaged or become something else."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import save

from npu.bpe import PRE_TOKENIZERS
from tests.fuzz.raw_bytes import Change, change_bytes, changes_of_bytes
from tests.fuzz.values import JSON_TEXTS, TEXTS

__all__ = ["SEEDS", "FolderCase", "folder_cases"]

_WIDTH, _HEADS, _HEAD_DIM = 32, 2, 16
_BYTE_LEVEL = ["<|begin|>", "<|end|>", "<|turn|>", *"abcdĠĊÃ¤", "ab", "<tool>"]
_PIECES = ["<unk>", "<s>", "</s>", *"\u2581abcd", "ab", "<tool>"]
_QWEN_SPLIT = PRE_TOKENIZERS["qwen2"].split


def _tokenizer(tokens: list[str], merges: list[Any], **parts: Any) -> dict[str, Any]:
    bos = {"SpecialToken": {"id": tokens[1], "type_id": 0}}
    return {
        "added_tokens": [
            {"id": number, "content": tokens[number], "special": number < 3} for number in (0, 1, 2, len(tokens) - 1)
        ],
        "normalizer": None,
        "post_processor": {"type": "TemplateProcessing", "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}]},
        "model": {
            "type": "BPE",
            "vocab": {text: number for number, text in enumerate(tokens)},
            "merges": merges,
            "unk_token": tokens[0],
        },
        **parts,
    }


_TOKENIZERS = {
    "plain": _tokenizer(_BYTE_LEVEL, ["a b"], pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False}),
    "split": _tokenizer(
        _BYTE_LEVEL,
        [["a", "b"]],
        normalizer={"type": "NFC"},
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _QWEN_SPLIT}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        },
    ),
    "pieces": _tokenizer(
        _PIECES,
        ["a b"],
        normalizer={
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
    ),
    "metaspace": _tokenizer(
        _PIECES,
        ["a b"],
        pre_tokenizer={"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False},
    ),
}
_ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_theta": 10000.0},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2}},
    "yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0}
    },
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


def _config(family: str, tokens: list[str], rope: str) -> dict[str, Any]:
    return {
        "model_type": family,
        "vocab_size": len(tokens),
        "hidden_size": _WIDTH,
        "intermediate_size": _WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": 1,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": [2],
        **_ROPES[rope],
    }


def _weights(family: str, tokens: list[str]) -> dict[str, np.ndarray[Any, Any]]:
    q, kv = _HEADS * _HEAD_DIM, _HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (q, _WIDTH),
        "self_attn.k_proj": (kv, _WIDTH),
        "self_attn.v_proj": (kv, _WIDTH),
        "self_attn.o_proj": (_WIDTH, q),
        "mlp.gate_proj": (_WIDTH, _WIDTH),
        "mlp.up_proj": (_WIDTH, _WIDTH),
        "mlp.down_proj": (_WIDTH, _WIDTH),
        "input_layernorm": (_WIDTH,),
        "post_attention_layernorm": (_WIDTH,),
    }
    if family == "qwen3":
        shapes |= {"self_attn.q_norm": (_HEAD_DIM,), "self_attn.k_norm": (_HEAD_DIM,)}
    named = {f"model.layers.0.{name}.weight": shape for name, shape in shapes.items()}
    if family == "qwen2":
        named |= {
            f"model.layers.0.self_attn.{name}_proj.bias": (shapes[f"self_attn.{name}_proj"][0],) for name in "qkv"
        }
    named |= {"model.embed_tokens.weight": (len(tokens), _WIDTH), "model.norm.weight": (_WIDTH,)}
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape, np.float32).astype(np.float16) for name, shape in named.items()}


def _seed(family: str, tokenizer: str, rope: str, *, shards: int = 1, template_file: bool = False) -> dict[str, Any]:
    """A folder's files: JSON as Python's values, a safetensors file as its header and its data."""
    tokens = _PIECES if tokenizer in ("pieces", "metaspace") else _BYTE_LEVEL
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    files: dict[str, Any] = {
        "config.json": _config(family, tokens, rope),
        "generation_config.json": {"eos_token_id": [2, 1], "temperature": 0.6, "top_k": 20, "do_sample": True},
        "tokenizer.json": _TOKENIZERS[tokenizer],
        "tokenizer_config.json": {
            "bos_token": tokens[1],
            "eos_token": {"content": tokens[2]},
            "chat_template": [{"name": "default", "template": template}, {"name": "tool_use", "template": template}],
        },
        "special_tokens_map.json": {"unk_token": tokens[0]},
    }
    if template_file:
        del files["tokenizer_config.json"]["chat_template"]
        files["chat_template.jinja"] = template
    weights = list(_weights(family, tokens).items())
    names = ["model.safetensors"] if shards == 1 else [f"model-{number}.safetensors" for number in range(shards)]
    for number, name in enumerate(names):
        raw = save(dict(weights[number::shards]))
        size = int.from_bytes(raw[:8], "little")
        files[name] = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    if shards > 1:
        where = {weight: names[number % shards] for number, (weight, _) in enumerate(weights)}
        files["model.safetensors.index.json"] = {"metadata": {}, "weight_map": where}
    return files


SEEDS = {
    "llama": _seed("llama", "plain", "llama3"),
    "llama-pieces": _seed("llama", "pieces", "linear"),
    "qwen2-shards": _seed("qwen2", "split", "yarn", shards=2),
    "qwen3": _seed("qwen3", "metaspace", "plain", template_file=True),
}
"""Every family, tokenizer, rotation and way to store weights and templates at least once."""

_PICKLED = {seed: pickle.dumps(files) for seed, files in SEEDS.items()}  # the fastest way to a deep copy


@dataclass(frozen=True)
class FolderCase:
    """A seed and what is done to its files, in order: (file, change)."""

    seed: str
    changes: list[tuple[str, Change]] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write the files."""
        files = pickle.loads(_PICKLED[self.seed])
        texts: list[str] = []
        in_values = [change for change in self.changes if change[0] in files and _change_value(files, texts, *change)]
        raw = {name: _to_bytes(content, texts) for name, content in files.items()}
        for name, change in self.changes:
            if (name, change) not in in_values:
                _change_file(folder, raw, name, change)
        for name, data in raw.items():
            (folder / name).write_bytes(data)


def _change_value(files: dict[str, Any], texts: list[str], name: str, change: Change) -> bool:
    """Change a value in a file's JSON; False if the change is none of those."""
    content = files[name][0] if isinstance(files[name], tuple) else files[name]
    match change:
        case ("set", key, text) if isinstance(content, dict):
            content[key] = _placeholder(texts, text)
        case ("put", path, text):
            parent, place = _walk(content, path)
            if parent is not None:
                parent[place] = _placeholder(texts, text)
        case ("letters", path, at, letters):
            parent, place = _walk(content, path)
            if parent is not None and isinstance(parent[place], str):
                old = parent[place]
                parent[place] = old[: at % (len(old) + 1)] + letters + old[at % (len(old) + 1) :]
        case ("rename", path, key):
            parent, place = _walk(content, path)
            if isinstance(parent, dict):
                parent[key] = parent.pop(place)
        case ("drop", path):
            parent, place = _walk(content, path)
            if parent is not None:
                del parent[place]
        case _:
            return False
    return True


def _walk(content: Any, path: Sequence[str | int]) -> tuple[Any, Any]:
    """Go down by keys and by numbers: a container and the key or index of a child; None if there is no such child."""
    parent, place = None, None
    for step in path:
        places = (
            list(content) if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
        )
        if not places or (isinstance(step, str) and step not in places):
            break
        parent, place = content, step if isinstance(step, str) else places[step % len(places)]
        content = content[place]
    return parent, place


def _placeholder(texts: list[str], text: str) -> str:
    """What stands in a document for a text that Python's values cannot express."""
    texts.append(text)
    return f"@{len(texts) - 1}@"


def _to_bytes(content: Any, texts: list[str]) -> bytes:
    if isinstance(content, str):
        return content.encode(errors="surrogatepass")
    if isinstance(content, tuple):
        header, data = _to_bytes(content[0], texts), content[1]
        return len(header).to_bytes(8, "little") + header + bytes(data)
    written = json.dumps(content)
    for number, text in enumerate(texts):
        written = written.replace(f'"@{number}@"', text)
    return written.encode(errors="surrogatepass")


def _change_file(folder: Path, raw: dict[str, bytes], name: str, change: Change) -> None:
    """Change a file's bytes, or leave the file out and put something else in its place."""
    match change:
        case ("gone",):
            raw.pop(name, None)
        case ("folder" | "pipe" | "loop" as kind,) if not os.path.lexists(folder / name):
            raw.pop(name, None)
            make: dict[str, Callable[[Path], None]] = {
                "folder": Path.mkdir,
                "pipe": os.mkfifo,
                "loop": lambda path: path.symlink_to(path.name),
            }
            make[kind](folder / name)
        case _ if name in raw:
            raw[name] = change_bytes(raw[name], change)


# Strategies

_KNOWN_KEYS = {
    "config.json": (
        *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act", "layer_types"),
        *("tie_word_embeddings", "eos_token_id", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window"),
        *("use_sliding_window", "max_window_layers", "quantization_config", "partial_rotary_factor"),
    ),
    "generation_config.json": ("eos_token_id", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    "tokenizer.json": ("model", "added_tokens", "normalizer", "pre_tokenizer", "post_processor"),
    "tokenizer_config.json": ("bos_token", "eos_token", "chat_template", "add_bos_token", "added_tokens_decoder"),
    "special_tokens_map.json": ("bos_token", "pad_token"),
    "model.safetensors": ("__metadata__", "model.norm.weight", "lm_head.weight", "x"),
    "model.safetensors.index.json": ("weight_map", "metadata"),
}


_SEED_NAMES = st.sampled_from(list(SEEDS))
_FILE_NAMES = {seed: st.sampled_from(list(files)) for seed, files in SEEDS.items()}
_KEYS = {name: st.sampled_from(keys) for name, keys in _KNOWN_KEYS.items()}
_OF_FILES = st.tuples(st.sampled_from(["gone", "folder", "pipe", "loop"])) | changes_of_bytes()
_KINDS = st.sampled_from(["set"] * 4 + ["put"] * 4 + ["letters", "rename"] * 2 + ["drop", "file"])
_INDICES, _TOP = st.integers(0, 300), st.just(())
_STEPS = st.lists(_INDICES, min_size=1, max_size=5)
_PLACES: dict[str, st.SearchStrategy[tuple[str, ...]]] = {
    "tokenizer.json": st.sampled_from(
        [
            *((), ("model",), ("model", "vocab"), ("model", "merges"), ("added_tokens",)),
            *(("normalizer",), ("pre_tokenizer",), ("post_processor",)),
        ]
    ),
    "tokenizer_config.json": st.sampled_from([(), ("chat_template",)]),
    "model.safetensors.index.json": st.sampled_from([(), ("weight_map",)]),
}
"""Where to begin in a file, so that its larger parts do not get all the changes."""


@st.composite
def folder_cases(draw: st.DrawFn) -> FolderCase:
    """Any seed with up to three changes."""
    seed = draw(_SEED_NAMES)
    return FolderCase(seed, [_change(draw, seed) for _ in range(draw(_COUNTS))])


def _change(draw: st.DrawFn, seed: str) -> tuple[str, Change]:
    name = draw(_FILE_NAMES[seed])
    kind = "file" if isinstance(SEEDS[seed][name], str) else draw(_KINDS)
    if kind == "file":
        return name, draw(_OF_FILES)
    path = (*draw(_PLACES.get(name, _TOP)), *draw(_STEPS))
    if kind == "drop":
        return name, (kind, path)
    if kind == "rename":
        return name, (kind, path, draw(TEXTS))
    if kind == "letters":
        return name, (kind, path, draw(_INDICES), draw(TEXTS))
    if kind == "set" and name in _KEYS:
        return name, (kind, draw(_KEYS[name]), draw(JSON_TEXTS))
    return name, ("put", path, draw(JSON_TEXTS))


_COUNTS = st.sampled_from([1, 1, 1, 2, 3])
