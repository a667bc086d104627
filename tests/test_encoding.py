"""Prompts and answers as token ids: the text that was written, by tokenizers of every kind."""

from functools import cache

import pytest
import transformers
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from calibrate.errors import CalibrateError
from calibrate.prompts.encoding import Encoder

TEXTS = [
    "Q: 2+2 A: 4", "code 12 34 1234", "x\n    return 12\n        y", "a cafe, a caf\u00e9",
    "a  b   c", "\u65e5\u672c \u20ac", "<|user|> Name a colour<|assistant|> red",
] * 9  # fmt: skip
BOS, EOS = "<s>", "</s>"


def trained(pre, decoder, norm=None, post=None, unk="<unk>", alphabet=(), fallback=False):
    """A tokenizer of Transformers, of byte pairs that are frequent in TEXTS."""
    tokenizer = Tokenizer(models.BPE(unk_token=unk, byte_fallback=fallback))
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    if norm is not None:
        tokenizer.normalizer = norm
    special = ["<unk>", BOS, EOS, *(f"<0x{i:02X}>" for i in range(256) if fallback)]
    trainer = trainers.BpeTrainer(
        special_tokens=special, initial_alphabet=list(alphabet), vocab_size=700,
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.decoder = decoder
    if post is not None:
        tokenizer.post_processor = post
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=unk, bos_token=BOS, eos_token=EOS
    )


def around(before=f"{BOS} ", after=f" {EOS}"):
    """What a tokenizer puts before and after every text."""
    ids = [(BOS, 1), (EOS, 2)]
    return processors.TemplateProcessing(single=f"{before}$A{after}", special_tokens=ids)


def byte_tokenizer(trims, prefix=False, post=None, **options):
    last = processors.ByteLevel(trim_offsets=trims)
    return trained(
        pre_tokenizers.ByteLevel(add_prefix_space=prefix), decoders.ByteLevel(),
        post=processors.Sequence([last, post]) if post else last,
        alphabet=pre_tokenizers.ByteLevel.alphabet(), **options,
    )  # fmt: skip


def word_piece_tokenizer():
    """As BERT's under a causal model: [SEP] ends every text, and no token is named EOS."""
    words = ["[UNK]", "[CLS]", "[SEP]", "cafe", "##e", "code", "12", "##34", "34", "a", "##b"]
    tokenizer = Tokenizer(models.WordPiece({x: i for i, x in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def llama_2_tokenizer():
    spaces = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    pre = pre_tokenizers.Split("\u2581", "merged_with_next")
    decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    norm = normalizers.Sequence(spaces)
    return trained(pre, decoder, norm, around(after=""), fallback=True, alphabet="hryt")


def metaspace_tokenizer(scheme):
    pre = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return trained(pre, decoders.Metaspace(prepend_scheme=scheme))


KINDS = {
    "metaspace": lambda: metaspace_tokenizer("always"),
    "metaspace-first": lambda: metaspace_tokenizer("first"),
    "metaspace-never": lambda: metaspace_tokenizer("never"),
    "llama-2": llama_2_tokenizer,
    "bytes": lambda: byte_tokenizer(trims=False),
    "bytes-trimmed": lambda: byte_tokenizer(trims=True),
    "bytes-around": lambda: byte_tokenizer(trims=True, post=around()),
    "bytes-prefix": lambda: byte_tokenizer(trims=True, prefix=True, post=around(before="")),
    "bytes-nfc": lambda: byte_tokenizer(trims=False, norm=normalizers.NFC()),
    "words": word_piece_tokenizer,
}


@cache
def encoder(kind):
    return Encoder(KINDS[kind](), None, 999)


def spelled(kind, prompt, answer):
    """The tokens of a prompt and of its answer."""
    tokenizer = encoder(kind).tokenizer
    return tuple(tokenizer.convert_ids_to_tokens(x) for x in encoder(kind).pair(prompt, answer))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "words"])
@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("Q: 2+2 A: ", "4"), ("Q: 2+2 A:", " 4"), ("code 12", "34"), ("x\n", "    return"),
        ("a cafe, a caf", "\u00e9"), ("a cafe, a \u65e5", "\u672c"), ("a  ", "b"), ("a ", " b"),
        ("code", " 12</s>"), ("code", "</s>"), ("a \u65e5\u672c", " \u20ac"),
    ],
)  # fmt: skip
def test_ids_are_those_of_the_whole_text(kind, prompt, answer):
    """Except for a space before the text, which some tokenizers add."""
    encode, tokenizer = encoder(kind), encoder(kind).tokenizer
    before, behind = encode.pair(prompt, answer)
    begin = encode.prefix
    assert before[: len(begin)] == begin
    ids = [*before[len(begin) :], *behind]
    assert ids == tokenizer(prompt + answer, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids).removeprefix(" ") == prompt + answer
    of_prompt = tokenizer.decode(before[len(begin) :]).removeprefix(" ")
    assert prompt.startswith(of_prompt)  # no token of the answer
    longer = tokenizer.decode([*before[len(begin) :], *behind[:1]]).removeprefix(" ")
    assert len(longer) > len(prompt) or "\ufffd" in longer  # no token of the prompt is the answer's


