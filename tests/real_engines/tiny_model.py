"""Writes a small Llama with random weights and a tokeniser of its own as a Hugging Face folder.

    python tiny_model.py FOLDER

For vLLM and SGLang; run in their environments, where torch and transformers are. The vocabulary is the
words ``w0`` to ``w995``, so texts and token ids can be told from each other at a glance.
"""

from __future__ import annotations

import argparse

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
WORDS = 996
CONTEXT = 2048


def write(folder: str) -> None:
    words = [*SPECIAL, *(f"w{number}" for number in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=CONTEXT,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32 each: vLLM's attention on CPU knows no smaller ones
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    write(parser.parse_args().folder)
