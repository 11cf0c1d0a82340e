"""A package with the interface of reasoning-gym and three generators, for tests on machines without it."""
