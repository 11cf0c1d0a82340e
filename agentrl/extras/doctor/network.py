"""Check `network`: ports, the name of this machine, and proxies."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]  # unknown to typeshed

from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.extras.doctor.subject import Subject
from agentrl.ports import ReservedPort

FEW_PORTS = 10_000
"""A rollout actor has two connections per attempt; closed ones keep their port for a minute."""
SLOW_NAME_S = 1.0
CONNECT_S = 5.0
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
LOOPBACK = ("127.0.0.1", "localhost")
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def diagnose(subject: Subject) -> Iterator[Diagnosis]:
    """Connect to an own port, resolve the own name, and look for proxies between parts of the run."""
    yield judge_ports(_PORT_RANGE.read_text() if _PORT_RANGE.is_file() else "")
    yield _judge_name()
    rollout = subject.config.rollout
    urls = [*rollout.urls, *([rollout.front_url] if rollout.front_url else [])]
    yield judge_proxies(os.environ, [urlsplit(url).hostname or "" for url in urls])


def judge_ports(port_range: str) -> Diagnosis:
    """Connect to a port of this machine, and judge the number of ports for connections.

    port_range: text of `ip_local_port_range`; "": unknown.
    """
    with ReservedPort() as port, socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port.number))
        listener.listen()
        try:
            socket.create_connection(("127.0.0.1", port.number), CONNECT_S).close()
        except OSError as error:
            text = f"no connection to 127.0.0.1:{port.number}: {error}"
            cure = "let the firewall pass the loopback interface: all parts of a run talk through it"
            return Diagnosis("ports", "wrong", text, cure)
    bounds = [int(word) for word in port_range.split() if word.isdigit()]
    if len(bounds) == 2 and bounds[1] - bounds[0] < FEW_PORTS:
        text = f"only {bounds[1] - bounds[0]:,} ports for connections"
        return Diagnosis("ports", "slow", text, "sysctl net.ipv4.ip_local_port_range='15000 60999'")
    return Diagnosis("ports", "ok", "loopback connects; ports are chosen free at every start")


def _judge_name() -> Diagnosis:
    name, start = socket.gethostname(), time.monotonic()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        text = f"{name} has no address ({error}); process groups look for it"
        return Diagnosis("host name", "slow", text, f"add `127.0.1.1 {name}` to /etc/hosts")
    took_s = time.monotonic() - start
    text = f"{name} is {address}"
    if took_s > SLOW_NAME_S:
        cure = f"add `{address} {name}` to /etc/hosts"
        return Diagnosis("host name", "slow", f"{text}, found after {took_s:.1f} s", cure)
    return Diagnosis("host name", "ok", text)


def judge_proxies(environ: Mapping[str, str], servers: Sequence[str]) -> Diagnosis:
    """Judge whether requests to this machine and to the servers would go to a proxy.

    agentrl's own clients ignore proxies. OpenAI clients of agents and SGLang's warm-up obey them.

    Args:
        servers: hosts of `rollout.urls`.
    """
    named = {name: value for name, value in environ.items() if name.lower() in PROXIES and value}
    if not named:
        return Diagnosis("proxies", "ok", "none")
    excepted = next((environ[name] for name in ("no_proxy", "NO_PROXY") if environ.get(name)), "")
    hosts = list(dict.fromkeys([*LOOPBACK, *servers]))
    proxied = [host for host in hosts if not proxy_bypass_environment(host, {"no": excepted})]
    # Names only: the address of a proxy may contain a password.
    text = ", ".join(sorted(named))
    if proxied:
        cure = f"export no_proxy={','.join(dict.fromkeys([*excepted.split(','), *proxied])).strip(',')}"
        text = f"{text} would get what is meant for {', '.join(proxied)}"
        return Diagnosis("proxies", "wrong", text, cure)
    return Diagnosis("proxies", "ok", f"{text}; this machine and the servers are excepted")
