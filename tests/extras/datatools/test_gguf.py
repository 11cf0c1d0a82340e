"""`agentrl models import`: what is loaded from the folder computes and tokenizes as the original does."""

from __future__ import annotations

import inspect
import json
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Tokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from typer.testing import CliRunner

from agentrl.chat.chat import Chat
from agentrl.cli.app import app
from agentrl.errors import ConfigError, DiskError
from agentrl.extras.datatools.gguf import folder as gguf_folder
from agentrl.extras.datatools.gguf.file import GGUFFile
from agentrl.extras.datatools.gguf.folder import import_gguf
from agentrl.extras.datatools.gguf.tokenizer import SPLITTINGS, read_tokenizer
from parts.gguf_files import (
    CONTROL,
    MERGES,
    TEXT,
    TOKENS,
    USER_DEFINED,
    model_keys,
    rounded,
    stored_tensors,
    tiny_model,
    tokenizer_keys,
    write_gguf,
    write_model,
)

IDS = torch.arange(40).reshape(2, 20) * 7 % 500


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def assert_same_model(loaded, original):
    theirs = dict(original.named_parameters())
    assert {name: parameter.shape for name, parameter in loaded.named_parameters()} == {
        name: parameter.shape for name, parameter in theirs.items()
    }
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
    assert torch.equal(logits(loaded), logits(original))


# -------------------------------------------------------------------------------------------------- the model


@pytest.mark.parametrize(
    ("architecture", "kind", "options"),
    [
        ("llama", Kind.F32, {"attention_bias": True, "mlp_bias": True}),
        ("llama", Kind.F16, {"tie_word_embeddings": True, "head_dim": 32}),
        (
            "llama",
            Kind.Q4_1,
            {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
        ),
        ("qwen2", Kind.Q8_0, {"tie_word_embeddings": True}),
        ("qwen2", Kind.Q5_0, {}),
        ("qwen3", Kind.BF16, {"head_dim": 32, "tie_word_embeddings": True}),
        ("qwen3", Kind.Q4_0, {"head_dim": 16, "attention_bias": True}),
    ],
)
def test_the_folder_computes_what_the_original_computes(tmp_path, architecture, kind, options):
    original = rounded(tiny_model(architecture, **options), kind)
    path = write_model(tmp_path / "model.gguf", architecture, original, kind=kind)
    import_gguf(path, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same_model(loaded, original)
    assert loaded.config.rope_parameters == original.config.rope_parameters
    assert loaded.config.max_position_embeddings == 256


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_transformers_own_reader_finds_the_same_weights(tmp_path, architecture):
    path = write_model(tmp_path / "model.gguf", architecture, tiny_model(architecture), kind=Kind.Q4_1)
    import_gguf(path, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), theirs)


def test_weights_can_be_rounded_to_bfloat16(tmp_path):
    original = tiny_model("qwen2")
    import_gguf(write_model(tmp_path / "model.gguf", "qwen2", original), tmp_path / "out", dtype="bfloat16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    theirs = dict(original.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, theirs[name].to(torch.bfloat16)), name


def test_large_weights_are_split_into_files_with_an_index(tmp_path):
    original = tiny_model("llama")
    path = write_model(tmp_path / "model.gguf", "llama", original)
    import_gguf(path, tmp_path / "out", max_file_bytes=150_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), original)


@pytest.mark.parametrize(
    ("scaling", "keys"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128},
            {"type": "yarn", "factor": 2.0, "original_context_length": 128},
        ),
    ],
)
def test_scaled_positions_are_kept(tmp_path, scaling, keys):
    original = tiny_model("qwen2", rope_parameters={"rope_theta": 10000.0, **scaling})
    path = write_model(
        tmp_path / "model.gguf",
        "qwen2",
        original,
        keys={f"qwen2.rope.scaling.{name}": value for name, value in keys.items()},
    )
    import_gguf(path, tmp_path / "out")
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), original)


LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def frequency_factors(scaling, head_dim):
    """Return the divisors that llama.cpp's converter stores for Llama 3.1, by the formula of its authors."""
    inverse = 1 / scaling["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    lengths = 2 * np.pi / inverse
    context, low, high = (
        scaling[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    smooth = (context / lengths - low) / (high - low)
    between = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    factors = np.where(
        lengths < context / high, 1.0, np.where(lengths > context / low, scaling["factor"], between)
    )
    return factors.astype(np.float32)


def test_the_scaling_of_llama_3_1_is_found_in_its_factors(tmp_path):
    original = tiny_model("llama", head_dim=64, rope_parameters=LLAMA31)
    factors = frequency_factors(LLAMA31, 64)
    path = write_model(tmp_path / "model.gguf", "llama", original, tensors={"rope_freqs.weight": factors})
    import_gguf(path, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.rope_parameters == LLAMA31
    assert_same_model(loaded, original)


def test_other_factors_are_refused(tmp_path):
    original = tiny_model("llama", head_dim=64, rope_parameters=LLAMA31)
    factors = frequency_factors({**LLAMA31, "high_freq_factor": 6.0}, 64)
    path = write_model(tmp_path / "model.gguf", "llama", original, tensors={"rope_freqs.weight": factors})
    assert_refused(tmp_path, path, "rope_freqs.weight are not those of Llama 3.1 and 3.2")


def test_memory_does_not_grow_with_the_model(tmp_path):
    original = tiny_model("llama", vocab_size=300_000, tie_word_embeddings=True)
    path = write_gguf(
        tmp_path / "model.gguf",
        "llama",
        {**model_keys("llama", original), **tokenizer_keys("smollm", size=600)},
        stored_tensors("llama", original),
        kind=Kind.F16,
    )
    tracemalloc.start()
    model = import_gguf(path, tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert model.num_bytes > 70 * 2**20
    assert peak < 50 * 2**20
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), rounded(original, Kind.F16))


# ---------------------------------------------------------------------------------------------- the tokenizer

TEXTS = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.sampled_from(
            [*CONTROL, *USER_DEFINED, "12345", "don't", "I'LL", " \r\n", "\n\n ", "e\u0301", "½", "你好"]
        ),
        st.integers(0, len(TEXT) - 40).map(lambda start: TEXT[start : start + 40]),
    ),
    max_size=6,
).map("".join)


def split_by(pre_tokenizer, *, ignores_merges=False):
    vocab = {token: id for id, token in enumerate(TOKENS)}
    pairs = [tuple(merge.split(" ")) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=ignores_merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_level(*, use_regex):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def splits(pattern, *, use_regex):
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, byte_level(use_regex=use_regex)])


def original_tokenizer(name):
    """Return the tokenizer as its authors define it, from transformers where it has their code."""
    vocab = {token: id for id, token in enumerate(TOKENS)}
    pairs = [tuple(merge.split(" ")) for merge in MERGES]
    if name == "qwen2":
        tokenizer = Qwen2Tokenizer(vocab, pairs, unk_token=None, eos_token=None, pad_token=None)._tokenizer
    elif name == "gpt-2":
        tokenizer = GPT2Tokenizer(vocab, pairs, unk_token=None, bos_token=None, eos_token=None)._tokenizer
    elif name.startswith("llama"):
        pattern = inspect.signature(TikTokenConverter).parameters["pattern"].default
        tokenizer = split_by(splits(pattern, use_regex=False), ignores_merges=True)
    else:
        tokenizer = split_by(splits(r"\p{N}", use_regex=True))  # llama.cpp's patterns for these names
    assert tokenizer.get_vocab_size() == len(TOKENS)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in USER_DEFINED])
    return tokenizer


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Return {name: (the original, the imported one)}."""
    folder = tmp_path_factory.mktemp("tokenizers")
    files = {name: folder / f"{name}.gguf" for name in SPLITTINGS}
    for name, path in files.items():
        keys = {**tokenizer_keys(name, size=600), "tokenizer.ggml.add_bos_token": False}
        write_gguf(path, "llama", keys, {})
    return {
        name: (original_tokenizer(name), read_tokenizer(GGUFFile(path)).tokenizer)
        for name, path in files.items()
    }


DISTINCT = ("gpt-2", "smollm", "qwen2", "llama-bpe")


@pytest.mark.parametrize("name", DISTINCT)
def test_texts_have_the_tokens_of_the_original(tokenizers, name):
    original, imported = tokenizers[name]

    @given(TEXTS)
    @settings(max_examples=100, deadline=None, derandomize=True)
    def check(text):
        ids = original.encode(text).ids
        assert imported.encode(text).ids == ids
        for skip in (True, False):
            assert imported.decode(ids, skip_special_tokens=skip) == original.decode(
                ids, skip_special_tokens=skip
            )

    check()


def test_the_splittings_differ_on_the_vocabulary_of_these_tests(tokenizers):
    """Else the comparison above could not tell one from another."""
    found = {name: tuple(imported.encode(TEXT).ids) for name, (_, imported) in tokenizers.items()}
    assert len({found[name] for name in DISTINCT}) == len(DISTINCT)
    assert found["starcoder"] == found["smollm"]
    assert found["llama3"] == found["llama-v3"] == found["llama-bpe"]


@pytest.mark.parametrize(
    ("architecture", "pre"), [("llama", "smollm"), ("llama", "llama-bpe"), ("qwen2", "qwen2")]
)
def test_transformers_and_agentrl_read_the_same_tokenizer(tmp_path, architecture, pre):
    path = write_model(
        tmp_path / "model.gguf",
        architecture,
        tiny_model(architecture),
        pre=pre,
        keys={"tokenizer.ggml.eot_token_id": 501, "tokenizer.chat_template.tool_use": "tools"},
    )
    import_gguf(path, out := tmp_path / "out")
    plain = Tokenizer.from_file(str(out / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(out)
    ids = plain.encode(TEXT).ids
    assert theirs(TEXT).input_ids == ids
    assert (ids[0] == theirs.bos_token_id) == (pre == "llama-bpe")
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert theirs.model_max_length == 256
    messages = [{"role": "user", "content": "1 + 1?"}]
    text = "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    assert theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == text
    assert (out / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [502, 501]
    chat = Chat.load(str(out))
    assert chat.eos_token_ids == (502, 501)
    assert chat.vocab_size == 505  # without what fills the embeddings up to 512


def test_special_tokens_may_come_first(tmp_path):
    keys = {**tokenizer_keys("smollm", size=600, specials_first=True), "tokenizer.ggml.add_bos_token": True}
    imported = read_tokenizer(GGUFFile(write_gguf(tmp_path / "a.gguf", "llama", keys, {})))
    assert imported.tokenizer.encode("<|im_end|>").ids == [1, 2]
    assert imported.tokenizer.get_vocab_size() == len(TOKENS) + 5
    assert [imported.tokenizer.id_to_token(id) for id in range(5, 505)] == TOKENS


# -------------------------------------------------------------------------------------------- what is refused


def assert_refused(tmp_path, path, *texts, error=ConfigError):
    """Check that the answer is one line with these texts, and that nothing of the folder remains."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(error) as caught:
        import_gguf(path, tmp_path / "out")
    line = str(caught.value)
    assert "\n" not in line
    assert str(tmp_path) in line
    for text in texts:
        assert text in line
    assert sorted(tmp_path.iterdir()) == before


