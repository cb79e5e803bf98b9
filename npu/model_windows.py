"""Windows of a model's layers, in the words of GGUF and of Hugging Face's config.json.

A window of w tokens counts the row's own: position p sees p - w + 1 to p, in transformers' masks
(`sliding_window_overlay`, 5.24) as in llama.cpp's (`LLAMA_SWA_TYPE_STANDARD`). Which layers have it:

- GGUF: those that `attention.sliding_window_pattern`, a list of one flag for each layer, says. Without that list it is
  not certain: llama.cpp knows no windows in the architectures that rockpage runs, and has different rules for others.
- Mistral's folders: all layers.
- Qwen's: if `use_sliding_window` is set, those that `layer_types` says, or all behind the first `max_window_layers`.
- Llama's: none; transformers' Llama has no windows.
"""

from __future__ import annotations

from collections.abc import Mapping

from .gguf_header import MetaValue
from .keys import Keys

__all__ = ["MOST_LAYERS", "read_windows", "windows_in_gguf"]

MOST_LAYERS = 4096
"""Layers of a model; models have up to some hundred. Bounds what a damaged file can ask for before its tensors are
checked."""

_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_USUAL_WINDOW = 4096  # of MistralConfig, Qwen2Config and Qwen3Config in transformers 5.24, where the key is missing
_USUAL_FULL_LAYERS = 28  # of Qwen2Config and Qwen3Config there
_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_windows(keys: Keys, architecture: str, layers: int, context_length: int) -> tuple[int, ...]:
    """Read each layer's window from GGUF's keys: tokens, 0 for a layer that sees the whole context.

    Raises:
        BadModelFile: a value cannot be.
        UnsupportedModel: there is a window, and it is not certain which layers have it.
    """
    window = keys.integer(f"{architecture}.{_WINDOW}", 0, least=0)
    if not 0 < window < context_length:  # one that holds the whole context hides nothing
        return (0,) * layers
    if not isinstance(keys.value(f"{architecture}.{_PATTERN}"), list):
        keys.refuse(
            f"a sliding window of {window} tokens without a list of the layers that have it ({_PATTERN})",
            "convert it from its Hugging Face folder with rockpage convert, or use a model with full attention",
        )
    sliding = keys.items(f"{architecture}.{_PATTERN}", bool, layers)
    return tuple(window if slides else 0 for slides in sliding)


def windows_in_gguf(keys: Keys, config: Mapping[str, object]) -> dict[str, MetaValue]:
    """Translate a config.json into GGUF's keys, without the architecture in front.

    Args:
        keys: of the config.json.
        config: its content: null is another thing than a key that is missing.

    Raises:
        BadModelFile: a value cannot be, or contradicts another.
        UnsupportedModel: layers of a third kind, or windows in a Llama.
    """
    kind, layers = keys.text("model_type"), keys.integer("num_hidden_layers", most=MOST_LAYERS)
    types = keys.items("layer_types", str, layers) if keys.value("layer_types") is not None else None
    asked = keys.flag("use_sliding_window", False)
    window = _USUAL_WINDOW
    if "sliding_window" in config:
        window = 0 if config["sliding_window"] is None else keys.integer("sliding_window")
    if kind == "mistral":
        sliding = [window > 0] * layers
    elif kind == "llama":
        if asked or _SLIDING in (types or ()):
            keys.refuse("sliding windows in a Llama", "transformers' Llama has none: see which model type it really is")
        sliding = [False] * layers
    elif types is None:
        full = keys.integer("max_window_layers", _USUAL_FULL_LAYERS, least=0)
        sliding = [asked and window > 0 and layer >= full for layer in range(layers)]
    else:
        for other in sorted({*types} - {_SLIDING, _FULL}):
            keys.refuse(f"layers of type '{other}'", f"rockpage runs {_FULL} and {_SLIDING}")
        sliding = [name == _SLIDING for name in types]
        if any(sliding) and not (asked and window):
            keys.contradict(
                "layer_types", types, "use_sliding_window and sliding_window say that no layer has a window"
            )
    if not any(sliding):
        return {_WINDOW: 0}
    return {_WINDOW: window, _PATTERN: sliding}
