"""Tiny tokenizers of the two kinds that models have, made on the spot."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = ["the letters of the captain to his sister, from the ice", "a b c", "größer, naïve, 中文字", "hello world"]
SPECIAL = ["<bos>", "<eos>", "<|end|>"]


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-2 and SmolLM2 have: any text, characters may be split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return _wrapped(tokenizer)


@cache
def sentencepiece() -> PreTrainedTokenizerFast:
    """BPE with byte fallback, as Llama 2 has: decoding drops the first blank, unknown characters become byte tokens."""
    characters = sorted({character for text in TEXT for character in text.replace(" ", "▁")} - set("中文字ß"))
    vocabulary = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters, "▁t", "he", "▁the"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(ids, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrapped(tokenizer)


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<|end|>"],
        clean_up_tokenization_spaces=False,
    )


KINDS = {"byte_level": byte_level, "sentencepiece": sentencepiece}