@pytest.mark.parametrize(
    ("kind", "prompt", "answer", "before", "behind"),
    [
        ("metaspace", "Q: 2+2 A: ", "4", ["\u2581Q:", "\u25812+2", "\u2581A:"], ["\u25814"]),
        ("metaspace", "code 12", "34", ["\u2581code"], ["\u25811234"]),
        ("bytes-trimmed", "x\n", "    return", ["x"], ["\u010a\u0120\u0120\u0120", "\u0120return"]),
        ("bytes-prefix", "code", " 12", ["\u0120code"], ["\u012012"]),
        ("words", "cafe", "\u00e9", ["[CLS]", "cafe"], ["##e"]),
        ("words", "code 12 ", "34", ["[CLS]", "code", "12"], ["34"]),
        ("words", "code 12", "34", ["[CLS]", "code", "12"], ["##34"]),
        ("words", "code Xy", " z", ["[CLS]", "code", "[UNK]"], ["[UNK]"]),
        ("words", "code Xy", "z 12", ["[CLS]", "code"], ["[UNK]", "12"]),
    ],
)  # fmt: skip
def test_a_token_that_covers_the_end_of_the_prompt_belongs_to_the_answer(
    kind, prompt, answer, before, behind
):
    assert spelled(kind, prompt, answer) == (before, behind)


def test_tokens_that_begin_every_text_are_not_repeated_and_written_ones_are_kept():
    for kind, begin in (("bytes-around", [1]), ("bytes-prefix", []), ("words", [1]),
                        ("llama-2", [1]), ("bytes", [])):  # fmt: skip
        assert encoder(kind).prefix == begin
    for kind in ("bytes-around", "llama-2"):
        before, behind = spelled(kind, "<s>code 12</s>", " 34</s>")
        assert before.count(BOS) == 1  # not another one before it
        assert before[-1] == behind[-1] == EOS
        assert [*before, *behind].count(EOS) == 2
        assert spelled(kind, "<s><s>code", " 12")[0][:2] == [BOS, BOS]  # as it was written
    assert spelled("words", "[CLS] code", " 12 [SEP]") == (["[CLS]", "code"], ["12", "[SEP]"])
    assert encoder("words").pair("code", " a")[0] == [1, 5]  # no [SEP] behind the prompt


def test_a_tokenizer_without_offsets_is_refused():
    with pytest.raises(CalibrateError, match=r"^ByT5Tokenizer .*tokenizer\.json"):
        Encoder(transformers.ByT5Tokenizer(), None, 999)


def test_a_rendered_chat_has_one_bos():
    tokenizer = byte_tokenizer(trims=True, post=around())
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|> {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    user, assistant = ({"role": x, "content": "a"} for x in ("user", "assistant"))
    prompt = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
    before, behind = Encoder(tokenizer, None, 999).pair(prompt, " a")
    own = tokenizer.apply_chat_template([user, assistant], return_dict=False)
    assert [*before, *behind] == own[:-1]  # but for the line's end
    assert before.count(1) == 1
