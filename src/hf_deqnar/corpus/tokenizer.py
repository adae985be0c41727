"""One BPE tokenizer for both languages, with the tokens that non-autoregressive models need."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

# In this order, so that their ids are the defaults of DeqNarConfig.
SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<blank>"]


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer that was saved beside a model, or alone."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # absent, or damaged in any way
        raise ValueError(f"{name} has no tokenizer that can be loaded; save it there with save_pretrained.") from error
    except ImportError as error:  # sentencepiece, for some
        raise ImportError(f"The tokenizer of {name} needs more packages: {' '.join(str(error).split())}") from error


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn byte-level BPE from sentences of both languages.

    Bytes are the alphabet, so any script, emoji or symbol can be written and nothing becomes `<unk>`. Every text closes
    with `</s>`.

    >>> tokenizer = train_tokenizer(["A man.", "Ein Mann."] * 10, vocab_size=300)
    >>> tokenizer.decode(tokenizer("Ein Mann.")["input_ids"], skip_special_tokens=True)
    'Ein Mann.'
    """
    smallest = len(SPECIAL_TOKENS) + 256
    if vocab_size < smallest:
        raise ValueError(f"vocab_size={vocab_size} is too small: 256 bytes and special tokens alone make {smallest}.")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
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
    )
