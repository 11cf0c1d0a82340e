"""Where the gateway listens: on this machine alone by default, else with TLS, and never silently."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import ssl
import subprocess
import sys

import httpx
import pytest
import trio
from pydantic import ValidationError

from agentrl.cluster.user_files import check_files
from agentrl.config.agent import AgentConfig, GatewayConfig
from agentrl.config.schema import Config
from agentrl.errors import ConfigError
from agentrl.extras.gateway.address import listen
from agentrl.extras.gateway.certificates import make_self_signed
from agentrl.extras.gateway.gateway import Gateway

OPEN = {"host": "0.0.0.0", "advertised_host": "localhost"}


class Answers:
    """An attempt whose model is not asked."""

    async def complete(self, request, listener):
        raise AssertionError("only models are listed")

    async def count_tokens(self, request):
        raise AssertionError("only models are listed")


def served(config: GatewayConfig, use):
    """Return what `use(endpoint)` returns in a thread, while a gateway with `config` serves an attempt."""

    async def main():
        async with Gateway(config).open(Answers()) as (endpoint, failures):
            result = await trio.to_thread.run_sync(use, endpoint)
            assert not failures
            return result

    return trio.run(main)


def models(endpoint, **options):
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    return httpx.get(f"{endpoint.base_url}/models", headers=headers, **options).json()["data"][0]["id"]


def test_loopback_is_the_default_and_opens_nothing(caplog):
    def use(endpoint):
        assert endpoint.base_url.startswith("http://127.0.0.1:")
        assert models(endpoint) == "policy"
        rebound = {"Authorization": f"Bearer {endpoint.api_key}", "Host": "rebound.example"}
        return httpx.get(f"{endpoint.base_url}/models", headers=rebound).status_code

    with caplog.at_level(logging.WARNING):
        assert served(GatewayConfig(), use) == 403
    assert not caplog.records


@pytest.mark.parametrize("tls", ["none", "self_signed"])
def test_another_host_says_what_it_opens_and_needs_the_key(caplog, tls):
    def use(endpoint):
        trust = True if endpoint.trusted is None else ssl.create_default_context(cafile=endpoint.trusted)
        assert models(endpoint, verify=trust) == "policy"
        assert httpx.get(f"{endpoint.base_url}/models", verify=trust).status_code == 401
        return endpoint.base_url

    with caplog.at_level(logging.WARNING):
        url = served(GatewayConfig(**OPEN, tls=tls), use)
    assert url.startswith("http://localhost:" if tls == "none" else "https://localhost:")
    (record,) = caplog.records
    assert "has the key of a running attempt may sample" in record.message
    assert ("NOT encrypted" in record.message) == (tls == "none")
    assert "trajectory-" not in record.message


def test_a_program_trusts_the_certificate_by_its_environment_alone(tmp_path):
    """As a command is started: Python's clients read SSL_CERT_FILE."""
    program = "import os, openai; print([m.id for m in openai.OpenAI().models.list()], os.path.exists(os.environ['NODE_EXTRA_CA_CERTS']))"  # noqa: E501

    def use(endpoint):
        env = {"PATH": os.environ["PATH"], **endpoint.environment}
        seen = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60
        )
        with pytest.raises(httpx.ConnectError, match=r"(?i)certificate"):
            models(endpoint, verify=ssl.create_default_context())
        return seen

    seen = served(GatewayConfig(**OPEN, tls="self_signed"), use)
    assert seen.stdout.split() == ["['policy']", "True"], seen.stderr