PRE, KIND, EOS = "tokenizer.ggml.pre", "tokenizer.ggml.model", "tokenizer.ggml.eos_token_id"
ALL = tokenizer_keys("smollm", size=512)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"general.architecture": "mamba"}, "'mamba' cannot be imported; known: llama, qwen2, qwen3"),
        ({"llama.block_count": None}, "has no llama.block_count"),
        ({"llama.block_count": 3}, "has no tensor blk.2."),
        ({"llama.block_count": 1}, "has tensors that llama does not have: blk.1.attn_k.weight, "),
        ({"llama.embedding_length": 128}, "token_embd.weight has the shape [512, 64]; the metadata asks for"),
        ({"llama.embedding_length": "64"}, "llama.embedding_length must be of type int: '64'"),
        ({"llama.attention.head_count": 3}, "multiple of the number of attention heads"),
        ({"llama.attention.head_count_kv": [2, 2]}, "head_count_kv must be of type int: [2, 2]"),
        (
            {"llama.attention.value_length": 8},
            "llama.attention.value_length must be the size of a head, 16: 8",
        ),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count must be the size of a head, 16: 8"),
        ({"llama.rope.scaling.type": "longrope"}, "must be none, linear or yarn: 'longrope'"),
        ({"llama.rope.scaling.type": "linear"}, "has no llama.rope.scaling.factor"),
        ({"llama.expert_count": 8}, "llama.expert_count=8 has no equivalent"),
        ({"split.count": 2}, "is one part of several"),
        ({PRE: "tekken"}, "'tekken' cannot be imported; known: gpt-2, smollm, "),
        ({PRE: None}, "has no tokenizer.ggml.pre"),
        ({KIND: "llama"}, "'llama' cannot be imported; known: gpt2"),
        ({EOS: None}, "has no tokenizer.ggml.eos_token_id"),
        ({EOS: 512}, "eos_token_id must be less than the number of tokens, 512: 512"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "merge 'a b c' must be two tokens"),
        ({"tokenizer.ggml.merges": ["a ½½"]}, "vocabulary and merges contradict each other"),
        ({"tokenizer.ggml.merges": [*MERGES, MERGES[0]]}, "the merges contain a pair twice"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "has 512 tokens, but 2 token types"),
        ({"tokenizer.ggml.tokens": [1] * 512}, "tokenizer.ggml.tokens must be a list of str"),
        ({"tokenizer.ggml.tokens": ["!", "!", *ALL["tokenizer.ggml.tokens"][2:]]}, "1 tokens twice"),
    ],
)
def test_a_file_that_cannot_be_imported_is_answered_in_one_line(tmp_path, keys, text):
    path = write_model(tmp_path / "model.gguf", "llama", tiny_model("llama"), pre="smollm", keys=keys)
    assert_refused(tmp_path, path, text)


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"output_norm.weight": None}, "has no tensor output_norm.weight"),
        ({"token_embd.weight": None}, "has no tensor token_embd.weight"),
        ({"blk.0.attn_q.bias": np.zeros(64, np.float32)}, "llama does not have: blk.0.attn_q.bias"),
        (
            {"output_norm.weight": np.full(64, np.nan, np.float32)},
            "output_norm.weight has values that are not finite",
        ),
    ],
)
def test_other_tensors_than_the_model_has_are_refused(tmp_path, tensors, text):
    path = write_model(tmp_path / "model.gguf", "llama", tiny_model("llama"), pre="smollm", tensors=tensors)
    assert_refused(tmp_path, path, text)


