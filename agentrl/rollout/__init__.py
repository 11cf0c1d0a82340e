"""The rollout side: sessions, agent loops and the router to the inference servers."""
