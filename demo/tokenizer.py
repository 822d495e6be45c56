"""The tokenizer of the built-in model: byte-level BPE in which every digit is a token."""

from collections.abc import Iterable
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE: Final = 512
MAX_TOKENS: Final = 512
BOS, PAD, END = "<|bos|>", "<|pad|>", "<|end|>"
_ROLES: Final = ("<|system|>", "<|user|>", "<|assistant|>")
_CHAT_TEMPLATE: Final = (
    "<|bos|>{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with the merges that serve these texts best."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, END, *_ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=list(_ROLES),
        chat_template=_CHAT_TEMPLATE,
        model_max_length=MAX_TOKENS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def chat_frame(tokenizer: PreTrainedTokenizerFast, *, system: str | None = None) -> tuple[str, str]:
    """What the chat template puts before and after a single question."""
    mark = "\N{REPLACEMENT CHARACTER}"
    messages = [{"role": "user", "content": mark}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, after = str(text).split(mark)
    return before, after
