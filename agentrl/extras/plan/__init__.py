"""The simulator: the real scheduler on a virtual clock, against modelled servers, ranks and tools."""
