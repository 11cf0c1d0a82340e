"""Settings of all tests."""

from hypothesis import settings

# Deterministic examples, and no verdict by the clock: the machine that runs this may be busy.
settings.register_profile("agentrl", derandomize=True, deadline=None)
settings.load_profile("agentrl")

collect_ignore = ["third_party_package"]
"""Its tests run where it is installed: see test_third_party.py."""
