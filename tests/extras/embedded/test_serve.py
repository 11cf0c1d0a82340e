"""`agentrl serve`: its options reach the server, and wrong ones are answered by one line."""

import os

import pytest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.config.rollout import EmbeddedServerConfig
from agentrl.extras.embedded import __main__ as process
from agentrl.extras.embedded import server
from agentrl.extras.embedded.layers import PackedLinear


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)).save_pretrained(folder)
    return str(folder)


def serve(*words):
    done = CliRunner().invoke(app, ["serve", *words], env={"COLUMNS": "300"})
    return done.exit_code, done.output + str(done.exception or "")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {}),
        (
            ["--num-blocks", "64", "--max-batch-tokens", "2048", "--threads", "1", "--quantization", "int8"],
            {"num_blocks": 64, "max_batch_tokens": 2048, "quantization": "int8"},
        ),
    ],
)
def test_options_reach_the_server(model, monkeypatch, options, expected):
    seen = {}
    monkeypatch.setattr(server, "serve", lambda path, **given: seen.update(given) or 0)
    assert serve(model, *options)[0] == 0
    assert seen["config"] == EmbeddedServerConfig(**expected)


def test_the_process_of_a_server_takes_every_setting(model, monkeypatch):
    seen = {}
    monkeypatch.setattr(process, "serve", lambda path, **given: seen.update(given) or 0)
    config = EmbeddedServerConfig(
        num_blocks=7,
        page_size=8,
        max_batch_tokens=9,
        max_requests_per_batch=10,
        max_lora_rank=11,
        threads=12,
        linear_kernels="torch",
        quantization="int8",
    )
    assert set(config.model_fields_set) == set(EmbeddedServerConfig.model_fields)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in config.model_dump().items()]
    assert process.main([model, *words]) == 0
    assert seen["config"] == config


@pytest.mark.parametrize(("asked", "layer"), [("onednn", PackedLinear), ("torch", nn.Linear)])
def test_a_server_uses_the_library_that_was_asked_for(model, monkeypatch, asked, layer):
    class Loaded(Exception):
        pass

    def engine(model, config, **_):
        raise Loaded(model)

    monkeypatch.setattr(server, "Engine", engine)
    with pytest.raises(Loaded) as seen:
        server.serve(model, port=0, config=EmbeddedServerConfig(linear_kernels=asked))
    assert type(seen.value.args[0].lm_head) is layer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-blocks", "0"], "should be greater than or equal to 1"),
        (["--num-blocks", "many"], "should be a valid integer"),
        (["--max-batch-tokens", "-5"], "should be greater than or equal to 1"),
        (["--threads", "0"], "should be greater than or equal to 1"),
        (["--threads", "100000"], f"--threads 100000: this machine has {os.cpu_count()}"),
        (["--dtype", "int4"], "'int4' is not one of"),
        (["--num-blocks", "1000000000"], "a KV cache of num_blocks=1000000000 of 32 tokens needs"),
    ],
)
def test_wrong_options_are_answered_by_one_line(model, options, message):
    status, output = serve(model, "--port", "0", *options)
    assert status != 0
    assert message in output
