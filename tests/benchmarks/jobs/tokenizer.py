"""A byte-level tokenizer whose tokens are bytes and pairs of bytes, as many as asked for.

The benchmark gives token ids; the tokenizer is there to turn answers into text at the usual cost.
"""

from itertools import islice, product
from pathlib import Path

_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes ``tokenizer.json`` and its configuration; <s> and </s> are 0 and 1."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    single = ["<s>", "</s>", *alphabet]
    merges = list(islice(product(alphabet, alphabet), vocab_size - len(single)))
    tokens = [*single, *(first + second for first, second in merges)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        chat_template=_TEMPLATE,
    ).save_pretrained(folder)
