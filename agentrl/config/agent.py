"""Config of agent loops: tools and their limits, MCP servers, budgets."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from agentrl.config.opponents import OpponentConfig, check_names
from agentrl.config.section import Section


class ToolLimits(Section):
    """Limits of one tool."""

    timeout_s: float | None = Field(
        None, gt=0, description="Deadline of one call; None: agent.tool_timeout_s."
    )
    max_concurrent: int | None = Field(
        None, ge=1, description="Concurrent calls per rollout actor; further calls wait. None: no limit."
    )
    max_retries: int = Field(
        2,
        ge=0,
        description="Retries of a call that fails for reasons of infrastructure, if the tool is idempotent.",
    )
    max_output_tokens: int | None = Field(
        None, ge=1, description="Longer output is cut; None: agent.max_tool_output_tokens."
    )
    keep: Literal["head", "tail", "ends"] = Field(
        "ends", description="Which part of an output that is too long is kept; ends: the middle is cut."
    )
    on_failure: Literal["end", "tell"] = Field(
        "end",
        description="If the tool itself fails: end the trajectory with outcome tool_error, or tell the model "
        "that the tool is not available.",
    )
    breaker_failures: int = Field(
        5,
        ge=1,
        description="Consecutive failures, over all trajectories of an actor, that open the circuit breaker.",
    )
    breaker_pause_s: float = Field(
        30.0,
        gt=0,
        description="Seconds for which an open circuit breaker refuses calls before it lets one through.",
    )


class MCPServerConfig(Section):
    """One MCP server: a `command` to start (stdio), or a `url` (streamable HTTP)."""

    command: tuple[str, ...] = Field(
        (), description="Program and arguments of an MCP server that uses stdin and stdout."
    )
    env: dict[str, str] = Field({}, description="Additional environment variables of the command.")
    pass_env: tuple[str, ...] = Field(
        (),
        description="Names of the run's environment variables that are passed to the command (tokens, keys).",
    )
    url: str | None = Field(None, description="URL of an MCP server that uses streamable HTTP.")
    headers_env: dict[str, str] = Field(
        {}, description="HTTP header -> name of the environment variable with its value (tokens, keys)."
    )
    prefix: str | None = Field(
        None, description="Prefix of the names of its tools; None: the server's name and an underscore."
    )
    tools: tuple[str, ...] = Field(
        (), description="Which of its tools are offered, by their original names; (): all."
    )
    per_trajectory: bool = Field(
        False, description="Open a separate session for each trajectory, for servers that keep state."
    )
    start_timeout_s: float = Field(
        30.0, gt=0, description="Deadline for starting the server and listing its tools."
    )

    @model_validator(mode="after")
    def _has_one_address(self) -> MCPServerConfig:
        if bool(self.command) == bool(self.url):
            raise ValueError("an MCP server needs either `command` (stdio) or `url` (streamable HTTP)")
        return self


class GatewayConfig(Section):
    """Where programs reach the policy that they play (`openai_agent`).

    With another host than 127.0.0.1, the gateway can be reached from containers and other nodes, by whoever
    has the key of a running attempt.
    """

    host: str = Field(
        "127.0.0.1",
        description="Address to listen on. 0.0.0.0: all of this machine's; open it to trusted networks only.",
    )
    port: int = Field(
        0, ge=0, le=65535, description="Port of each rollout process; 0: a free one of its own."
    )
    num_ports: int = Field(
        1,
        ge=1,
        description="With `port`: this many from it on, for a firewall. Each rollout process takes the first "
        "that is free.",
    )
    advertised_host: str | None = Field(
        None,
        description="Host in the URL that programs get, such as host.docker.internal; None: `host`, or for "
        "0.0.0.0 the machine's name.",
    )
    tls: Literal["none", "self_signed", "certificate"] = Field(
        "none",
        description="self_signed: each rollout process makes a certificate, and its programs trust it by "
        "their environment; certificate: the given one.",
    )
    certificate: str | None = Field(
        None,
        description="PEM file with the certificate and its chain, on each node; for tls=certificate.",
    )
    private_key: str | None = Field(None, description="PEM file with its key, without a password.")
    stream_tokens: bool = Field(
        True,
        description="Send a streamed answer while its turn is sampled; False: when the turn is complete, "
        "which is less work for servers and rollout processes.",
    )

    @model_validator(mode="after")
    def _check(self) -> GatewayConfig:
        if self.num_ports > 1 and not 0 < self.port <= 65536 - self.num_ports:
            raise ValueError(
                f"num_ports={self.num_ports} from port={self.port} on: give a first port from 1 to "
                f"{65536 - self.num_ports}"
            )
        given = self.certificate is not None and self.private_key is not None
        if (self.tls == "certificate") != given or (self.certificate is None) != (self.private_key is None):
            raise ValueError(
                f"tls={self.tls}: certificate and private_key are for tls=certificate, which needs both"
            )
        return self

    @property
    def ports(self) -> range:
        """The ports to try, one after the other; only 0: any free one."""
        return range(self.port, self.port + self.num_ports)


class AgentConfig(Section):
    """What an agent loop may use and spend."""

    default: str = Field(
        "single_turn_agent",
        description="Agent of rows that name no agent and have no tools_kwargs, interaction_kwargs or "
        "environment_kwargs.",
    )
    plugins: tuple[str, ...] = Field(
        (),
        description="Your own plugins: `file.py` or `package.module`; each class is registered under its "
        "`name`.",
    )
    tools: tuple[str, ...] = Field(
        (), description="Tools offered to tool agents; a row's tools_kwargs may add others."
    )
    tool_config: dict[str, dict[str, Any]] = Field({}, description="Tool name -> its `config` dictionary.")
    tool_limits: dict[str, ToolLimits] = Field({}, description="Tool name -> its limits.")
    mcp_servers: dict[str, MCPServerConfig] = Field(
        {}, description="Name -> MCP server whose tools are offered under a prefix."
    )
    interaction_config: dict[str, dict[str, Any]] = Field(
        {}, description="Interaction name -> its `config` dictionary."
    )
    environment: str | None = Field(
        None,
        description="Environment of rows whose environment_kwargs name none; None: such rows have none.",
    )
    environment_config: dict[str, dict[str, Any]] = Field(
        {}, description="Environment name -> its `config` dictionary."
    )
    agent_config: dict[str, dict[str, Any]] = Field({}, description="Agent name -> its `config` dictionary.")
    opponents: dict[str, OpponentConfig] = Field(
        {},
        description="Name -> a frozen model that agent loops let speak in place of the policy "
        "(docs/agents.md).",
    )
    verl_tool_config: str | None = Field(
        None, description="A tools YAML of verl (`class_name`, `config`, `tool_schema`), unchanged."
    )
    verl_function_tools: str | None = Field(
        None, description="Python file with verl's function tools (`@function_tool`), unchanged."
    )
    verl_interaction_config: str | None = Field(
        None, description="An interactions YAML of verl (`name`, `class_name`, `config`), unchanged."
    )
    gateway: GatewayConfig = Field(
        GatewayConfig(), description="Where programs reach the policy that they play."
    )
    max_turns: int = Field(8, ge=1, description="Maximum assistant turns per trajectory.")
    max_user_turns: int | None = Field(
        None, ge=0, description="Maximum answers of the interaction partner per trajectory; None: no limit."
    )
    max_tool_calls_per_turn: int = Field(
        8, ge=1, description="Maximum tool calls executed per turn; further calls are answered `not run`."
    )
    max_response_tokens: int = Field(
        1024, ge=1, description="Maximum tokens per trajectory after the prompt, including context tokens."
    )
    max_turn_tokens: int | None = Field(
        None, ge=1, description="Maximum tokens sampled per turn; None: the rest of the response."
    )
    max_tool_output_tokens: int = Field(
        512, ge=1, description="Longer tool output is cut in the middle, with a note."
    )
    trajectory_timeout_s: float = Field(600.0, gt=0, description="Deadline of one whole attempt.")
    tool_timeout_s: float = Field(30.0, gt=0, description="Deadline of one tool call.")
    interaction_timeout_s: float = Field(30.0, gt=0, description="Deadline of one reply of an interaction.")
    environment_timeout_s: float = Field(
        60.0, gt=0, description="Deadline of an environment's `start`, and of its `facts`."
    )
    environment_close_timeout_s: float = Field(
        20.0,
        gt=0,
        le=25,
        description="Deadline of an environment's `close`; less than the 30 s that a stopped actor has.",
    )

    @model_validator(mode="after")
    def _names_opponents(self) -> AgentConfig:
        check_names(self.opponents)
        return self
