"""Cases that failed before they were mended, by target. They are run before any is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from npu.structured import Structure
from tests.fuzz.gguf_files import GGUFCase
from tests.fuzz.hf_folders import FolderCase
from tests.fuzz.requests import RequestCase
from tests.fuzz.weights_caches import CacheCase

__all__ = ["CORPUS"]

_INFINITE = ("fill", 0, 1 << 20, 0x7C)  # every float16 becomes one
_SPLIT = '{"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": []}}, {"type": "ByteLevel"}]}'
_LETTERS = "{% set a = 'a' * 2000000 %}"
_USER = {"role": "user", "content": "hi"}

CORPUS: Mapping[str, tuple[Any, ...]] = {
    "gguf": (
        GGUFCase("Q5_0", [_INFINITE]),
        GGUFCase("Q8_0", [_INFINITE]),
        GGUFCase("Q4_K", [_INFINITE]),
        GGUFCase("Q6_K", [_INFINITE]),
    ),
    "folders": (
        FolderCase("qwen3", [("generation_config.json", ("set", "top_k", "9" * 400))]),
        FolderCase("qwen3", [("generation_config.json", ("pipe",))]),
        FolderCase("llama", [("chat_template.jinja", ("folder",))]),
        FolderCase("llama", [("config.json", ("set", "vocab_size", "1048576"))]),
        FolderCase("qwen2-shards", [("config.json", ("set", "rope_scaling", '{"type": "yarn", "factor": 5e-324}'))]),
        FolderCase("llama", [("tokenizer_config.json", ("set", "chat_template", r'"\udc00\ud800"'))]),
        FolderCase("llama", [("tokenizer.json", ("set", "pre_tokenizer", _SPLIT))]),
        FolderCase(
            "qwen3", [("tokenizer.json", ("set", "pre_tokenizer", '{"type": "Metaspace", "prepend_scheme": []}'))]
        ),
        FolderCase(
            "llama", [("tokenizer.json", ("set", "post_processor", '{"type": "TemplateProcessing", "single": [NaN]}'))]
        ),
    ),
    "templates": (
        "{{ 'x'.encode('rot13') }}",
        "{{ 'x'.encode('idna') }}",
        "{{ (5).to_bytes(2000000000, 'big') }}",
        "{{ " + "9" * 5000 + " }}",
        "{{ '\\ud800' }}",
        "{{ '\U0001f642' * 1000000 }}",
        "{{ 1|round(2000000, 'ceil') }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{% for m in range(9999) %}{{ f(m) }}{% endfor %}",
        _LETTERS + "{{ a|groupby(a) }}",
        _LETTERS + "{{ a.strip('b' * 1000000 ~ 'a') }}",
        _LETTERS + "{{ a.rsplit('ab' ~ 'a' * 1000000) }}",
    ),
    "structures": (
        Structure.lark('start: /a+/ "a"'),
        Structure.lark("start: (((/a+/){2,100000})+)+"),
    ),
    "requests": (
        RequestCase({}, {"prompt": "a"}, {"messages": 1.5}),
        RequestCase({}, {"prompt": "a"}, {"messages": [_USER], "tools": int}),
        RequestCase({}, {"prompt": "a"}, {"messages": [_USER], "documents": "text"}),
        RequestCase({}, {"prompt": "a"}, {"messages": [_USER], "variables": np.zeros(3)}),
        RequestCase({}, {"prompt": "a", "kv": ["int8"]}, {"messages": [_USER]}),
        RequestCase({}, {"prompt": "a", "overflow": np.zeros((2, 2))}, {"messages": [_USER]}),
        RequestCase({}, {"prompt": "a", "overflow": "slide", "window": 5}, {"messages": [_USER]}),
    ),
    "caches": (
        *(CacheCase([(number, ("pipe",))]) for number in range(6)),
        CacheCase([(0, ("set", "sha256", '"../../../x"'))]),
        CacheCase([(0, ("set", "sha256", r'"\u0000"'))]),
        CacheCase([(0, ("set", "sha256", "[" * 9000 + "]" * 9000))]),
    ),
}
