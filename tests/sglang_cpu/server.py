"""The launcher of a real SGLang on a CPU: the environment of this folder, and the arguments of the packaged
`server=sglang_cpu`.
"""

from agentrl.config.compose import load_config
from agentrl.servers.launch import SGLangServer
from sglang_cpu.environment import built_python


def sglang_on_cpu(*, lora=None, key=None, loads_changes=False, **arguments):
    """Return the launcher, with further arguments of the server; what it serves stays on this machine.

    lora: of adapters to load; key: what requests must carry; loads_changes: of single elements.
    """
    config = load_config(
        "quickstart", ["server=sglang_cpu", f"rollout.sglang.python={built_python()}"]
    ).rollout.sglang
    environment = {**config.env, "HF_HUB_OFFLINE": "1"}
    return SGLangServer(
        config.model_copy(update={"args": {**config.args, **arguments}, "env": environment}),
        "float32",
        api_key=key,
        lora=lora,
        loads_changes=loads_changes,
    )
