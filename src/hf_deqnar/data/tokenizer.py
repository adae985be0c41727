"""Joint BPE tokenizers of both languages, with the special tokens of non-autoregressive models."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

# In this order their ids are the defaults of DeqNarConfig.
SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<blank>"]


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer; errors are one line that names it.

    Args:
        name: folder or Hub id of a model or tokenizer.
    """
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # missing or damaged files
        raise ValueError(f"{name} has no tokenizer that can be loaded; save it there with save_pretrained.") from error
    except ImportError as error:  # such as sentencepiece
        raise ImportError(f"The tokenizer of {name} needs another package: {' '.join(str(error).split())}") from error


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, model_max_length: int | None = None
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer.

    The alphabet is all 256 bytes, so any text can be encoded without `<unk>`. Every digit is a token of its own (with
    the space before it), so that a number is copied digit by digit. `</s>` is appended to every text.

    Args:
        texts: sentences of both languages.
        vocab_size: number of tokens, special ones included.
        model_max_length: tokens to which `truncation=True` truncates a text, such as the `max_source_length` of the
            model's configuration; no limit if None.

    >>> tokenizer = train_tokenizer(["A man.", "Ein Mann."] * 10, vocab_size=300)
    >>> tokenizer.decode(tokenizer("Ein Mann.")["input_ids"], skip_special_tokens=True)
    'Ein Mann.'
    """
    smallest = len(SPECIAL_TOKENS) + 256
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size={vocab_size} is too small: 256 bytes and {len(SPECIAL_TOKENS)} special tokens make {smallest}."
        )
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFC()
    # `pre_tokenizers.Digits` cannot be used: before ByteLevel, a space would be added to every digit; after it, the
    # characters that stand for some bytes, such as the second one of "ü", would count as digits.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=True), pre_tokenizers.Split(Regex("Ġ?[0-9]"), "isolated")]
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = tokenizer.token_to_id("</s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", end)]
    )
    limit = {} if model_max_length is None else {"model_max_length": model_max_length}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
        extra_special_tokens=["<blank>"],
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **limit,
    )