def test_more_tokens_than_embeddings_are_refused(tmp_path):
    path = write_model(tmp_path / "model.gguf", "llama", tiny_model("llama", vocab_size=500), pre="smollm")
    assert_refused(tmp_path, path, "505 tokens, but embeddings of 500")


def test_a_file_that_ends_early_is_refused_wherever_it_ends(tmp_path):
    whole = write_model(tmp_path / "model.gguf", "qwen2", tiny_model("qwen2"), kind=Kind.Q8_0).read_bytes()
    path = tmp_path / "part.gguf"
    for size in [*range(4, 300, 11), *range(400, len(whole), 19973), len(whole) - 40]:
        path.write_bytes(whole[:size])
        assert_refused(tmp_path, path, "is damaged or not complete")


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, "cannot be read: No such file"), (b"", "begins with b''"), (b"PK\3\4zip", "is not a GGUF file")],
)
def test_other_files_are_refused(tmp_path, content, text):
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    assert_refused(tmp_path, path, text)


def test_a_folder_that_exists_is_left_alone(tmp_path):
    path = write_model(tmp_path / "model.gguf", "llama", tiny_model("llama"), pre="smollm")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    assert_refused(tmp_path, path, "exists and is not empty")
    assert (tmp_path / "out" / "notes").read_text() == "mine"


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    path = write_model(tmp_path / "model.gguf", "llama", tiny_model("llama"), pre="smollm")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_folder, "_write_tokenizer", full)
    assert_refused(tmp_path, path, "No space left on device", error=DiskError)


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_says_what_it_imported(tmp_path):
    keys = {"general.name": "Tiny", "general.license": "apache-2.0"}
    path = write_model(
        tmp_path / "m.gguf", "qwen3", tiny_model("qwen3", head_dim=16), kind=Kind.Q8_0, keys=keys
    )
    done = CliRunner().invoke(
        app, ["models", "import", str(path), str(tmp_path / "out"), "--dtype", "bfloat16"]
    )
    assert done.exit_code == 0, done.output
    assert "model: Tiny (qwen3), licence: apache-2.0" in done.output
    assert "from F32, Q8_0" in done.output
    assert (
        f"tokenizer: {len(TOKENS) + 5} tokens and {len(MERGES)} merges as in the file, split as qwen2"
        in done.output
    )
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--dtype", "int8"], "unknown dtype 'int8'; known: float32, bfloat16"), ([], "no.gguf")],
)
def test_the_command_refuses_in_one_line(tmp_path, arguments, text):
    done = CliRunner().invoke(
        app, ["models", "import", str(tmp_path / "no.gguf"), str(tmp_path / "out"), *arguments]
    )
    assert isinstance(done.exception, ConfigError)
    assert text in str(done.exception)


def test_without_the_extra_the_command_names_it(tmp_path, monkeypatch):
    for name in [
        name for name in sys.modules if name == "gguf" or name.startswith("agentrl.extras.datatools.gguf")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gguf", None)
    done = CliRunner().invoke(app, ["models", "import", "a.gguf", str(tmp_path / "out")])
    assert "pip install 'agentrl[gguf]'" in str(done.exception)
