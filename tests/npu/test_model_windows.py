"""What a config.json and a GGUF file say of layers' windows, without a model behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostcache.errors import BadModelFile, ModelError, UnsupportedModel
from npu.keys import Keys
from npu.model_windows import read_windows, windows_in_gguf

QWEN = {"model_type": "qwen2", "num_hidden_layers": 3}
USED = {**QWEN, "use_sliding_window": True, "sliding_window": 100}
MISTRAL = {"model_type": "mistral", "num_hidden_layers": 3}
SLIDING, FULL = "sliding_attention", "full_attention"

CONFIGS: dict[str, tuple[dict[str, object], tuple[int, int, int]]] = {
    "qwen, not used": ({**QWEN, "sliding_window": 100, "max_window_layers": 0}, (0, 0, 0)),
    "qwen, all": ({**USED, "max_window_layers": 0}, (100, 100, 100)),
    "qwen, behind the first": ({**USED, "max_window_layers": 1}, (0, 100, 100)),
    "qwen, behind 28": (USED, (0, 0, 0)),
    "qwen, listed": ({**USED, "layer_types": [SLIDING, FULL, SLIDING], "max_window_layers": 0}, (100, 0, 100)),
    "qwen, of a usual size": ({**USED, "sliding_window": 4096, "max_window_layers": 0}, (4096,) * 3),
    "qwen, null": ({**USED, "sliding_window": None, "max_window_layers": 0}, (0, 0, 0)),
    "mistral": ({**MISTRAL, "sliding_window": 100}, (100, 100, 100)),
    "mistral, usual": (MISTRAL, (4096, 4096, 4096)),
    "mistral, null": ({**MISTRAL, "sliding_window": None}, (0, 0, 0)),
    "llama": ({"model_type": "llama", "num_hidden_layers": 3, "sliding_window": 100}, (0, 0, 0)),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration_becomes_windows_by_way_of_ggufs_keys(case: str) -> None:
    config, windows = CONFIGS[case]
    translated = windows_in_gguf(Keys(Path("config.json"), config), config)
    keys = Keys(Path("model.gguf"), {f"llama.{key}": value for key, value in translated.items()})
    assert read_windows(keys, "llama", 3, 10_000) == windows


def test_a_window_as_long_as_the_context_is_none() -> None:
    keys = Keys(Path("m"), {"llama.attention.sliding_window": 64, "llama.attention.sliding_window_pattern": [True]})
    assert read_windows(keys, "llama", 1, 65) == (64,)
    assert read_windows(keys, "llama", 1, 64) == (0,)


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        ({**QWEN, "layer_types": [SLIDING, FULL, FULL]}, BadModelFile, "no layer has a window"),
        (
            {**USED, "sliding_window": None, "layer_types": [SLIDING, FULL, FULL]},
            BadModelFile,
            "no layer has a window",
        ),
        ({**USED, "layer_types": [FULL]}, BadModelFile, "a list of 3 of type str"),
        ({**USED, "layer_types": "full"}, BadModelFile, "layer_types' is 'full'"),
        ({**USED, "layer_types": [FULL, FULL, "linear_attention"]}, UnsupportedModel, "layers of type 'linear_att"),
        ({**USED, "model_type": "llama"}, UnsupportedModel, "sliding windows in a Llama"),
        ({**MISTRAL, "sliding_window": -3}, BadModelFile, "sliding_window' is -3"),
        ({**MISTRAL, "num_hidden_layers": 1 << 31}, BadModelFile, "4096 at most"),
    ],
)
def test_what_is_not_certain_is_refused(config: dict[str, object], kind: type[ModelError], message: str) -> None:
    with pytest.raises(kind, match=message):
        windows_in_gguf(Keys(Path("config.json"), config), config)
