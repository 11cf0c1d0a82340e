"""The Search-R1 example: its server by the tool, and a run of its config on a tiny model."""

import json
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import trio

import agentrl
from agentrl.errors import ConfigError, ToolError
from agentrl.extras.search.retrieve import Retrieve
from agentrl.extras.search.search import open_index
from parts.scripted import call, play

EXAMPLES = Path(__file__).parents[3] / "examples"
DOCUMENTS = {
    "id": ["1", "2", "3"],
    "title": ["Bern", "Zürich", "Cats"],
    "text": ["Bern is the capital of Switzerland.", "Zürich is its largest\ncity.", "Cats purr."],
}
KEY = "a-key-of-this-test"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The example's server over three documents."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import retrieval_server
    finally:
        sys.path.remove(str(EXAMPLES))
    corpus = tmp_path_factory.mktemp("corpus") / "documents.parquet"
    pq.write_table(pa.table(DOCUMENTS), corpus)
    index = open_index(str(corpus), "english")
    with served(retrieval_server.make_server(index, key=KEY, port=0)) as url:
        yield url


@contextmanager
def served(server):
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/retrieve"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def config(server, monkeypatch):
    monkeypatch.setenv("RETRIEVAL_KEY", KEY)
    return {"url": server, "top_k": 2, "api_key_env": "RETRIEVAL_KEY"}


def ask(config, query):
    """Return the tool's text for a query."""

    async def once():
        tool = Retrieve(config)
        try:
            return await tool.call({"query": query})
        finally:
            await tool.close()

    return trio.run(once)


def test_passages_are_shown_best_first_as_search_r1_shows_them(config):
    result = ask(config, "capital of Switzerland")
    assert result.text.splitlines()[0] == "Doc 1(Title: Bern) Bern is the capital of Switzerland."
    assert ask(config, "largest city").text.startswith("Doc 1(Title: Zürich) Zürich is its largest city.")
    assert ask({**config, "top_k": 1}, "capital city").metrics == {"num_results": 1.0}
    assert ask({**config, "max_document_chars": 40}, "capital").text == (
        "Doc 1(Title: Bern) Bern is the capital of Switzerlan"
    )
    nothing = ask(config, "zebra")
    assert (nothing.text, nothing.metrics, nothing.is_error) == (
        "no document matches; try other words", {"num_results": 0.0}, False
    )  # fmt: skip


def test_a_server_that_refuses_or_is_not_there_is_the_tool_s_failure(config, monkeypatch):
    with pytest.raises(ToolError, match="status 404"):
        ask({**config, "url": config["url"] + "/no"}, "cats")
    with pytest.raises(ToolError, match=r"127\.0\.0\.1:9"):
        ask({**config, "url": "http://127.0.0.1:9/retrieve"}, "cats")
    monkeypatch.setenv("RETRIEVAL_KEY", "another")
    with pytest.raises(ToolError, match="status 401"):
        ask(config, "cats")


@pytest.mark.parametrize(
    "reply", ["[]", '{"result": []}', '{"result": [{}]}', '{"result": [[{"document": {}}]]}', "no json", "3"]
)
def test_other_replies_are_the_tool_s_failure(reply, config):
    with raw_server(reply) as url, pytest.raises(ToolError):
        ask({**config, "url": url}, "cats")


@pytest.mark.parametrize(
    "document", [{"contents": "Cats\nThey purr."}, {"title": "Cats", "text": "They purr."},
                 {"document": {"contents": '"Cats"\nThey\npurr.'}, "score": 2}]
)  # fmt: skip
def test_forms_of_a_document(document, config):
    with raw_server(json.dumps({"result": [[document]]})) as url:
        assert ask({**config, "url": url}, "cats").text == "Doc 1(Title: Cats) They purr."


@contextmanager
def raw_server(reply):
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(reply.encode())

        def log_message(self, *_):
            return

    with served(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://a/b"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match=r"tool .retrieve.: url: .* is not the URL of a server"):
        Retrieve({"url": url})


def test_brackets_that_are_not_closed_are_one_line():
    with pytest.raises(ConfigError, match=r"tool .retrieve.: url: Invalid IPv6 URL"):
        Retrieve({"url": "http://[::1/retrieve"})


def test_a_model_that_searches_and_answers_is_rewarded(config):
    found = play(
        [[call("retrieve", query="capital of Switzerland")], "<answer>The Bern!</answer>"],
        tools=["retrieve"],
        tool_config={"retrieve": config},
        reward="exact_match",
        ground_truth=["Bern", "Berne"],
    )
    assert "Doc 1(Title: Bern)" in found.messages[-2].content
    assert found.reward == 1.0
    assert not found.action_mask[found.turn_ids < 0].any(), "passages are context"


@pytest.mark.slow
@pytest.mark.usefixtures("one_ray")
def test_the_example_runs_on_a_tiny_model(world, config, tmp_path):
    questions = [
        {"question": f"What is the capital, number {n}?", "golden_answers": ["Bern"]} for n in range(8)
    ]
    source = tmp_path / "questions.jsonl"
    source.write_text("\n".join(map(json.dumps, questions)))
    made = world.start(
        *("data", "hf", str(source), str(tmp_path / "rows"), "--prompt-column", "question"),
        *("--answer-column", "golden_answers", "--data-source", "nq", "--agent", "tool_agent"),
        *("--tools", "retrieve", "--system", "Answer between <answer> and </answer>."),
    )
    assert made.wait() == 0, made.output()
    [rows] = (tmp_path / "rows").glob("*.parquet")
    run = agentrl.load_config(
        str(EXAMPLES / "search_r1.yaml"),
        [
            "size=tiny",
            f"model.path={world.folder}/model",
            f"data.train_files=[{rows}]",
            "data.val_files=[]",
            f"agent.tool_config.retrieve.url={config['url']}",
            "agent.tool_config.retrieve.api_key_env=null",  # Ray's processes have another environment
            f"trainer.run_dir={tmp_path / 'run'}",
            *("trainer.steps=1", "trainer.test_freq=-1", "trainer.save_freq=-1", "tracking.report=false"),
            *("buffer.groups_per_step=2", "rollout.group_size=2", "rollout.num_actors=1"),
            *("agent.max_response_tokens=64", "agent.max_turn_tokens=16", "learner.microbatch_tokens=1024"),
        ],
    )
    result = agentrl.train(run)
    assert result.step == 1
    assert result.counts.is_balanced
    [record] = world.records(tmp_path / "run").train
    assert record["rollout/reward_mean"] == 0.0, "a random model answers nothing"
