"""Playing tasks: session, agent loops in flight, router."""