def test_a_given_certificate_is_used(tmp_path):
    certificate, key = make_self_signed(["localhost"], tmp_path)
    assert (tmp_path / "key.pem").stat().st_mode & 0o077 == 0
    config = GatewayConfig(**OPEN, tls="certificate", certificate=certificate, private_key=key)

    def use(endpoint):
        assert endpoint.environment.keys().isdisjoint({"SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS"})
        return models(endpoint, verify=ssl.create_default_context(cafile=certificate))

    assert served(config, use) == "policy"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"host": "192.0.2.1"}, r"agent.gateway.host='192.0.2.1'"),
        ({"tls": "certificate", "certificate": "no.pem", "private_key": "no.pem"}, "'no.pem'"),
    ],
)
def test_an_address_that_cannot_be_used_is_one_line(config, words):
    with pytest.raises(ConfigError, match=words) as caught:
        trio.run(listen, GatewayConfig(**config))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["192.0.2.1", "http://127.0.0.1", "a" * 70, "a..b"])
def test_a_gateway_that_cannot_listen_is_told_before_any_attempt(host):
    words = rf"^agent.gateway.host='{host}', port=0: .* use an address of this machine"
    with pytest.raises(ConfigError, match=words) as caught:
        Gateway(GatewayConfig(host=host))
    assert "\n" not in str(caught.value)


def test_a_port_that_is_taken_is_told_before_any_attempt():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port={port}: the gateway cannot listen there"):
            Gateway(GatewayConfig(port=port))


def test_processes_of_one_machine_do_not_share_a_port():
    sections = {"agent": {"gateway": {"port": 8000}}, "rollout": {"num_actors": 2}}
    with pytest.raises(ValidationError, match=r"agent.gateway.port=8000 with rollout.num_actors=2"):
        Config.model_validate(sections)
    Config.model_validate(sections | {"cluster": {"address": "auto"}})
    Config.model_validate(sections | {"rollout": {"num_actors": 1}})
    Config.model_validate(sections | {"agent": {"gateway": {"port": 8000, "num_ports": 2}}})


def test_processes_take_the_first_free_port_of_their_range():
    async def main():
        with socket.create_server(("127.0.0.1", 0)) as taken:
            first = taken.getsockname()[1]
            config = GatewayConfig(port=first, num_ports=64)
            opened = [await listen(config) for _ in range(3)]
            ports = [int(one.url.rpartition(":")[2]) for one in opened]
            assert ports == sorted(set(ports))
            assert first < ports[0] <= ports[-1] < first + 64
            with pytest.raises(ConfigError, match=rf"port={ports[0]}: the gateway cannot listen there"):
                await listen(GatewayConfig(port=ports[0]))
            Gateway(config)  # its check finds one that is free
            for listener in itertools.chain.from_iterable(one.listeners for one in opened):
                await listener.aclose()

    trio.run(main)


@pytest.mark.parametrize("port", [0, 65536 - 8 + 1, 65535])
def test_a_range_of_ports_has_a_first_one_and_ends_below_65536(port):
    with pytest.raises(ValidationError, match=rf"num_ports=8 from port={port} on"):
        GatewayConfig(port=port, num_ports=8)
    assert GatewayConfig(port=65536 - 8, num_ports=8).ports[-1] == 65535


@pytest.mark.parametrize(
    "config",
    [{"tls": "certificate"}, {"certificate": "a.pem", "private_key": "b.pem"}, {"certificate": "a.pem"}],
)
def test_a_certificate_is_whole_and_asked_for(config):
    with pytest.raises(ValidationError, match="needs both"):
        GatewayConfig(**config)


def test_a_certificate_is_checked_before_anything_starts(tmp_path):
    certificate, key = make_self_signed(["localhost"], tmp_path)
    files = {"tls": "certificate", "certificate": certificate}
    check_files({}, AgentConfig(gateway={**files, "private_key": key}))
    with pytest.raises(ConfigError, match=r"^agent.gateway: the certificate .* cannot be used"):
        check_files({}, AgentConfig(gateway={**files, "private_key": certificate}))


def test_a_port_can_be_chosen_once():
    async def main():
        first = await listen(GatewayConfig())
        port = int(first.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"port={port}"):
            await listen(GatewayConfig(port=port))
        for listener in first.listeners:
            await listener.aclose()
        again = await listen(GatewayConfig(port=port))
        assert again.url == first.url

    trio.run(main)
