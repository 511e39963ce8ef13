"""Writes a small Llama with random weights as GGUF, for llama.cpp's server: under a second, some megabytes.

    python tiny_gguf.py MODEL.gguf [--hidden 64] [--layers 2]

Run where `gguf` and `numpy` can be imported. Its vocabulary is the 256 bytes, so that every text can be
tokenised and every generated token has a text. ``--hidden 512 --layers 8`` makes it slow enough (some
hundred tokens a second on one core) for something to happen in the middle of a generation.
"""

from __future__ import annotations

import argparse

import gguf
import numpy as np

CONTEXT = 2048


def write(path: str, hidden: int, layers: int) -> None:
    heads = max(1, hidden // 64)
    special = [
        (b"<unk>", gguf.TokenType.UNKNOWN),
        (b"<s>", gguf.TokenType.CONTROL),
        (b"</s>", gguf.TokenType.CONTROL),
    ]
    tokens = special + [(f"<0x{byte:02X}>".encode(), gguf.TokenType.BYTE) for byte in range(256)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(2 * hidden)
    writer.add_block_count(layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)

    def weights(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.normal(0, 0.05, shape).astype(np.float32))

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(hidden, np.float32))

    weights("token_embd.weight", len(tokens), hidden)
    weights("output.weight", len(tokens), hidden)
    norm("output_norm.weight")
    for layer in range(layers):
        block = f"blk.{layer}."
        norm(f"{block}attn_norm.weight")
        norm(f"{block}ffn_norm.weight")
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            weights(f"{block}{name}.weight", hidden, hidden)
        for name in ("ffn_gate", "ffn_up"):
            weights(f"{block}{name}.weight", 2 * hidden, hidden)
        weights(f"{block}ffn_down.weight", hidden, 2 * hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--hidden", type=int, default=64, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=2)
    given = parser.parse_args()
    write(given.path, given.hidden, given.layers)
