"""Seeded faults in the C kernels of the tiled decoder, as data; each is compiled before its tests run."""

# ruff: noqa: E501 - a fault is one line
# fmt: off
from __future__ import annotations

from .fault import group

__all__ = ["DENSE_FAULTS"]

DENSE_FAULTS = [
    *group(
        "npu/_dense_body.h",
        "npu/test_tiled_decoder.py",
        ("all blocks have the first one's offsets", "inputs->totals[row * blocks + b];", "inputs->totals[row * blocks];"),
        ("codes are not taken from their zero", "const ints start = (ints){0} - zero * inputs->sums[at];", "const ints start = (ints){0};"),
        ("the second part of a row is the first once more", "quantise_block(part ? rest : x,", "quantise_block(x,"),
        ("what is to be added to is overwritten", "to[i] = add ? to[i] + acc[r][i] : acc[r][i];", "to[i] = acc[r][i];"),
        ("a row of no numbers is none the worse", "inputs->steps[at] += total - total;", "inputs->steps[at] += 0.0f;"),
        ("codes are cut off, not rounded", "code = (code + round) - round;", "code = (float)(int32_t)code;"),
        ("a norm without its epsilon", "/ (float)n + eps)", "/ (float)n)"),
        ("a norm without its weights", "out[i] = x[i] * scale * weight[i];", "out[i] = x[i] * scale;"),
        ("a gate opens by its sigmoid alone", "gate[i] = gate[i] / (1.0f + exponential(x)) * up[i];", "gate[i] = 1.0f / (1.0f + exponential(x)) * up[i];"),
        ("rows of a group have the first one's inputs", "const int64_t row = (int64_t)(first + r);", "const int64_t row = (int64_t)first;"),
        ("the upper columns of a pair are the lower ones", "codes[4 + j] = pairs >> 4;", "codes[4 + j] = pairs & 0x0f;"),
        ("lanes behind the first have its scales", "const uint16_t *scales = matrix->scales + tile * RP_LANES + lane;", "const uint16_t *scales = matrix->scales + tile * RP_LANES;"),
    ),
    *group(
        "npu/_dense_plain.c",
        "npu/test_tiled_decoder.py",
        ("a lane multiplies its first column alone", "(int8_t)codes[4 * lane + i] * four[i]", "(int8_t)codes[4 * lane] * four[i]"),
    ),
    *group(
        "npu/_dense.c",
        "npu/test_tiled_decoder.py",
        ("K and V have inputs of 8 bits", ".norm = layer->attention_norm}, model->hidden, 2, m);", ".norm = layer->attention_norm}, model->hidden, 1, m);"),
        ("rows behind the first eight have their inputs", ".codes = self->inputs.codes + i * parts * self->inputs.columns,", ".codes = self->inputs.codes,"),
        ("rows behind the first eight are written over them", "one->out + (int64_t)i * one->width", "one->out"),
        ("a turn is a mirror", "b * cosine[i] + a * sine[i]", "b * cosine[i] - a * sine[i]"),
        ("all heads have the first one's bias", "x[i] += bias[head * d + i];", "x[i] += bias[i];"),
        ("values have no bias", "layer->v_bias && j < kv_width", "false && j < kv_width"),
        ("heads are not normed in tiles' kernels", "        if (norm)\n            self->kernel->norm(x, norm", "        if (false)\n            self->kernel->norm(x, norm"),
        ("the first unit of a product is never done", "atomic_fetch_add_explicit(&work->next, 1, memory_order_relaxed);", "1 + atomic_fetch_add_explicit(&work->next, 1, memory_order_relaxed);"),
        ("helpers stay at the end", "    rp_threads_stop(&self->threads);\n    free_all(self);", "    free_all(self);"),
        ("whoever asks for one instruction set gets the best", '!strcmp(isa, "auto") || !strcmp(isa, kernels[i]->name)', "true"),
    ),
]
